"""Formats of the monitoring files that a run writes beside its metrics. No torch."""
