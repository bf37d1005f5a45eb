"""Calls of sbatch: submit a batch script, or ask whether and when it could start. The answer decides the error."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.errors import NoRoomError, RefusedError, SilentError, UnclearError
from hpc_trainer.slurm.commands import LOST, call, submit_environment

# sbatch itself retries a busy controller for minutes; a user does not wait that long.
TIMEOUT_S = 90.0
# sbatch's messages when the controller refused (followed by the text of slurm_errno.c), and its own refusals before it
# asks. Every other failure may come after the job was accepted: a site's wrapper, a kill, a new release.
_REFUSED = re.compile(
    r"Batch job submission failed: .*(?:invalid|requested|not permitted|not available|not allowed|not usable|denied"
    r"|violates|exceed|disabled|too (?:long|many|large|big)|not specified|no such|problem|unspecified error|is not"
    r"|must be|required|specification|expired|in use|can ?not be|\(connect failure\))"
    r"|error: (?:Invalid|Unable to open|unrecognized|Unable to resolve|Script arguments|.* is not a valid)"
    r"|error: (?:QOS|Assoc)[A-Z]\w+"
    r"|fatal: |(?:unrecognized|invalid|ambiguous) option|option .* requires an argument"
    r"|This does not look like a batch script",
    re.IGNORECASE,
)
# A shell's exit codes for a program that was killed (128 + signal), could not be run, or is missing.
_SHELLS_CODES = range(126, 255)
# Reasons of acct_policy.c: a limit on the number of submitted jobs passes with time, the others never do for this job.
_REASON = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")
_SUBMIT_REASON = re.compile(r"\b(?:QOS|Assoc)(?:Max|Grp)Submit")
# slurmctld's own limit, and its general messages without a reason.
_FULL = re.compile(
    r"temporarily unable to accept job|job queue full|Resource temporarily unavailable|job submit limit", re.IGNORECASE
)
# --test-only prints these for drained or powered-down nodes too; sbatch itself would accept the job and wait (22.05).
_OF_NODES = re.compile(
    r"node configuration is not available|nodes are busy|Required nodes? not available", re.IGNORECASE
)


def submit_script(script: Path, *, options: Sequence[str] = (), timeout_s: float = TIMEOUT_S) -> str:
    """Submit a batch script with one sbatch call and return the job id.

    Args:
        options: further command-line options, for example `--begin=now+60`.

    Raises:
        NoRoomError: a submit limit is reached.
        RefusedError: Slurm refused with a known message.
        MissingCommandError: sbatch is not on PATH.
        SilentError, UnclearError: any other failure. The scheduler may have the job.
    """
    code, output, said = _run(["sbatch", *options, str(script)], "", timeout_s)
    message = _error_words(said)
    # The text after the number shows that the number is complete; in a truncated answer it would be another job's id.
    match = re.search(r"Submitted batch job (\d+)\s", output) or re.fullmatch(r"\s*(\d+)(?:;\S+)?\s*\n\s*", output)
    if match:  # whatever happened to sbatch afterwards: it prints this when the controller has accepted the job
        return match[1]
    if code == 0:
        raise UnclearError(
            f"sbatch answered what cannot be read: {output.strip()[:300] or message or 'nothing'!r}. {_AGAIN}"
        )
    if code is None or code < 0 or LOST.search(message):
        raise SilentError(f"sbatch did not hear from the controller: {message or 'no answer'}. {_AGAIN}")
    if code not in _SHELLS_CODES and _has_no_room(message):
        raise NoRoomError(f"no room for more jobs: {message}", message)
    if code in _SHELLS_CODES or not _REFUSED.search(said):
        raise UnclearError(
            f"sbatch ended with code {code} and no refusal of Slurm that is known: {message or 'no words'}. {_AGAIN}"
        )
    raise RefusedError(
        f"sbatch did not accept the job: {message}. Nothing of this array was submitted. (Without a working Slurm "
        "here, cluster=local runs on this machine.)",
        message,
    )


_AGAIN = (
    "The controller may have the job all the same: give the same command again in a minute, it asks Slurm first and "
    "submits only what is missing."
)


def estimate_start(text: str, options: Sequence[str] = ()) -> str | None:
    """Ask Slurm whether and when a script could start; submit nothing.

    Args:
        options: further command-line options, for example `--exclude=n1`; they override the script's options.

    Returns:
        The start, in local time as Slurm prints it; None if Slurm names no start.

    Raises:
        NoRoomError: a submit limit is reached; the job itself may be fine.
        RefusedError: Slurm would refuse the job; the error has Slurm's own message.
        MissingCommandError, SilentError: Slurm gives no answer.
    """
    code, output, errors = _run(["sbatch", "--test-only", *options], text, timeout_s=30.0)
    message = _error_words(errors)
    if code == 0:
        start = re.search(r"to start at (\S+)", f"{output}\n{message}")
        return start[1] if start else None
    if code is None or code < 0 or LOST.search(message):
        raise SilentError(f"sbatch --test-only did not answer: {message}")
    if _has_no_room(message):
        raise NoRoomError(message, message)
    raise RefusedError(message, message)


def is_of_nodes(refusal: RefusedError) -> bool:
    """Return True if `estimate_start` was refused because of the nodes' present state, not the job's request."""
    return bool(_OF_NODES.search(refusal.said))


def _has_no_room(words: str) -> bool:
    reasons = _REASON.findall(words)
    return bool(_SUBMIT_REASON.search(words)) if reasons else bool(_FULL.search(words))


def _run(argv: list[str], text: str, timeout_s: float) -> tuple[int | None, str, str]:
    """Return (exit code or None after `timeout_s`, standard output, standard error)."""
    try:
        done = call(argv, text, {**submit_environment(), "LC_ALL": "C"}, timeout_s)
    except subprocess.TimeoutExpired as error:
        said = bytes(error.stderr or b"").decode(errors="replace")  # bytes also in text mode (CPython issue 87597)
        return None, bytes(error.stdout or b"").decode(errors="replace"), f"{said} (no answer within {timeout_s:g} s)"
    return done.returncode, done.stdout, done.stderr


def _error_words(text: str) -> str:
    """Join sbatch's error lines without their prefix; use all lines if none is marked as an error."""
    marked = [line for line in text.splitlines() if "error:" in line or "failure" in line]
    lines = (re.sub(r"^.*?error:\s*", "", line).strip() for line in marked or text.splitlines())
    return "; ".join(dict.fromkeys(filter(None, lines)))


def megabytes(gigabytes: float) -> int:
    """Return an amount of memory as sbatch takes it, in whole MB."""
    return round(gigabytes * 1024)
