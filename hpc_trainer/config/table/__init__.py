"""The table of what goes with what: choices, rows, declarations, and the page of the docs."""
