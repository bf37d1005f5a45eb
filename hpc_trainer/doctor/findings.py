"""Form of a finding of `hpc-trainer doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(str, enum.Enum):
    """Verdict of one check."""

    ok = "ok"
    warning = "warning"
    """Works today, and may fail later or for some runs."""
    broken = "broken"
    """Runs fail, or would be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    check: str
    status: Status
    what: str
    """Sentence about the machine, with the value and the rule."""
    why: str = ""
    """Reason why the finding matters; empty if all is well."""
    fix: str = ""
    """Command to type, or request to the site; empty if all is well."""


def ok(check: str, what: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(check=check, status=Status.ok, what=what)


def warning(check: str, what: str, *, why: str, fix: str) -> Finding:
    """Return a finding that may become a problem."""
    return Finding(check=check, status=Status.warning, what=what, why=why, fix=fix)


def broken(check: str, what: str, *, why: str, fix: str) -> Finding:
    """Return a finding that makes runs fail."""
    return Finding(check=check, status=Status.broken, what=what, why=why, fix=fix)
