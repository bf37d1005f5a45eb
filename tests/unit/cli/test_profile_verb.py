"""`hpc-trainer profile`: what it asks of a run, what it prints of the answers, and what it refuses."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.observe import profile_client as module
from hpc_trainer.observe.profile_request import ProfileAnswer, read_request, write_answer
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.states import RunState
from tests.unit.cli.test_cli import Cli, _check, cli, runs_dir, strict
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

__all__ = ["cli", "runs_dir"]
FIGURES = {
    "device": "cpu", "first_step": 7, "num_steps": 3, "step_s": 0.25, "data_wait_share": 0.1, "idle_share": 0.2,
    "between_share": 0.0, "optimizer_share": 0.01, "work": {"products": 0.5}, "peak_memory_share": None,
}  # fmt: skip
LINES = ("steps 7 to 9, 250 ms each, on rank 0 of 2", "work: products 50.0%", "advice: hardware.cpus_per_task=4")
FORM = {
    "run_id": str,
    "asked": {"num_steps": int, "ranks": list},
    "ranks": [
        {
            "rank": int, "table": str, "trace": str, "device": str, "first_step": int, "num_steps": int,
            "step_s": float, "data_wait_share": float, "idle_share": float, "between_share": float,
            "optimizer_share": float, "work": dict, "peak_memory_share": (float, type(None)), "advice": [str],
        }
    ],
}  # fmt: skip


@pytest.fixture
def at_work(runs_dir: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """A run of two ranks that trains, by Slurm's word."""
    sweep = SweepOnDisk(runs_dir / "s", [make_spec("cluster=slurm", hardware__tasks_per_node=2)])
    sweep.submit()
    sweep.start(resumed=0)
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n")
    return sweep


