"""Number formats of a step."""
