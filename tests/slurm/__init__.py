"""Tests that need a real Slurm; the test bed that provides one is in ``testbed``."""
