"""A look inside one run: a profile while it runs, the last actions of its ranks, and one page with both."""
