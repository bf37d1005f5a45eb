"""Fixtures: a terminal of a given size."""

from tests.unit.cli.screens import on_terminal

__all__ = ["on_terminal"]
