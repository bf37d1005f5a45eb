"""Facts about data files that are read at plan time, without torch."""
