"""Batches of samples: their order, and how they are loaded and copied to the device."""
