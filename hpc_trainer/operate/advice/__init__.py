"""Advice that makes a run cheaper or faster, from its own files: the key, the value, the expected gain."""
