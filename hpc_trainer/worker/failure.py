"""End of a rank by an error: the first failure is recorded, and the run comes back if the error may pass. No torch."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

from hpc_trainer.errors import (
    ConfigError,
    DivergedError,
    ExitCode,
    HpcTrainerError,
    IncompatibleResumeError,
    LowGoodputError,
    PeerLostError,
    StuckError,
)
from hpc_trainer.runs.failure import own_frame, read_failure
from hpc_trainer.runs.files import to_json
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.reading import is_storage_error
from hpc_trainer.runs.shared_folder import claim
from hpc_trainer.runs.states import LOW_GOODPUT
from hpc_trainer.state.journal import log_header
from hpc_trainer.worker.conclude import Stop, conclude_failure

_CAUSES = {
    StuckError.__name__: "stuck",
    PeerLostError.__name__: "peer_lost",
    DivergedError.__name__: "diverged",
    IncompatibleResumeError.__name__: "incompatible_resume",
    ConfigError.__name__: "invalid_config",
    LowGoodputError.__name__: LOW_GOODPUT,
}
_CAUSES_BY_CODE = {int(ExitCode.NO_PROGRESS): "no_progress", int(ExitCode.STORAGE): "storage"}


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a rank that ends by this error."""
    code = error.exit_code if isinstance(error, HpcTrainerError) else ExitCode.FAILED
    code = ExitCode.STORAGE if is_storage_error(error) else code  # an unreadable data set or journal
    return ExitCode.CONFIG if code is ExitCode.USAGE else code


def record_of(stop: Stop, code: ExitCode, **fields: Any) -> dict[str, Any]:
    """Return this rank's record for the failure file, with `type` and `message` among the fields."""
    return {
        "rank": stop.env.rank, "node": stop.env.node, "exit_code": int(code), "time": time.time(),
        "start": log_header(stop.attempt, stop.env.job_id, stop.env.restart_count), **fields,
    }  # fmt: skip


def record_of_error(stop: Stop, error: BaseException) -> dict[str, Any]:
    """Return this rank's record of an exception for the failure file."""
    text = "".join(traceback.format_exception(error))
    frame = own_frame(text, stop.config.trust)
    return record_of(
        stop, exit_code_of(error), type=type(error).__name__,
        message=str(error)[:4000],  # a refused resume names the flag that allows it at its end
        traceback=text[-8000:], **({} if frame is None else {"frame": frame}),
    )  # fmt: skip


def conclude_error(stop: Stop, record: dict[str, Any]) -> None:
    """Record the error of this rank, unless another failed before, and conclude the attempt by the first error."""
    first = record
    try:
        first = _first_failure(stop.paths, stop.attempt, record)
    except OSError as full:  # most likely the disk is full; the journal may still take a line
        print(f"the error could not be recorded: {full}", file=sys.stderr)
    cause = first.get("cause") or _CAUSES.get(first["type"]) or _CAUSES_BY_CODE.get(first["exit_code"], "exception")
    conclude_failure(stop, cause=cause, error=first, is_first=first is record)


def _first_failure(paths: RunPaths, attempt: int, record: dict[str, Any]) -> dict[str, Any]:
    """Record the error if it is the first one, and return the first; later errors mostly follow from that one.

    An example of a later error is "connection closed by peer".
    """
    path = paths.failure(attempt)
    is_first = claim(path, f"{to_json(record)}\n".encode())
    return record if is_first else {**record, **read_failure(path)}
