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

Exit 74 may be temporary: a run comes back `cluster.max_failures` times after it.

A message says what happened, the rule, the value and the fix, and the nearest legal choice if there is one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any

# C0 but tab and line feed, DEL, C1, and what turns the direction of writing (as names of files in a listing).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return the text with control characters as Python writes them, a backslash and letters."""
    if text.isprintable():  # 100,000 cells of a table: it says so of nearly all, a fifth of the time
        return text
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ExitCode(enum.IntEnum):
    """Exit codes of workers and commands.

    None lies in 126-165 or is 255: the shell, signals and srun own those (sysexits.h gives 74, 75, 78).
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
    """A key, value, group or combination that cannot be; nothing was written."""

    exit_code = ExitCode.USAGE


class IncompatibleResumeError(ConfigError):
    """What the checkpoint was made with and what is here now would not be one training."""


class SubmitError(HpcTrainerError):
    """A submission cannot begin: another one is at work, its frozen code was changed, or its script cannot be."""


class SlurmError(HpcTrainerError):
    """A Slurm command did not do what was asked. `said`: its own words, without ours."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class MissingCommandError(SlurmError):
    """The command is not on PATH. Nobody was asked."""


class SilentError(SlurmError):
    """No answer. The controller may have done what was asked all the same, or do it later."""


class RefusedError(SlurmError):
    """Slurm answered no."""


class NoRoomError(RefusedError):
    """A limit on the number of submitted jobs is reached: later the same job would be accepted."""


class UnclearError(SlurmError):
    """There was an answer, and it cannot be read: what was asked may have been done or not."""


class RunStateError(HpcTrainerError):
    """A sweep or run folder does not hold what it must."""


class UntrustedFileError(RunStateError):
    """A file that another user owns or that others may write: refused, as ssh refuses such keys."""


class RankEnvError(HpcTrainerError):
    """The environment does not say which rank this is, or contradicts itself."""

    exit_code = ExitCode.CONFIG


class LoopError(HpcTrainerError):
    """A person's main(config, run) broke a rule of RunContext; docs/own_loop.md has the rules."""


class DivergedError(HpcTrainerError):
    """Steps in a row had gradients that were not finite. Deterministic: started again it would diverge again."""


class TooLargeError(HpcTrainerError):
    """A rank's memory does not hold a step of the smallest micro-batch. `memory`: its figures, in bytes."""

    def __init__(self, message: str, memory: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.memory = dict(memory or {})


class CheckpointError(HpcTrainerError):
    """A checkpoint could not be written or read."""

    exit_code = ExitCode.STORAGE


class CorruptCheckpointError(CheckpointError):
    """A checkpoint whose bytes differ from its manifest."""


class StorageError(CheckpointError):
    """The file system refused a checkpoint: no space, quota, input/output error."""


class DataError(HpcTrainerError):
    """A data set is missing, unreadable, or smaller than the configuration needs."""

    exit_code = ExitCode.STORAGE


class BrokenPictureError(DataError):
    """A file was read, and is no picture that can be decoded: it is truncated, damaged, or of another format.

    Started again the run would meet it again.
    """

    exit_code = ExitCode.FAILED


class PeerLostError(HpcTrainerError):
    """The connection to another rank broke: it was killed, or its node failed. A rank that raises says so itself."""

    exit_code = ExitCode.STORAGE


class StuckError(HpcTrainerError):
    """A rank showed no sign of life for `monitor.watchdog_s`: a hung collective, or data that never came."""

    exit_code = ExitCode.STORAGE


class NoProgressError(HpcTrainerError):
    """The run was restarted again and again without a new step: going on would only burn the allocation."""

    exit_code = ExitCode.NO_PROGRESS


class LowGoodputError(NoProgressError):
    """Time limits ended attempts that spent less than `cluster.min_goodput` of their time on training."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`Did you mean NAME? `, for a message: the nearest of `known`, whatever the case; nothing if none is near."""
    import difflib  # late: every command and rank imports this module, and few make a mistake

    names = {each.lower(): each for each in known}
    close = difflib.get_close_matches(wrong.lower(), names, n=1)
    return f"Did you mean {names[close[0]]}? " if close else ""


def valid(wrong: str, known: Iterable[str]) -> str:
    """What may stand in place of `wrong`, the nearest first: `Did you mean b? Valid: a, b.`"""
    names = list(known)
    return f"{did_you_mean(wrong, names)}Valid: {', '.join(names)}."
