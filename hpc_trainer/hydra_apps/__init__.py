"""Inside a Hydra app: our launcher, and what a run tells of the value that its task returned."""
