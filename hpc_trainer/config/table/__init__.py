"""The table of combinations that are refused or allowed: choices, rows, declarations, and the page of the docs."""
