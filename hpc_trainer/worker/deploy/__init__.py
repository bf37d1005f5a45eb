"""Work of the verbs that take a model out of a run, done in a separate process with torch."""
