"""Looks at sweeps all the time, through the login shell's client and as the server has them, and compares.

``python -m tests.slurm.shared_folder.watch FILE SWEEP TRUE_SWEEP ...`` looks until SIGTERM and writes a line for each
look. A state that the login shell sees is false if the run was not in it when it was seen. The state is late if the run
was in it before, no longer ago than a client's caches may be old. UNKNOWN may last as long as the page on the shared
folder says, a cache's age and 90 s for clocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpc_trainer.record.run_state import CLOCKS_APART_S
from tests.slurm.driver import Driver

SHOWN, TRUE = "shown", "true"
_PAUSE_S = 0.4
# Between two looks at the truth a run may have passed a state of this way.
_WAY = ("NEW", "PENDING", "RUNNING", "COMPLETED")
_ENDS = ("FAILED", "CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_ACTIVE = ("PENDING", "RUNNING", "REQUEUED")
# It says that nobody can say, and nothing is done about such a run: right for as long as the caches may be old.
_UNSURE = "UNKNOWN"
# A look takes time, and asks Slurm before or after it reads the folders.
_MARGIN_S = 5.0


@dataclass(frozen=True)
class Look:
    """What one look found."""

    who: str
    begin: float
    end: float
    states: Mapping[str, tuple[str, str]]
    """Test's folder/run id -> (state, cause)."""


@dataclass(frozen=True)
class Falsehood:
    """A state that was shown and was not so, from the first look to the last one in a row."""

    run_id: str
    state: str
    cause: str
    truth: str
    seconds: float
    is_late: bool
    """The run had been in this state before."""
    story: str = ""
    """The looks from some before the first of them to some after the last, with seconds from its begin."""

    def __str__(self) -> str:
        word = "late" if self.is_late else "never true"
        return (
            f"{self.run_id} {self.state} ({self.cause}) for {self.seconds:.1f} s while {self.truth}: {word}{self.story}"
        )


def read_looks(path: Path) -> list[Look]:
    """Read what the watcher wrote; a last line that is not whole is left out."""
    looks = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            record = json.loads(line)
            states = {run_id: (state, cause) for run_id, (state, cause) in record["states"].items()}
            looks.append(Look(record["who"], record["begin"], record["end"], states))
    return looks


def falsehoods(looks: list[Look], age_s: float) -> list[Falsehood]:
    """Compare what was shown with the truth before and after it.

    Returns:
        Each state that never was true, however short, and each that was shown too late.
    """
    found: list[Falsehood] = []
    for run_id in sorted({run_id for look in looks for run_id in look.states}):
        found.extend(_of_one_run(looks, run_id, age_s))
    return found


def _story(looks: list[Look], run_id: str, began: float, ended: float) -> str:
    first = next(place for place, look in enumerate(looks) if look.begin >= began)
    last = next((place for place, look in enumerate(looks) if look.begin >= ended), len(looks))
    return "".join(
        f"\n    {look.who:6} {look.begin - began:7.1f} to {look.end - began:7.1f} s:"
        f" {' '.join(look.states.get(run_id, ('no such run',)))}"
        for look in looks[max(0, first - 4) : last + 5]
    )


def _of_one_run(looks: list[Look], run_id: str, age_s: float) -> Iterator[Falsehood]:
    true_until: dict[str, float] = {}
    truth, began, wrong, is_open = "", 0.0, ("", "", ""), False
    for place, look in enumerate(looks):
        state, cause = look.states.get(run_id, ("", ""))
        if look.who == TRUE:
            is_open = state == _UNSURE
            if not is_open:  # between the end of a job and what Slurm says of it the server's files tell nothing
                true_until[state], truth = look.end, state
            continue
        truths = (later.states.get(run_id, ("", ""))[0] for later in looks[place + 1 :] if later.who == TRUE)
        after = next((state for state in truths if state != _UNSURE), truth)
        right = not state or _fits(state, truth, after) or not truth
        right = right or (is_open and state not in _ACTIVE)  # the job is gone and has left nothing: an end, or UNKNOWN
        if wrong[0] and (right or wrong[:2] != (state, truth)):
            yield from _judge(looks, run_id, wrong, look.begin - began, true_until, began, age_s)
            wrong = ("", "", "")
        if not right and not wrong[0]:
            wrong, began = (state, truth, cause), look.begin
    if wrong[0]:
        yield from _judge(looks, run_id, wrong, looks[-1].end - began, true_until, began, age_s)


