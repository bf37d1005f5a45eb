"""`data=hf_dataset`: folders of Hugging Face's `save_to_disk`."""
