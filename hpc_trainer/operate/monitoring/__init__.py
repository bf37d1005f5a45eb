"""A run's telemetry for the user: evidence for `why`, energy for `results`."""
