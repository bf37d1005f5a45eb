"""Where a rank finds itself: rank environment, process group, stop flag, and the decision at a stop."""
