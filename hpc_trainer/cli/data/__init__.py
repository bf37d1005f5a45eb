"""`hpc-trainer data`: commands on data sets."""
