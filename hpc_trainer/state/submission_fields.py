"""The fields of a line of submissions.jsonl: each reads one value, or raises ValueError or TypeError."""

from __future__ import annotations

import re

from hpc_trainer.runs.layout import is_run_id
from hpc_trainer.runs.record_values import as_count, as_text, as_time, tuple_of


def as_run_ids(value: object) -> tuple[str, ...]:
    """Ids of runs: each may be the name of a folder."""
    if isinstance(value, list) and all(isinstance(each, str) and is_run_id(each) for each in value):
        return tuple(value)
    raise ValueError("run_ids is no list of ids of runs")


def as_job_id(value: object) -> str:
    """Slurm's, as 123_4, or a process's name, as host:pid:time: the names of files are made of it."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.:-]{1,300}", value):
        return value
    raise ValueError("job_id is no id of a job")


def as_digest(value: object) -> str:
    """Of the frozen code: the name of its archive is made of it."""
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
