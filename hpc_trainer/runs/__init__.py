"""The run folder: every file name and every file format, with one writer each. No torch, no Slurm, no Hydra."""
