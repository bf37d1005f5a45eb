"""What a run's telemetry says to a person: evidence for `why`, energy for `results`."""
