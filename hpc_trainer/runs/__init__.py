"""The run folder: every file name, every file format, one writer each. No torch, no Slurm, no Hydra."""