def _answering(paths: RunPaths, answer: Callable[[str, int], ProfileAnswer | None]) -> threading.Thread:
    def work() -> None:
        deadline = time.monotonic() + 100
        while (request := read_request(paths)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for rank in request.ranks:
            if (said := answer(request.id, rank)) is not None:
                write_answer(paths, rank, said)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _done(name: str, rank: int) -> ProfileAnswer:
    return ProfileAnswer(id=name, state="done", attempt=0, step=9, figures=FIGURES, lines=LINES)


def test_the_profiles_of_all_ranks_in_json(cli: Cli, at_work: SweepOnDisk) -> None:
    thread = _answering(at_work.run(), _done)
    code, out, err = cli("profile", at_work.specs[0].run_id, "--steps", "3", "--ranks", "all", "--json")
    thread.join()
    assert (code, err) == (0, "")
    document = strict(out)
    _check(document, FORM)
    assert document["asked"] == {"num_steps": 3, "ranks": [0, 1]}
    assert [each["table"].partition(document["run_id"])[2] for each in document["ranks"]] == [
        "/profile.txt", "/profile/rank-1.txt",
    ]  # fmt: skip
    assert document["ranks"][0]["advice"] == ["hardware.cpus_per_task=4"]
    assert not at_work.run().profile_request.exists(), "it is answered"


def test_the_profile_in_words(cli: Cli, at_work: SweepOnDisk) -> None:
    thread = _answering(at_work.run(), _done)
    code, out, _ = cli("profile", at_work.specs[0].run_id)
    thread.join()
    assert code == 0
    for words in (*LINES, "profile.txt", "profile.trace.json.gz"):
        assert words in out


def test_asking_alone(cli: Cli, at_work: SweepOnDisk) -> None:
    code, out, _ = cli("profile", at_work.specs[0].run_id, "--no-wait", "--ranks", "1", "--timeout", "30")
    assert code == 0
    assert "profile/rank-1.txt" in out
    request = read_request(at_work.run())
    assert request is not None
    assert (request.num_steps, request.ranks, request.keep_s) == (20, (1,), 30.0)
    code, _, err = cli("profile", at_work.specs[0].run_id, "--no-wait")
    assert code == 1
    assert re.search(r"an open request for a profile, \d+ s old", err), "on a busy machine not 0"
    write_json(at_work.run().profile_request, {**asdict(request), "time": request.time - 31})
    code, out, _ = cli("profile", at_work.specs[0].run_id, "--no-wait", "--json")
    assert (code, strict(out)["ranks"]) == (0, []), "nobody waits for the old one"


def test_a_rank_that_could_not(cli: Cli, at_work: SweepOnDisk) -> None:
    def failed(name: str, rank: int) -> ProfileAnswer:
        return ProfileAnswer(id=name, state="failed", attempt=0, step=9, error="[Errno 28] No space left on device")

    thread = _answering(at_work.run(), failed)
    code, _, err = cli("profile", at_work.specs[0].run_id, "--timeout", "20")
    thread.join()
    assert code == 1
    assert "No space left" in err


def test_a_run_that_does_not_answer(cli: Cli, at_work: SweepOnDisk) -> None:
    at_work.beat(step=41, age_s=300)
    code, _, err = cli("profile", at_work.specs[0].run_id, "--timeout", "0.3")
    assert code == 1
    for words in ("after 0.3 s", "rank 0 has not started recording", "of step 41", "hpc-trainer why"):
        assert words in err
    assert not at_work.run().profile_request.exists(), "nobody waits for it any more"


def test_a_run_that_ends_meanwhile(
    cli: Cli, at_work: SweepOnDisk, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STATUS_S", 0.0)

    def dies(name: str, rank: int) -> None:
        write_answer(at_work.run(), rank, ProfileAnswer(id=name, state="watching", attempt=0, step=9))
        fake_slurm.answer("squeue", "")
        at_work.end(state=RunState.FAILED, cause="exception", step=12)

    thread = _answering(at_work.run(), dies)
    code, _, err = cli("profile", at_work.specs[0].run_id, "--timeout", "20")
    thread.join()
    assert code == 1
    assert "is FAILED" in err
    assert "rank 0 is profiled from step 10 on." in err


REFUSED: list[tuple[tuple[str, ...], int, str]] = [
    (("--steps", "0"), 2, "--steps=0 must be 1 to 1000. Use 1."),
    (("--steps", "2000"), 2, "Use 1000."),
    (("--ranks", "2"), 2, "2 is none of the 2 rank(s)"),
    (("--ranks", "-1"), 2, "-1 is none of"),
    (("--ranks", "x"), 2, "ranks with commas between them, or all"),
    (("--ranks", ""), 2, "ranks with commas between them, or all"),
    (("--timeout", "0"), 2, "greater than 0"),
    (("--timeout", "inf"), 2, "--timeout=inf must be greater than 0 and at most 86400 s"),
    (("--timeout", "nan"), 2, "greater than 0"),
]


@pytest.mark.parametrize(("words", "code", "says"), REFUSED)
def test_what_cannot_be_asked(cli: Cli, at_work: SweepOnDisk, words: tuple[str, ...], code: int, says: str) -> None:
    found, _, err = cli("profile", at_work.specs[0].run_id, *words)
    assert found == code
    assert says in err
    assert not at_work.run().profile.exists()


@pytest.mark.usefixtures("fake_slurm")
@pytest.mark.parametrize(
    ("changes", "state", "says"),
    [
        ({}, RunState.COMPLETED, "start another: the same command with debug=profile sweep_name=NEW."),
        ({"train__main": "mine.main", "trust": ["mine"]}, None, "your own code (train.main)"),
        ({"train__command": "sleep 9"}, None, "your own code (train.command)"),
    ],
)
def test_a_run_that_cannot_be_watched(
    cli: Cli, runs_dir: Path, changes: dict[str, Any], state: RunState | None, says: str
) -> None:
    sweep = SweepOnDisk(runs_dir / "s", [make_spec("cluster=slurm", **changes)])
    sweep.submit()
    sweep.start(resumed=0)
    if state is not None:
        sweep.end(state=state, cause="done")
        sweep.done(eval_loss=0.5)
    code, _, err = cli("profile", sweep.specs[0].run_id)
    assert code == 1
    assert says in err
