"""The run folder, with every file name and format, and the one read model of runs and sweeps. No torch, no Hydra."""
