"""What the machine tells of itself: the host, its GPUs, its energy. No torch; what a counter does not tell is None."""
