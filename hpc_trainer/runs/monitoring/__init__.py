"""What runs tell of themselves while they are at work, beside their results: names and formats of the files."""
