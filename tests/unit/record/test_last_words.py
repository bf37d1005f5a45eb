"""The last words of a job: of a worker that recorded no error, of a start that failed, of the set-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.record.last_words import words_before_the_worker, words_of_death, words_of_setup
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import Faults

ENDED = "hpc_trainer: the job ends at cluster.setup line {}: exit status {}"
KILLED = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0"
MODULE = "ModuleNotFoundError: No module named 'x'"


class Said:
    """A run's folder, what its batch shell printed, and the log of its rank."""

    def __init__(self, sweep: Path) -> None:
        self.paths = RunPaths(sweep / "run")
        self.paths.logs.mkdir(parents=True)
        (sweep / "slurm").mkdir()
        self._output = sweep / "slurm/500_0.out"
        self.folder: Any = SimpleNamespace(paths=self.paths, job_id="500_0")
        self.announced = f"run: attempt 0, rank 0 logs to {self.paths.log(0, 0)}"

    def prints(self, *lines: str) -> None:
        self._output.write_text("".join(f"{line}\n" for line in lines))

    def logs(self, *lines: str) -> None:
        self.paths.log(0, 0).write_text("".join(f"{line}\n" for line in lines))

    def death(self) -> Any:
        return words_of_death(self.folder, Faults())

    def start(self, setup: Sequence[str] = ()) -> Any:
        return words_before_the_worker(self.folder, setup, 0, Faults())


@pytest.fixture
def said(tmp_path: Path) -> Said:
    return Said(tmp_path)


def test_the_newest_line_with_a_meaning_is_the_message(said: Said) -> None:
    assert said.death() == {}
    said.prints("first", "", "  last  ")
    assert said.death() == {"message": "last", "output": "first\nlast"}
    said.prints(MODULE, "last")
    assert said.death() == {"message": MODULE, "output": f"{MODULE}\nlast"}
    said.prints(MODULE, said.announced, "of this start")
    assert said.death() == {"message": "of this start", "output": "of this start"}


def test_a_rank_that_died_has_its_last_words_in_its_log(said: Said) -> None:
    said.prints("earlier", said.announced, "srun: error: n1: task 0: Exited with exit code 1")
    said.logs("step 3", MODULE)
    assert said.death() == {
        "message": MODULE,
        "output": f"step 3\n{MODULE}\nsrun: error: n1: task 0: Exited with exit code 1",
    }
    said.logs("step 3")
    assert said.death()["output"] == "srun: error: n1: task 0: Exited with exit code 1"
    said.prints("earlier", said.announced, MODULE)
    said.logs("ImportError: libx.so")
    assert said.death() == {"message": MODULE, "output": MODULE}, "what the shell printed has a meaning already"
    said.prints("earlier", said.announced)
    assert said.death() == {}
    said.logs(MODULE)
    assert said.death() == {"message": MODULE, "output": MODULE}


def test_long_words_are_cut(said: Said) -> None:
    said.prints(*(f"{number:02}" + "x" * 599 for number in range(60)))
    found = said.death()
    lines = found["output"].splitlines()
    assert lines[-1] == found["message"]
    assert [line[:2] for line in lines] == [str(number) for number in range(48, 60)]
    assert {len(line) for line in lines} == {500}


def test_a_start_that_failed_says_what_the_shell_printed(said: Said) -> None:
    message = "the job ended before the worker began"
    blind = "does the node see this folder at the same path, and may it write there?"
    output = said.paths.folder.parent / "slurm/500_0.out"
    assert said.start() == {
        "cause": "not started", "message": f"{message}, and its node has made no {output}: {blind}", "output": ""
    }  # fmt: skip
    said.prints()
    assert said.start() == {"cause": "not started", "message": f"{message}.", "output": ""}
    said.prints("first", "last")
    assert said.start() == {"cause": "not started", "message": f"{message}: last", "output": "first\nlast"}
    said.prints("earlier", ENDED.format(1, 3), MODULE)
    assert said.start(["x"])["message"] == "cluster.setup line 1 failed: `x`: earlier"


@pytest.mark.parametrize(
    ("lines", "environment", "message"),
    [
        (["oops", ENDED.format(2, 3)], 0, "cluster.setup line 2 failed: `b`: oops"),
        (["oops", ENDED.format(2, 3)], 1, "cluster.setup line 1 failed: `b`: oops"),
        (["oops", ENDED.format(2, 3)], 2, "a line of cluster.environment failed: `b`: oops"),
        ([ENDED.format(1, 3)], 0, "cluster.setup line 1 failed: `a`: exit status 3"),
        (["oops", ENDED.format(3, 3)], 0, "cluster.setup line 3 failed: exit status 3: oops"),
        (["oops", ENDED.format(0, 3)], 0, "a line of cluster.environment failed: exit status 3: oops"),
        (["old", ENDED.format(1, 3), "oops", ENDED.format(2, 4)], 0, "cluster.setup line 2 failed: `b`: oops"),
        (["oops", ENDED.format(1, 3), "x logs to /a"], 0, None),
        (["oops"], 0, None),
    ],
)
def test_the_line_before_the_ranks_that_ended_the_start(
    lines: list[str], environment: int, message: str | None
) -> None:
    found = words_of_setup(lines, ["a", "b"], environment)
    assert (None if found is None else found["message"]) == message
