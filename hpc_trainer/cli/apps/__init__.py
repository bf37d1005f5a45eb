"""Verbs and their options, by what they are for. No logic: each brings what it needs when it is called."""
