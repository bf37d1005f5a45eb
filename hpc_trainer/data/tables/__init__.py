"""`data=table`: rows of a table."""
