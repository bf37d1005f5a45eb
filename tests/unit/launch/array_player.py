"""Plays what Slurm would make of the arrays that sbatch was given: who runs when, and how many at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.unit.slurm.fake_slurm import FakeSlurm


@dataclass(slots=True, kw_only=True)
class Job:
    """An array: `parallelism` of its elements run at once, and none before the jobs in `after` have ended."""

    hardware: str
    parallelism: int
    waiting: list[str]
    after: tuple[str, ...]
    running: dict[str, float] = field(default_factory=dict)
    """Element -> when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The most elements of each hardware that ran at once, and when the last one of all ended."""

    most: dict[str, int]
    makespan: float


def read_jobs(fake: FakeSlurm, hardware_of: dict[str, str]) -> dict[str, Job]:
    """The arrays by job id, in the order of their submission, from their scripts and options.

    Args:
        hardware_of: job id -> hardware, of all arrays (other jobs are left out).
    """
    jobs = {}
    for number, call in enumerate(fake.calls("sbatch"), 101):
        job_id = str(number)
        if job_id in hardware_of:
            array = re.search(r"^#SBATCH --array=0-(\d+)%(\d+)$", fake.script(job_id), re.MULTILINE)
            assert array is not None
            after = re.search(r"--dependency=afterany:(\S+)", call)
            jobs[job_id] = Job(
                hardware=hardware_of[job_id],
                parallelism=int(array[2]),
                waiting=[f"{job_id}_{index}" for index in range(int(array[1]) + 1)],
                after=tuple(after[1].split(":")) if after else (),
            )
    return jobs


def play(jobs: dict[str, Job], length: Callable[[str], float]) -> Played:
    """Starts every element as soon as it may start; the cluster has a node for each.

    Args:
        length: how long an element takes.
    """
    now, most = 0.0, Counter[str]()
    while True:
        ended = {job_id for job_id, job in jobs.items() if not job.waiting and not job.running}
        for job in jobs.values():
            while job.waiting and len(job.running) < job.parallelism and ended.issuperset(job.after):
                element = job.waiting.pop(0)
                job.running[element] = now + length(element)
        running = Counter(job.hardware for job in jobs.values() for _ in job.running)
        most |= running
        if not running:
            assert len(ended) == len(jobs), "some array waits for ever"
            return Played(most=dict(most), makespan=now)
        now = min(end for job in jobs.values() for end in job.running.values())
        for job in jobs.values():
            job.running = {element: end for element, end in job.running.items() if end > now}
