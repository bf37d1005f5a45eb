"""What verbs that take a model out of a run have done in a process of its own, which has torch."""
