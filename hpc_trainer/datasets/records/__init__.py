"""Data sets of files that hold numbers, tokens or columns."""
