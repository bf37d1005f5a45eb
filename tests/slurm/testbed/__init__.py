"""A real Slurm on this machine, for tests: see ``python -m tests.slurm.testbed --help``."""
