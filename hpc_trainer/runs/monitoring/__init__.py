"""What a run tells of itself while it works, beside its metrics: formats of the run folder. No torch."""
