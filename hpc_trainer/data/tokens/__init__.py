"""`data=tokens` and `text_bytes`: text as tokens."""
