"""The user's pictures: the sources of their bytes (no torch), and the data set made of them."""
