"""Errors that hpc_trainer raises on purpose, and the exit code of a process that ends with each.

    HpcTrainerError                  exit 1
    ├── ConfigError (ValueError)     exit 2    what the user asked for is not possible
    │   └── IncompatibleResumeError  exit 2    checkpoint and start are of different trainings
    ├── SubmitError                  exit 1    a submission cannot begin, whatever Slurm would say
    ├── SlurmError                   exit 1    a Slurm command did not do what was asked
    │   ├── MissingCommandError      exit 1    there is no such command here
    │   ├── SilentError              exit 1    no answer: too late, or the controller was not reached
    │   ├── RefusedError             exit 1    Slurm answered no
    │   │   └── NoRoomError          exit 1    a limit on the number of submitted jobs is reached
    │   └── UnclearError             exit 1    the answer cannot be read: the request may have been carried out or not
    ├── RunStateError                exit 1    a run folder does not hold what it must
    │   └── UntrustedFileError       exit 1    another user owns the file or may write it
    ├── RankEnvError                 exit 78   the rank environment is incomplete or contradicts itself
    ├── LoopError                    exit 1    the user's main(config, run) broke a rule of RunContext
    ├── DivergedError                exit 1    gradients are NaN or infinite
    ├── TooLargeError                exit 1    a single sample is more than the memory holds
    ├── CheckpointError              exit 74   a checkpoint could not be written or read
    │   ├── CorruptCheckpointError   exit 74   bytes differ from what the manifest says
    │   └── StorageError             exit 74   the file system refused: full, over quota, broken
    ├── DataError                    exit 74   a data set is missing or unreadable
    │   └── BrokenPictureError       exit 1    the content of a picture's file cannot be decoded
    ├── PeerLostError                exit 74   another rank, or its node, is gone
    ├── StuckError                   exit 74   a rank showed no sign of life
    └── NoProgressError              exit 76   started again and again without a new step
        └── LowGoodputError          exit 76   time limits end attempts that hardly train

Exit 74 may be temporary: a run restarts `cluster.max_failures` times after it.

A message says what happened, the rule, the value and the fix, and the nearest legal choice if there is one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any

# C0 except tab and line feed, DEL, C1, and characters that reverse the direction of text (as in file names).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return the text with its control characters as Python escapes: a backslash and letters."""
    if text.isprintable():  # true of nearly all 100,000 cells of a table, and takes a fifth of the time
        return text
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class ExitCode(enum.IntEnum):
    """Exit codes of workers and commands.

    No code is 255 or in 126-165: the shell, signals and srun use those (sysexits.h defines 74, 75, 78).
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    STORAGE = 74
    REQUEUED = 75
    NO_PROGRESS = 76
    CONFIG = 78


class HpcTrainerError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what a command ends with."""

    exit_code: ExitCode = ExitCode.FAILED


class ConfigError(HpcTrainerError, ValueError):
    """A key, value, group or combination that is not valid; nothing was written."""

    exit_code = ExitCode.USAGE


class IncompatibleResumeError(ConfigError):
    """A checkpoint of another training: it was made with settings or data that do not match the present ones."""


class SubmitError(HpcTrainerError):
    """A submission that cannot begin: another one runs, the frozen code was changed, or the script is not valid."""


class SlurmError(HpcTrainerError):
    """A Slurm command that did not do what was asked. `said` is its own output, without text of hpc-trainer."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class MissingCommandError(SlurmError):
    """A Slurm command that is not on PATH. Nothing was sent to Slurm."""


class SilentError(SlurmError):
    """A request without an answer. The controller may still have carried out the request, or may do so later."""


class RefusedError(SlurmError):
    """A request that Slurm refused."""


class NoRoomError(RefusedError):
    """A limit on the number of submitted jobs that is reached; the same job would be accepted later."""


class UnclearError(SlurmError):
    """An answer that cannot be parsed: the request may have been carried out or not."""


class RunStateError(HpcTrainerError):
    """A sweep or run folder without the content that it must have."""


class UntrustedFileError(RunStateError):
    """A file that another user owns or that others may write; it is refused, as ssh refuses such keys."""


class RankEnvError(HpcTrainerError):
    """An environment that does not say which rank this is, or contradicts itself."""

    exit_code = ExitCode.CONFIG


class LoopError(HpcTrainerError):
    """A broken rule of RunContext in a user's main(config, run); docs/own_loop.md lists the rules."""


class DivergedError(HpcTrainerError):
    """Consecutive steps with gradients that are not finite. A deterministic restart would diverge again."""


class TooLargeError(HpcTrainerError):
    """A step of the smallest micro-batch that exceeds a rank's memory. `memory` holds the figures, in bytes."""

    def __init__(self, message: str, memory: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.memory = dict(memory or {})


class CheckpointError(HpcTrainerError):
    """A checkpoint that could not be written or read."""

    exit_code = ExitCode.STORAGE


class CorruptCheckpointError(CheckpointError):
    """A checkpoint whose bytes differ from its manifest."""


class StorageError(CheckpointError):
    """A checkpoint that the file system refused: no space, quota, input/output error."""


class DataError(HpcTrainerError):
    """A data set that is missing, unreadable, or smaller than the configuration needs."""

    exit_code = ExitCode.STORAGE


class BrokenPictureError(DataError):
    """A readable file that cannot be decoded as a picture: it is truncated, damaged, or of another format.

    A restarted run would meet the same file again.
    """

    exit_code = ExitCode.FAILED


class PeerLostError(HpcTrainerError):
    """A lost connection to another rank: it was killed, or its node failed. A rank that raises reports itself."""

    exit_code = ExitCode.STORAGE


class StuckError(HpcTrainerError):
    """A rank without a sign of life for `monitor.watchdog_s` seconds: a hung collective, or data that never came."""

    exit_code = ExitCode.STORAGE


class NoProgressError(HpcTrainerError):
    """A run restarted again and again without a new step; another restart would only waste the allocation."""

    exit_code = ExitCode.NO_PROGRESS


class LowGoodputError(NoProgressError):
    """Attempts, ended by time limits, that spent less than `cluster.min_goodput` of their time on training."""


def did_you_mean(wrong: str, choices: Iterable[str]) -> str:
    """Return `Did you mean NAME? ` with the nearest of `choices`, ignoring case; an empty string if none is near."""
    import difflib  # late: every command and rank imports this module, and few make a mistake

    names = {name.lower(): name for name in choices}
    close = difflib.get_close_matches(wrong.lower(), names, n=1)
    return f"Did you mean {names[close[0]]}? " if close else ""


def valid(wrong: str, choices: Iterable[str]) -> str:
    """Return the legal choices for `wrong` as a message, the nearest first: `Did you mean b? Valid: a, b.`."""
    names = list(choices)
    return f"{did_you_mean(wrong, names)}Valid: {', '.join(names)}."
