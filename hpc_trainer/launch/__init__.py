"""Plan and submit: a grid becomes frozen runs, runs of one shape become one array."""
