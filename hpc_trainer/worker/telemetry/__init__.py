"""Sampling of the counters of one rank, beside its training."""
