"""Builders that the tests of training share with those of features."""

from __future__ import annotations

import sys
from pathlib import Path

# They and children import each other by their bare names.
sys.path.append(str(Path(__file__).parents[1] / "training"))
