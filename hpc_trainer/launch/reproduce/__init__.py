"""A run started once more, from the code that it had: `hpc-trainer reproduce`."""
