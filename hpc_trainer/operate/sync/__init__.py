"""`hpc-trainer sync`: what runs have logged goes to W&B and MLflow (docs/trackers.md)."""
