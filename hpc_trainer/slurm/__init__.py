"""The only place that runs a Slurm command or reads what one printed. No torch."""
