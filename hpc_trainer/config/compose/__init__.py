"""Composition: overrides and files in, one configuration for each point of a grid out."""
