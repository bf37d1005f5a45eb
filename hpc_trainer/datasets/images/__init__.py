"""Pictures of a person's own: where their bytes come from (no torch), and the data set that is made of them."""
