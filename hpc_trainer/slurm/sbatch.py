"""sbatch: hands a batch script over, or asks whether and when it could start. What was answered decides the error."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.errors import NoRoomError, RefusedError, SilentError, UnclearError
from hpc_trainer.slurm.commands import LOST, call, submit_environment

# sbatch itself asks a busy controller again for minutes; a person does not wait that long.
TIMEOUT_S = 90.0
# How sbatch says that the controller answered no (the words of slurm_errno.c after it), and what it says itself before
# it asks. Whatever else it fails with may come after the job was accepted: a site's wrapper, a kill, a new release.
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
# What a shell exits with for a program that was killed (128 + signal), could not be run, or is not there.
_SHELLS_CODES = range(126, 255)
# Reasons of acct_policy.c: one on the number of submitted jobs passes, the others never do for the same job.
_REASON = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")
_SUBMIT_REASON = re.compile(r"\b(?:QOS|Assoc)(?:Max|Grp)Submit")
# slurmctld's own ceiling, and the general words where no reason is given.
_FULL = re.compile(
    r"temporarily unable to accept job|job queue full|Resource temporarily unavailable|job submit limit", re.IGNORECASE
)
# --test-only says these of drained or powered-down nodes too, where sbatch itself accepts and waits (22.05).
_OF_NODES = re.compile(
    r"node configuration is not available|nodes are busy|Required nodes? not available", re.IGNORECASE
)


def submit_script(script: Path, *, options: Sequence[str] = (), timeout_s: float = TIMEOUT_S) -> str:
    """Submits a batch script by one sbatch and returns the job id.

    Args:
        options: further command-line options, as `--begin=now+60`.

    Raises:
        NoRoomError: a submit limit is reached.
        RefusedError: Slurm answered no, in words that are known.
        MissingCommandError: there is no sbatch.
        SilentError, UnclearError: all else. The scheduler may have the job.
    """
    code, output, said = _run(["sbatch", *options, str(script)], "", timeout_s)
    words = _error_words(said)
    # What follows the number shows that it is whole: of an answer that was cut it is another job's.
    found = re.search(r"Submitted batch job (\d+)\s", output) or re.fullmatch(r"\s*(\d+)(?:;\S+)?\s*\n\s*", output)
    if found:  # whatever became of the command after it: sbatch prints this when the controller has accepted
        return found[1]
    if code == 0:
        raise UnclearError(
            f"sbatch answered what cannot be read: {output.strip()[:300] or words or 'nothing'!r}. {_AGAIN}"
        )
    if code is None or code < 0 or LOST.search(words):
        raise SilentError(f"sbatch did not hear from the controller: {words or 'no answer'}. {_AGAIN}")
    if code not in _SHELLS_CODES and _has_no_room(words):
        raise NoRoomError(f"no room for more jobs: {words}", words)
    if code in _SHELLS_CODES or not _REFUSED.search(said):
        raise UnclearError(
            f"sbatch ended with code {code} and no refusal of Slurm that is known: {words or 'no words'}. {_AGAIN}"
        )
    raise RefusedError(
        f"sbatch did not accept the job: {words}. Nothing of this array was submitted. (Without a working Slurm "
        "here, cluster=local runs on this machine.)",
        words,
    )


_AGAIN = (
    "The controller may have the job all the same: give the same command again in a minute, it asks Slurm first and "
    "submits only what is missing."
)


def estimate_start(text: str, options: Sequence[str] = ()) -> str | None:
    """Asks whether a script could ever run; submits nothing.

    Args:
        options: further command-line options, as `--exclude=n1`; they come before what the script says.

    Returns:
        When it would start, in local time as Slurm prints it; None if it does not say.

    Raises:
        NoRoomError: a submit limit is reached, which says nothing against the job.
        RefusedError: Slurm would refuse it, in its own words.
        MissingCommandError, SilentError: no answer.
    """
    code, output, told = _run(["sbatch", "--test-only", *options], text, timeout_s=30.0)
    words = _error_words(told)
    if code == 0:
        start = re.search(r"to start at (\S+)", f"{output}\n{words}")
        return start[1] if start else None
    if code is None or code < 0 or LOST.search(words):
        raise SilentError(f"sbatch --test-only did not answer: {words}")
    if _has_no_room(words):
        raise NoRoomError(words, words)
    raise RefusedError(words, words)


def is_of_nodes(refusal: RefusedError) -> bool:
    """True if `estimate_start` was refused for what the nodes are now, and not for what the job asks for."""
    return bool(_OF_NODES.search(refusal.said))


def _has_no_room(words: str) -> bool:
    reasons = _REASON.findall(words)
    return bool(_SUBMIT_REASON.search(words)) if reasons else bool(_FULL.search(words))


def _run(argv: list[str], text: str, timeout_s: float) -> tuple[int | None, str, str]:
    """(exit code or None after `timeout_s`, standard output, standard error)."""
    try:
        done = call(argv, text, {**submit_environment(), "LC_ALL": "C"}, timeout_s)
    except subprocess.TimeoutExpired as error:
        said = bytes(error.stderr or b"").decode(errors="replace")  # bytes also in text mode (CPython issue 87597)
        return None, bytes(error.stdout or b"").decode(errors="replace"), f"{said} (no answer within {timeout_s:g} s)"
    return done.returncode, done.stdout, done.stderr


def _error_words(text: str) -> str:
    """The lines that say why, without sbatch's prefix; all of them where none is marked as an error."""
    marked = [line for line in text.splitlines() if "error:" in line or "failure" in line]
    lines = (re.sub(r"^.*?error:\s*", "", line).strip() for line in marked or text.splitlines())
    return "; ".join(dict.fromkeys(filter(None, lines)))


def megabytes(gigabytes: float) -> int:
    """Return an amount of memory as sbatch takes it, in whole MB."""
    return round(gigabytes * 1024)
