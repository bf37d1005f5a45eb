"""`hpc-trainer find-lr`: a learning-rate range test, its curve, its plot. The ranks: `worker/lr_range.py`."""