def _fits(state: str, before: str, after: str) -> bool:
    if state in (before, after):
        return True
    if before in _ENDS and after in _WAY:
        before = "NEW"  # a retry brought it back: this way begins again
    if {state, before, after} <= set(_WAY):
        return _WAY.index(before) <= _WAY.index(state) <= _WAY.index(after)
    return False


def _judge(
    looks: list[Look],
    run_id: str,
    wrong: tuple[str, str, str],
    seconds: float,
    true_until: Mapping[str, float],
    began: float,
    age_s: float,
) -> Iterator[Falsehood]:
    state, truth, cause = wrong
    was_true = state in true_until and true_until[state] <= began
    # The job is there all the while: how far it is comes from files.
    was_true |= {state, truth} <= set(_ACTIVE)
    longest_s = age_s + _MARGIN_S + (CLOCKS_APART_S if state == _UNSURE else 0.0)
    if (was_true or state == _UNSURE) and seconds <= longest_s:
        return
    yield Falsehood(
        run_id, state, cause, truth, seconds, is_late=was_true, story=_story(looks, run_id, began, began + seconds)
    )


class Watcher:
    """The process that looks, from the beginning of a `with` block to its end."""

    def __init__(self, file: Path, *sweeps: tuple[Driver, str]) -> None:
        self.file = file
        self._words = [sys.executable, "-m", __name__, str(file)]
        for driver, sweep in sweeps:
            self._words += [str(driver.slurm.runs_folder(driver.folder) / sweep), str(driver.runs / sweep)]
        self._env = sweeps[0][0].env

    def __enter__(self) -> Watcher:
        project = Path(__file__).resolve().parents[3]
        env = {**self._env, "PYTHONPATH": f"{project}:{self._env.get('PYTHONPATH', '')}"}
        with self.file.with_suffix(".log").open("ab") as sink:
            self._process = subprocess.Popen(self._words, cwd=self.file.parent, env=env, stdout=sink, stderr=sink)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        code = self._process.wait(timeout=60)
        if error is None:
            assert code == 0, self.file.with_suffix(".log").read_text()[-3000:]

    def looks(self) -> list[Look]:
        """Return what was seen so far."""
        return read_looks(self.file) if self.file.exists() else []


def _look(sweeps: Sequence[Path], who: str) -> Look:
    from hpc_trainer.errors import RunStateError
    from hpc_trainer.record.layout import SweepPaths
    from hpc_trainer.record.status import read_status

    begin, states = time.time(), {}
    for sweep in sweeps:
        with contextlib.suppress(RunStateError):  # not submitted yet
            for run in read_status(SweepPaths(sweep)).runs:
                states[f"{sweep.parents[1].name}/{run.run_id}"] = (run.state.value, run.cause or "")
    return Look(who, begin, time.time(), states)


def _main() -> None:
    from hpc_trainer.record import status

    file, *sweeps = map(Path, sys.argv[1:])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    record_ends, parent = status.record_ends, os.getppid()
    with file.open("a") as sink:
        while not ended.wait(_PAUSE_S) and os.getppid() == parent:
            for folders, who in ((sweeps[1::2], TRUE), (sweeps[::2], SHOWN)):
                # The server's own disk is looked at and not written to.
                vars(status)["record_ends"] = record_ends if who == SHOWN else _record_nothing
                look = _look(folders, who)
                sink.write(json.dumps(vars(look)) + "\n")
            sink.flush()
        sink.write(json.dumps(vars(_look(sweeps[1::2], TRUE))) + "\n")
    os._exit(0)


def _record_nothing(*_: object, **__: object) -> None:
    return None


if __name__ == "__main__":
    _main()
