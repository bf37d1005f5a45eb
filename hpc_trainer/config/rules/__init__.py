"""What one value, or several that belong together, must keep to; `validate` asks all."""
