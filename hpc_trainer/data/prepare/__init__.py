"""`hpc-trainer data prepare`: conversion of raw pictures and texts to files that train fast, in atomic pieces."""
