"""Commands after the submit: status, logs, cancel, results. Sources in order: run folders, one squeue, one sacct."""
