"""Puts the project's folder on the path, for helpers, and keeps the person's own settings out of every test."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
if str(_ROOT) not in sys.path:  # plain "pytest" does not put the project's folder there
    sys.path.insert(0, str(_ROOT))

from tests.unit.slurm.fake_slurm import alone, fake_slurm, no_slurm  # noqa: E402

__all__ = ["alone", "fake_slurm", "no_slurm"]
