"""Afterwards: status, logs, cancel, results. Reads run folders first, one squeue second, one sacct last."""
