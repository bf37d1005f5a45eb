"""The journals of a run (attempt-000.jsonl and so on), read without hpc_trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

JOURNALS = "attempt-*.jsonl"
"""A pattern of their names."""


def journal_records(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the records of all attempts of the run in `folder`, in order; of one event if it is named."""
    lines = (line for path in sorted(folder.glob(JOURNALS)) for line in path.read_text().splitlines())
    return [record for record in map(json.loads, lines) if event in (None, record["event"])]
