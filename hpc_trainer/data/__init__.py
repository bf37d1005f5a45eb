"""Domain data: sources of samples, their files, and the verbs that prepare, check and measure them."""
