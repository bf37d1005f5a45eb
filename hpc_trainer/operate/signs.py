"""What a failed run's last words mean, and what helps: for `why` and the report."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.operate.verdicts import REFUSALS
from hpc_trainer.state.last_words import sign_of
from hpc_trainer.state.status import RunStatus


@dataclass(frozen=True, slots=True)
class Meaning:
    """`says`: without a full stop. `advice`: {run} is filled in, and {found} is what the words name."""

    says: str
    advice: tuple[str, ...]
    found: str


def meaning_of(run: RunStatus) -> Meaning | None:
    """Of what it said or printed last; None where that tells nothing, or is told in words of its own."""
    error = run.error
    if not run.state.has_failed or run.cause in REFUSALS:
        return None
    found = sign_of([*last_lines(run), f"{error.get('type', '')}: {error.get('message', '')}"])
    if found is None:
        return None
    sign, named = found
    return Meaning(sign.says.replace("{found}", named), sign.advice, named)


def last_lines(run: RunStatus) -> list[str]:
    """What its job or program printed last, where that is known to be of its end."""
    return str(run.error.get("output", "")).splitlines()
