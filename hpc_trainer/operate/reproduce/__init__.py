"""Comparison of two runs of one configuration: their metrics and their environments."""
