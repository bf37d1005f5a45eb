"""Rules for one value, or for several that belong together; `validate` checks all of them."""
