"""The code at the time of the submit: its files, their owners, and the archive that workers start from."""
