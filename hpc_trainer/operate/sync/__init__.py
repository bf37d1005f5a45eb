"""`hpc-trainer sync`: transfer of the runs' metrics to W&B and MLflow (docs/trackers.md)."""
