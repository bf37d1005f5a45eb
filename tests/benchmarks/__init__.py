"""Measured figures: `make bench`. Ratios to a limit measured in the same run; no test depends on a time."""
