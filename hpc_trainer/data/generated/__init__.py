"""`data=synthetic_images` and `synthetic_tokens`: samples that are generated, not read."""
