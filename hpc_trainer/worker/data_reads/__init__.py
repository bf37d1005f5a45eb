"""Reads of a data set as in training, to check and to measure it: `hpc-trainer data check` and `data bench`."""
