"""Environment of a rank: its place in the attempt, process group, stop flag, and the decision at a stop."""
