"""The code as it was at submit: its files, their owners, and the archive that workers start from."""
