"""`data=arrays`: inputs and targets as arrays."""
