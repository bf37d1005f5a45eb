"""Reads a data set as training does, to check it and to measure it: `hpc-trainer data check` and `data bench`."""
