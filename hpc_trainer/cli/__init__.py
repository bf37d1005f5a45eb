"""The command line: verbs that parse, call one function below, and print. No logic."""
