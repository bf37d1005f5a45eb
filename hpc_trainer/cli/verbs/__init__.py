"""What verbs print and return, a file each; `cli/apps/` names their options."""
