"""Plan and submit: a grid becomes frozen runs, and runs of one shape become one array."""
