"""cluster.array_parallelism over all the arrays of a hardware, as Slurm would run them: never more, and no fewer."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.submissions import SUCCESSOR, read_submissions, write_confirmation, write_intent
from tests.unit.launch.grids import make_grid, submit
from tests.unit.record.builders import make_specs
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sweep"


def _play(folder: Path, fake: FakeSlurm, rng: random.Random | None = None) -> Played:
    """The whole sweep from its beginning; every run takes 1, or by `rng` something between 0.1 and 2."""
    hardware_of = {str(each.job_id): each.hardware for each in read_submissions(SweepPaths(folder))}
    return play(read_jobs(fake, hardware_of), lambda _: 1.0 if rng is None else rng.uniform(0.1, 2.0))


def _never_more(folder: Path, fake: FakeSlurm, parallelism: int) -> None:
    for seed in range(30):
        played = _play(folder, fake, random.Random(seed))
        assert max(played.most.values()) <= parallelism, seed


@pytest.mark.parametrize(
    ("count", "parallelism", "size", "makespan"),
    [(8, 1, 2, 8), (8, 2, 2, 4), (9, 3, 2, 4), (12, 5, 4, 4), (7, 2, 1, 4), (6, 100, 2, 1)],
)
def test_chunks_of_one_submit(
    folder: Path, fake_slurm: FakeSlurm, count: int, parallelism: int, size: int, makespan: float
) -> None:
    fake_slurm.answer("scontrol", f"MaxArraySize            = {size}\n")
    submit(make_grid(folder, make_specs(count, "cluster=slurm", cluster__array_parallelism=parallelism)))
    assert len(fake_slurm.calls("sbatch")) == -(-count // size)
    played = _play(folder, fake_slurm)
    assert played.most == {"cpu_x1": min(count, parallelism)}
    assert played.makespan == makespan
    _never_more(folder, fake_slurm, parallelism)


def test_each_hardware_has_its_own_and_its_arrays_need_not_be_neighbours(folder: Path, fake_slurm: FakeSlurm) -> None:
    """Two time limits of one hardware, and another hardware between them."""
    one_at_once = {"cluster__array_parallelism": 1}
    short = make_specs(2, "cluster=slurm", hardware__time_limit_min=5, **one_at_once)
    other = make_specs(1, "cluster=slurm", "hardware=gpu_x1", **one_at_once)
    long = make_specs(2, "cluster=slurm", hardware__time_limit_min=90, optim__lr=0.5, **one_at_once)
    submit(make_grid(folder, [*short, *other, *long]))
    played = _play(folder, fake_slurm)
    assert (played.most, played.makespan) == ({"cpu_x1": 1, "gpu_x1": 1}, 4.0)
    _never_more(folder, fake_slurm, 1)


def test_a_later_submit_keeps_it_too(folder: Path, fake_slurm: FakeSlurm) -> None:
    """All of the first submit is in the queue still."""
    fake_slurm.answer("scontrol", "MaxArraySize            = 4\n")
    for count in (5, 14, 16):
        submit(make_grid(folder, make_specs(count, "cluster=slurm", cluster__array_parallelism=3)))
    assert len(fake_slurm.calls("sbatch")) == 2 + 3 + 1
    assert _play(folder, fake_slurm).most == {"cpu_x1": 3}
    _never_more(folder, fake_slurm, 3)


def test_a_later_submit_that_allows_more_counts_what_the_first_one_may_run(folder: Path, fake_slurm: FakeSlurm) -> None:
    submit(make_grid(folder, make_specs(10, "cluster=slurm", cluster__array_parallelism=4)))
    submit(make_grid(folder, make_specs(30, "cluster=slurm", cluster__array_parallelism=20)))
    assert _play(folder, fake_slurm).most == {"cpu_x1": 20}, "4 of the first, 16 of the second"


def test_what_little_is_left_of_an_earlier_array_takes_little(folder: Path, fake_slurm: FakeSlurm) -> None:
    submit(make_grid(folder, make_specs(10, "cluster=slurm", cluster__array_parallelism=8)))
    queue = fake_slurm.folder / "queue"
    queue.write_text("".join(line + "\n" for line in queue.read_text().splitlines()[-2:]))
    (first,) = read_submissions(SweepPaths(folder))
    named = f"sweep-{first.uuid[:8]}|{first.uuid}"
    fake_slurm.answer("sacct", "".join(f"101_{index}|CANCELLED|0:0|n1|{named}\n" for index in range(8)))
    (array,) = submit(make_grid(folder, make_specs(20, "cluster=slurm", cluster__array_parallelism=8)))
    assert len(array.run_ids) == 10
    assert "#SBATCH --array=0-9%6" in fake_slurm.script(array.job_id), "two of eight places are taken"
    assert "--dependency" not in fake_slurm.calls("sbatch")[-1]


def test_a_successor_job_counts_as_what_it_goes_on_with(folder: Path, fake_slurm: FakeSlurm) -> None:
    """Two elements of the first array are left, and one run goes on in a job of its own: three of three places."""
    specs = make_specs(13, "cluster=slurm", cluster__array_parallelism=3)
    submit(make_grid(folder, specs[:3]))
    run = SweepPaths(folder).run(specs[0].run_id)
    run.folder.mkdir(mode=0o700)
    (array,) = read_submissions(SweepPaths(folder))
    intent = write_intent(
        run, executor="slurm", hardware="cpu_x1", run_ids=[run.run_id], kind=SUCCESSOR, after=array.uuid
    )
    write_confirmation(run, intent, "102")
    (fake_slurm.folder / "number").write_text("102\n")
    queue = fake_slurm.folder / "queue"
    lines = [line for line in queue.read_text().splitlines() if not line.startswith("101_0|")]
    queue.write_text("".join(line + "\n" for line in (*lines, f"102|PENDING||Dependency|{intent.uuid}")))
    (rest,) = submit(make_grid(folder, specs))
    assert (rest.job_id, len(rest.run_ids)) == ("103", 10)
    assert "--dependency=afterany:101:102" in fake_slurm.calls("sbatch")[-1]


def test_an_array_that_was_cut_for_want_of_room_may_run_as_many_as_before(folder: Path, fake_slurm: FakeSlurm) -> None:
    """The site hides a limit: arrays of more than four elements are refused."""
    sbatch = fake_slurm.bin / "sbatch"
    refuse = (
        'for script; do :; done\nlast=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p" "$script")\n'
        'if [ "${last:-0}" -gt 3 ]; then echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; fi\n'
    )
    sbatch.write_text(sbatch.read_text().replace("number=$((", refuse + "number=$((", 1))
    (array,) = submit(make_grid(folder, make_specs(9, "cluster=slurm", cluster__array_parallelism=3)))
    assert "#SBATCH --array=0-3%3" in fake_slurm.script(array.job_id)
    (submission,) = read_submissions(SweepPaths(folder))
    assert submission.parallelism == 3
