"""Optimizers, their learning rates, gradients that are clipped, steps that are skipped."""
