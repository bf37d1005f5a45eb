"""Text and JSON of a ledger, as commands print it (docs/json.md)."""

from __future__ import annotations

from typing import Any

from hpc_trainer.runtime.spans import Kind
from hpc_trainer.state.monitoring.ledger import AttemptLedger, RunLedger, TimedOut

WORDS = {
    Kind.step: "steps", Kind.program: "program", Kind.data_wait: "data wait", Kind.redone: "redone steps",
    Kind.compile: "compilation", Kind.evaluation: "evaluation", Kind.save_stall: "waiting for saves",
    Kind.start_up: "start-up", Kind.imports: "imports", Kind.rendezvous: "rendezvous", Kind.restore: "restore",
    Kind.hang: "hang", Kind.shutdown: "shutdown",
}  # fmt: skip
"""Kind of time -> its text, in the order in which the kinds are shown."""


def ledger_line(ledger: RunLedger) -> str | None:
    """Return the shares of a ledger's time, largest first; None if it has no time.

    An example: `of 3 h 12 min: 81 % steps, 9 % data wait, 6 % redone steps`. Shares under half a percent are left out.
    """
    if ledger.elapsed_s <= 0:
        return None
    shares = [(WORDS[kind], seconds / ledger.elapsed_s) for kind, seconds in ledger.seconds.items()]
    shares.append(("unknown", ledger.unknown_s / ledger.elapsed_s))
    parts = [f"{share:.0%}".replace("%", " %") + f" {word}" for word, share in _largest(shares) if share >= 0.005]
    return f"of {duration(ledger.elapsed_s)}: {', '.join(parts)}"


def _largest(shares: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(shares, key=lambda share: -share[1])


def timed_out_words(found: TimedOut, time_limit_min: int) -> str:
    """Return a clause with the number of attempts that the time limit ended, and the training share of their time."""
    share = f"{found.share:.1%}".replace("%", " %")
    return (
        f"the time limit of {time_limit_min} min ended its last {found.count} attempts, and {share} of their "
        f"{duration(found.elapsed_s)} was training"
    )


def duration(seconds: float) -> str:
    """Return a duration as text: `3 h 12 min`, `3 min 20 s` or `12 s`."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {secs} s" if minutes else f"{secs} s"


def ledger_json(ledger: RunLedger) -> dict[str, Any]:
    """Return the stable JSON form of a run's ledger."""
    return {
        **_part(ledger), "goodput": None if ledger.goodput is None else round(ledger.goodput, 4),
        "gpu_s": round(ledger.gpu_seconds, 3),
        "attempts": [{"attempt": item.attempt, "job_id": item.job_id, **_part(item)} for item in ledger.attempts],
    }  # fmt: skip


def _part(ledger: RunLedger | AttemptLedger) -> dict[str, Any]:
    return {
        "elapsed_s": round(ledger.elapsed_s, 3),
        "is_by_slurm": ledger.is_by_slurm,
        "seconds": {kind.value: round(ledger.seconds[kind], 3) for kind in WORDS if kind in ledger.seconds},
        "unknown_s": round(ledger.unknown_s, 3),
    }
