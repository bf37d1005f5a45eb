"""`hpc-trainer find-lr`: a learning-rate range test, its curve, its plot. Its ranks run `worker/lr_range.py`."""
