"""What would make a run cheaper or faster, by what was seen of it: the key, the value, the expected gain."""
