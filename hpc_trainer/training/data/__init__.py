"""Batches: which samples, in what order, how they are loaded and handed to the device."""
