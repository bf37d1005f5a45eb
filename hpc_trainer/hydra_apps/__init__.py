"""Our launcher inside a Hydra app, and the record of the value that a run's task returned."""
