"""One verb after the other on a sweep that something has happened to, and what went wrong with it."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from hpc_trainer.cli.report_verbs import run_report
from hpc_trainer.cli.results_verbs import run_results
from hpc_trainer.cli.run_verbs import run_cancel, run_logs, run_status
from hpc_trainer.cli.why_verbs import run_why
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ExitCode, HpcTrainerError
from hpc_trainer.launch.grids import plan_grid, retry, submit_grid, top_up
from hpc_trainer.operate.report.write import PageOptions
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SWEEP_FILES, RunPaths, SweepPaths
from hpc_trainer.record.spec import read_spec
from hpc_trainer.record.status import read_status
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker import rank
from tests.unit.api.damaged_sweeps import (
    CANCELLED,
    FAILED,
    PENDING,
    PREEMPTED,
    REQUEUED,
    WAITING,
    Bed,
    PlayedSlurm,
    damage,
    doubled,
    may_show,
    play,
)
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs

_OTHERS_MAY_WRITE = ("written by all", "device")
# Refusals that are right: others may have written the file, or it is not a file.
_SWEEPS_OWN = ("specs.jsonl", "submissions.jsonl")


@pytest.fixture(params=["slurm", "local"])
def bed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    specs = make_specs(9, f"cluster={request.param}", "snapshot.mode=off")
    in_memory = Path("/dev/shm")  # each try takes the whole sweep back: on a disk that is most of its time
    folder = tempfile.mkdtemp(dir=in_memory if in_memory.is_dir() else tmp_path)
    found = Bed(Path(folder), specs, PlayedSlurm(), request.param)
    play(found, monkeypatch)
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(found.paths.folder.parent))
    try:
        yield found
    finally:
        found.close()
        shutil.rmtree(folder)


class Tries:
    """Plays tries and keeps what went wrong."""

    def __init__(self, bed: Bed, seed: int) -> None:
        self.bed, self.chance, self.kind = bed, random.Random(seed), ""
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.grid = make_grid(bed.paths.folder, bed.sweep.specs, Executor(bed.executor))

    def play(self, file: str, kind: str, verb: str) -> None:
        """Damages a file, or several, gives a verb, looks at what came of it, and takes the damage back."""
        self.kind = kind
        for each in file.split():
            damage(self.bed.paths.folder / each, kind, self.chance)
        what = f"{self.bed.executor}: {file}: {kind}: {verb}"
        self.counts["tries"] += 1
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                VERBS[verb](self, what, file)
        except HpcTrainerError as error:
            self._refused(what, file, verb, error)
        except OSError as error:  # main() turns it into a message
            self._refused(what, file, verb, error)
        except Exception:  # whatever it is: it is what is looked for
            self.counts["tracebacks"] += 1
            self.wrong.append(f"{what}\n{traceback.format_exc()[-1500:]}")
        finally:
            self.bed.restore()

    def _refused(self, what: str, file: str, verb: str, error: Exception) -> None:
        self.counts["refusals"] += 1
        may_refuse = file in _SWEEPS_OWN or verb not in READING
        if not may_refuse or (isinstance(error, OSError) and verb in READING):
            self.counts["wrong refusals"] += 1
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")

    def see(self, what: str, file: str, submitted: Sequence[str] = ()) -> None:
        """Every run is listed, and in no state worse than UNKNOWN."""
        shown = {run.run_id: run.state for run in read_status(self.bed.paths).runs}
        for index, run_id in enumerate(self.bed.ids):
            if self.bed.executor == "local" and index in (6, 7):
                continue  # what only Slurm does
            told = SWEEP_FILES if self.bed.executor == "slurm" else ("specs.jsonl", "sweep.json")
            if index == WAITING and set(told) <= set(file.split()):
                continue  # no scheduler has it, and no file tells of it
            state = shown.get(run_id)
            if run_id in submitted and state is not None and state.is_active:
                continue
            if state is None or not may_show(index, state, file, self.kind, self.bed.executor):
                self.counts["wrong states"] += 1
                self.wrong.append(f"{what}: run {index} is {state}")

    def submit(self, what: str, file: str, *, retry_failed: bool = False) -> None:
        arrays = submit_grid(self.grid, retry_failed=retry_failed, command_line=["x"]).arrays
        retried = [self.bed.ids[FAILED]] if retry_failed else []
        if file.endswith("/CANCEL"):
            retried.append(self.bed.ids[CANCELLED])
        self._count_doubled(what, file, doubled(self.bed, arrays, retried=retried))
        self.see(what + ", then status", file, [run_id for array in arrays for run_id in array.run_ids])

    def retry(self, what: str, file: str) -> None:
        run_ids = [self.bed.ids[index] for index in (FAILED, PREEMPTED, CANCELLED)]
        self._count_doubled(what, file, doubled(self.bed, retry(self.bed.paths, run_ids).arrays, retried=run_ids))

    def top_up(self, what: str, file: str) -> None:
        done = top_up(self.bed.paths, wait_s=0.0)
        self._count_doubled(what, file, doubled(self.bed, done.arrays if done else ()))

    def _count_doubled(self, what: str, file: str, run_ids: list[str]) -> None:
        run_ids = [each for each in run_ids if not (file.endswith("/DONE") and file.startswith(each))]
        if run_ids:
            self.counts["doubled jobs"] += 1
            self.wrong.append(f"{what}: submitted again: {run_ids}")

    def cancel(self, what: str, file: str) -> None:
        run_cancel(["sweep"], None, None, save=False, as_json=False)
        left = [job for job in self.bed.live_jobs if not self.bed.slurm.has_cancelled(job)]
        if left:
            self.counts["jobs left"] += 1
            self.wrong.append(f"{what}: not cancelled: {left}")

    def work(self, what: str, file: str) -> None:
        """What a worker reads when it starts: its spec, and a number for its attempt that nobody has."""
        for index, run_id in enumerate(self.bed.ids):
            paths = self.bed.paths.run(run_id)
            number = Journal(paths).attempt_number("77_0", 0)
            if paths.log(number, 0).exists():
                self.counts["attempt numbers in use"] += 1
                self.wrong.append(f"{what}: run {index} takes attempt {number}")
        if not self._changes_specs(file):
            for run_id in self.bed.ids:
                read_spec(self.bed.paths, run_id)

    def _changes_specs(self, file: str) -> bool:
        """True if a spec may be another one by now, or refused; one that is lost stands in the other place, too."""
        is_refused = self.kind == "refused" or self.kind in _OTHERS_MAY_WRITE
        return "specs.jsonl" in file and (is_refused or self.kind.endswith(("value", "type")))

    def start_late(self, what: str, file: str) -> None:
        """The elements that wait in the queue begin after the damage: each must know its run."""
        if self.bed.executor == "local" or self._changes_specs(file):
            return
        queue = list(self.bed.slurm.queue)
        try:
            for index in (PENDING, REQUEUED):
                self._start_element(what, file, index)
            arrays = submit_grid(self.grid, command_line=["x"]).arrays
            self._count_doubled(what, file, doubled(self.bed, arrays))
            at_work = [self.bed.ids[PENDING], self.bed.ids[REQUEUED]]
            active = [*at_work, *(run_id for array in arrays for run_id in array.run_ids)]
            self.see(what + ", then status", file, active)
        finally:
            self.bed.slurm.queue[:] = queue

    def _start_element(self, what: str, file: str, index: int) -> None:
        took: list[str | None] = []

        def begin(_: object, sweep: SweepPaths, paths: RunPaths, env: RankEnv, *__: object) -> int:
            took.extend([paths.run_id, rank._newer_job(sweep, paths, env)])
            return 0

        env = types.SimpleNamespace(job_id=f"500_{index}", rank=1)
        with (
            mock.patch.dict(os.environ, SLURM_ARRAY_TASK_ID=str(index)),
            mock.patch.object(rank, "read_rank_env", return_value=env),
            mock.patch.object(rank, "_start_attempt", begin),
        ):
            code = rank.run(["--sweep-dir", str(self.bed.paths.folder), "--array", self.bed.uuid], StopFlag())
        if code == ExitCode.STORAGE and self.kind == "refused":
            return  # it comes back when the file system answers
        if (code, took) != (0, [self.bed.ids[index], None]):
            if self.kind in _OTHERS_MAY_WRITE and file == "submissions.jsonl":
                return
            self.counts["wrong starts"] += 1
            self.wrong.append(f"{what}: element {index} ends with {code} as {took}")
        if index == PENDING:
            self.bed.sweep.start(index, job_id=f"500_{index}", resumed=0)
        queue = self.bed.slurm.queue
        queue[:] = [row.replace("PENDING", "RUNNING") if row.startswith(f"500_{index}|") else row for row in queue]

    def read(self, verb: str, *, as_json: bool) -> None:
        name = self.chance.choice(["sweep", None])
        run_id = self.chance.choice(self.bed.ids)
        if verb == "status":
            run_status(name, None, watch=False, as_json=as_json)
        elif verb == "results":
            run_results(name, None, sort=None, as_json=as_json)
        elif verb == "report":
            options = PageOptions(warmup_steps=0, plain=self.chance.random() < 0.5)
            run_report([] if name is None else [name], None, options, as_json=as_json)
        elif verb == "logs":
            run_logs(run_id, name, None, rank=None, follow=False, tail=None, as_json=as_json)
        else:
            run_why(self.chance.choice([["sweep"], [run_id]]), None, None, as_json=as_json)


READING = (
    "see",
    "status",
    "status --json",
    "results",
    "results --json",
    "report",
    "logs",
    "why",
    "why --json",
    "plan",
)
VERBS: dict[str, Callable[[Tries, str, str], object]] = {
    "see": Tries.see,
    "status": lambda tries, *_: tries.read("status", as_json=False),
    "status --json": lambda tries, *_: tries.read("status", as_json=True),
    "results": lambda tries, *_: tries.read("results", as_json=False),
    "results --json": lambda tries, *_: tries.read("results", as_json=True),
    "report": lambda tries, *_: tries.read("report", as_json=False),
    "logs": lambda tries, *_: tries.read("logs", as_json=False),
    "why": lambda tries, *_: tries.read("why", as_json=False),
    "why --json": lambda tries, *_: tries.read("why", as_json=True),
    "plan": lambda tries, *_: plan_grid(tries.grid),
    "submit": Tries.submit,
    "submit --retry-failed": lambda tries, what, file: tries.submit(what, file, retry_failed=True),
    "retry": Tries.retry,
    "cancel": Tries.cancel,
    "top-up": Tries.top_up,
    "a worker's start": Tries.work,
    "a start after the damage": Tries.start_late,
}


def expect_nothing_wrong(tries: Tries) -> None:
    print(dict(tries.counts))
    shown = "\n".join(tries.wrong[:20])
    assert not tries.wrong, f"{len(tries.wrong)} of {tries.counts['tries']} went wrong: {dict(tries.counts)}\n{shown}"
