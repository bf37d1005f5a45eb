"""Data sets from files of numbers, tokens or columns."""
