"""Read models of the monitoring files of runs, for every command. No torch."""
