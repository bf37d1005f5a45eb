"""Verification of runs: recovery from interruptions, equal bits after them, repetition of old runs, learning rates.

Only `probe` and `lr_range` import torch: they are parts of a rank, which `worker/attempt.py` loads by name.
"""
