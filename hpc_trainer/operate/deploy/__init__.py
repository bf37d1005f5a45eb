"""A model taken out of its run: exported, evaluated, asked for predictions."""
