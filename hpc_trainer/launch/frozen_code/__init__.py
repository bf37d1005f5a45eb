"""The code as it stood at submit: which files, whose they are, and the archive that workers start from."""
