"""What can happen to a run on Slurm, one small function each, and one check for all."""
