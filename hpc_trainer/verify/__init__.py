"""Verification of runs: recovery from interruptions, equal bits after them, repetition of old runs, learning rates.

`find_lr`, `interruptions`, `old_code`, `own_runs`, `preempt`, `reproduce` and `resume` run on the login node, without
torch. `probe` and `lr_range` are parts of a rank, which `worker/attempt.py` loads by name.
"""
