"""`hpc-trainer data`: verbs about data sets."""
