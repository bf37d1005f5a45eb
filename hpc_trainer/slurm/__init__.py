"""The only package that runs Slurm commands or parses their output. No torch."""
