"""Fields of a line of submissions.jsonl: each converter returns one value, or raises ValueError or TypeError."""

from __future__ import annotations

import re

from hpc_trainer.runs.layout import is_run_id
from hpc_trainer.runs.record_values import as_count, as_text, as_time, tuple_of


def as_run_ids(value: object) -> tuple[str, ...]:
    """Return a list of run ids as a tuple; each id must be a possible folder name."""
    if isinstance(value, list) and all(isinstance(run_id, str) and is_run_id(run_id) for run_id in value):
        return tuple(value)
    raise ValueError("run_ids is no list of ids of runs")


def as_job_id(value: object) -> str:
    """Return a job id of Slurm (123_4), or a process name (host:pid:time); file names are made of it."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.:-]{1,300}", value):
        return value
    raise ValueError("job_id is no id of a job")


def as_digest(value: object) -> str:
    """Return the digest of the frozen code, which is part of the name of the code's archive."""
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value
    raise ValueError("code is no digest")


CHANGE = {"run_ids": as_run_ids, "changes": tuple_of(as_text), "user": as_text, "time": as_time}
INTENT = {
    "uuid": as_text, "executor": as_text, "hardware": as_text, "run_ids": as_run_ids, "time": as_time, "kind": as_text,
}  # fmt: skip
MAY_INTENT = {
    "parallelism": as_count, "code": as_digest, "after": as_text, "num_attempts": tuple_of(as_count),
    "cluster": as_text, "job_id": as_job_id, "doubt_time": as_time,
}  # fmt: skip
