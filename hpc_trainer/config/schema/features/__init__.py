"""Sections of single features, one dataclass each (`hpc_trainer/features/`)."""
