"""Output and exit codes of commands, one file per command; `cli/apps/` has their options."""
