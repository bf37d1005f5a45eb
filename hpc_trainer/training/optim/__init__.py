"""Optimizers, learning rates, gradient clipping, and skipped steps."""
