"""Command line: commands that parse, call one function of a lower layer, and print. No logic."""
