"""Counters of the machine: the host, its GPUs, its energy. No torch; a value that a counter does not give is None."""
