"""A look inside one run: a profile while it is at work, what its ranks did last, and one page of all of it."""
