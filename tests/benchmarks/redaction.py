"""How long secrets are looked for in 1 MB of the worst texts: processor time, as `re` lets no other thread work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from hpc_trainer.record import redaction
from hpc_trainer.record.redaction import Redaction
from tests.unit.record.test_redaction import WORST

LENGTH, REPEATS, BUDGET_S = 1_000_000, 5, 0.1
_SHOWN = 5


def run() -> None:
    """Prints the slowest texts: medians and range over 5 rounds."""
    source = Path(redaction.__file__).read_text()
    pieces = {repr(piece): piece for piece in WORST} | {"(source code)": source}
    rows = []
    for label, piece in pieces.items():
        for end in ("", "=x;", "\n"):
            text = piece * (LENGTH // len(piece)) + end
            for way in (Redaction.text, Redaction.code):
                times = [_seconds(way, text) for _ in range(REPEATS)]
                rows.append((statistics.median(times), min(times), max(times), f"{label} {end!r} {way.__name__}"))
    print(f"\n{'redaction of 1 MB':<44} {'CPU s':>7} {'min':>7} {'max':>7} {'budget s':>9}   n={REPEATS}")
    for median, least, most, label in sorted(rows, reverse=True)[:_SHOWN]:
        print(f"{label:<44} {median:>7.3f} {least:>7.3f} {most:>7.3f} {BUDGET_S:>9.1f}")


def _seconds(way: Callable[[Redaction, str], str], text: str) -> float:
    begin = time.process_time()
    way(Redaction(), text)
    return time.process_time() - begin


if __name__ == "__main__":
    run()
