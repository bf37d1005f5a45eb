"""Second start of a run from its original code: `hpc-trainer reproduce`."""
