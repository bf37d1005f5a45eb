"""Puts the project's folder on the path, for helpers."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[3])
if _ROOT not in sys.path:  # plain "pytest" does not put the project's folder there
    sys.path.insert(0, _ROOT)
