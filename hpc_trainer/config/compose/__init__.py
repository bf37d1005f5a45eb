"""Words and files in, one composed configuration for each point of a grid out."""
