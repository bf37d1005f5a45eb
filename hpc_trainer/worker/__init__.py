"""One rank of one attempt: who am I, run the training, and what to do at its end."""
