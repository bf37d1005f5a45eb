"""Starts the two ranks of a test and hears what each of them said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def two_ranks_say(child: str, folder: Path, timeout_s: float = 120) -> list[dict[str, Any]]:
    """Runs `child` (a file beside this one) as rank 0 and rank 1; what they wrote to said-<rank>.json in `folder`."""
    path = Path(__file__).with_name(child)
    ranks = [subprocess.Popen([sys.executable, str(path), str(rank), str(folder)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=timeout_s) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]
