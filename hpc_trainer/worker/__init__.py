"""One rank of one attempt: its identity, its training, and the actions at its end."""
