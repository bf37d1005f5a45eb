"""State of runs and sweeps: one read model, which launch and operate share."""
