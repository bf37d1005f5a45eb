"""A search on the local executor: exactly its trials, what is shown, pauses that change no bit, and a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

RUNGS = Path(__file__).parents[2] / "programs" / "rungs"
LR = "optim.lr=tag(log,interval(1e-4,1e-1))"
WORDS = (
    "experiment=digits", "model=mlp", "train.num_steps=16", "schedule.warmup_steps=2", "train.eval_every_steps=4",
    "monitor.log_every_steps=4", "search.metric=eval_accuracy",
)  # fmt: skip
ASHA = (*WORDS, "search=asha", "search.rungs=[4,8]", "search.eta=2", "search.trials=4", "search.parallel=2")


def _state_of(local: LocalDriver, sweep: str, run_id: str) -> bytes:
    newest = max((local.runs / sweep / run_id / "checkpoints").glob("step-*"))
    return b"".join(path.read_bytes() for path in sorted(newest.glob("s*.safetensors")))


def _metrics(local: LocalDriver, sweep: str, run_id: str) -> list[dict[str, Any]]:
    lines = (local.runs / sweep / run_id / "metrics.jsonl").read_text().splitlines()
    return [{key: record[key] for key in ("step", "loss", "eval_accuracy") if key in record}
            for record in map(json.loads, lines)]  # fmt: skip


def test_asha_pauses_and_promotes_and_the_best_run_has_the_bits_of_one_that_never_paused(local: LocalDriver) -> None:
    planned = local.json("plan", *ASHA, "sweep_name=tried", LR)
    assert (planned["problems"], planned["drawn"], planned["whole_runs"]) == ([], 0, 2.0)  # 4/4 + 2/4 + 1/2
    local.run("submit", *ASHA, "sweep_name=tried", LR, "--wait")
    status = local.json("status", "tried")
    search = status["search"]
    assert (search["drawn"], search["is_over"], search["stopped"]) == (4, True, None)
    assert search["rungs"]["4"] == 4
    states = {run["run_id"]: (run["state"], run["step"]) for run in status["runs"]}
    assert set(states.values()) <= {("PAUSED", 4), ("PAUSED", 8), ("COMPLETED", 16)}
    best = local.json("best", "tried")
    assert states[best["run_id"]] == ("COMPLETED", 16)
    assert best["run_id"] == search["best"]["run_id"]
    rows = local.json("results", "tried")
    assert sorted(row["trial"] for row in rows) == [0, 1, 2, 3]
    assert "promotes it if it is among the best" in local.run("why", next(
        run_id for run_id, (state, _) in states.items() if state == "PAUSED")).stdout  # fmt: skip
    # The command of `best`, with one seed: it makes the same run, which nothing interrupts.
    words = [word for word in best["again"] if not word.startswith(("seed=", "sweep_name="))]
    local.run("submit", *words, "sweep_name=straight", "--wait")
    (straight,) = local.json("status", "straight")["runs"]
    assert (straight["run_id"], straight["attempt"]) == (best["run_id"], 1)
    assert _state_of(local, "tried", best["run_id"]) == _state_of(local, "straight", best["run_id"])
    assert _metrics(local, "tried", best["run_id"]) == _metrics(local, "straight", best["run_id"])
    steps = [record["step"] for record in _metrics(local, "tried", best["run_id"]) if "eval_accuracy" in record]
    assert steps == [4, 8, 12, 16], "no evaluation is made twice"


def test_a_program_pauses_at_rungs_and_continues_from_its_own_checkpoint(local: LocalDriver) -> None:
    shutil.copy(RUNGS / "work.py", local.folder)
    words = ("--command", "python work.py {params.lr} {run.checkpoints}", "search=asha", "search.eta=2",
             "search.metric=loss", "search.trials=4", "search.parallel=2", "sweep_name=own",
             "params.lr=tag(log,interval(1e-4,1e-1))")  # fmt: skip
    local.run("submit", *words, "search.rungs=[3,6]", "--wait")
    status = local.json("status", "own")
    assert (status["search"]["drawn"], status["search"]["is_over"], status["search"]["stopped"]) == (4, True, None)
    runs = {run["run_id"]: run for run in status["runs"]}
    assert {run["state"] for run in runs.values()} == {"PAUSED", "COMPLETED"}
    for run_id, run in runs.items():
        checkpoints = local.runs / "own" / run_id / "output" / "checkpoints"
        computed = [int(line) for line in (checkpoints / "computed.txt").read_text().split()]
        assert computed == list(range(1, run["step"] + 1)), "no step is computed twice"
        assert (run["state"] == "COMPLETED") == (run["step"] == 12)
    best = local.json("best", "own")
    assert runs[best["run_id"]]["state"] == "COMPLETED"
    assert min(abs(float(run["axes"]["params.lr"]) - 0.01) for run in runs.values() if run["state"] == "COMPLETED") == (
        pytest.approx(abs(float(runs[best["run_id"]]["axes"]["params.lr"]) - 0.01))
    )


def test_more_trials_continue_a_search_and_another_space_is_refused(local: LocalDriver) -> None:
    words = (*WORDS, "search=random", "sweep_name=more")
    local.run("submit", *words, "search.trials=2", LR, "--wait")
    before = local.json("results", "more")
    local.run("submit", *words, "search.trials=3", LR, "--wait")
    after = local.json("results", "more")
    assert [row["run_id"] for row in after[:2]] == [row["run_id"] for row in before]
    assert [row["attempts"] for row in after] == [1, 1, 1]
    again = local.run("submit", *words, "search.trials=3", LR)
    assert "3 trials were drawn and have ended; nothing is left to submit." in again.stdout
    assert local.json("submit", *words, "search.trials=3", LR)["job_id"] is None
    refused = local.run("submit", *words, "search.trials=3", "optim.lr=interval(1e-4,1e-1)", check=False)
    assert refused.returncode == 2
    assert "(log) before, optim.lr from 0.0001 to 0.1 (linear) now" in refused.stderr
    grid = local.run("submit", *WORDS[:-1], "sweep_name=more", "optim.lr=1e-3,1e-2", check=False)
    assert grid.returncode == 0, "runs of a grid may join"


IN_PYTHON = """
import json, sys
import hpc_trainer

words = json.loads(sys.argv[1])
done = hpc_trainer.submit(*words)
sweep = hpc_trainer.wait(done.plan.grid.sweep.name)
frame = hpc_trainer.results(sweep.sweep.name)
best = hpc_trainer.best(sweep.sweep.name)
print(json.dumps({
    "submitted": done.num_submitted, "counts": sweep.counts,
    "columns": list(frame.columns), "losses": list(frame["eval_loss"]), "best": [best.trial, best.value],
    "left": hpc_trainer.plan(*words).num_to_submit,
}))
"""


def test_a_search_in_python_is_submitted_awaited_and_read(local: LocalDriver) -> None:
    pytest.importorskip("pandas")
    words = (*WORDS[:-1], "cluster=local", "search=tpe", "search.trials=4", "search.parallel=2", "sweep_name=py", LR)
    path = f"{warm.OPTUNA}{os.pathsep}{local.folder}"  # the environment's own optuna is too old, for another test
    program = [sys.executable, "-c", IN_PYTHON, json.dumps(words)]
    made = warm.run(program, cwd=local.folder, env={**local.env, "PYTHONPATH": path}, text=True, timeout=200)
    assert made.returncode == 0, (made.stderr, local.logs())
    found = json.loads(made.stdout)
    assert (found["submitted"], found["counts"], found["left"]) == (4, {"COMPLETED": 4}, 0)
    assert {"run_id", "optim.lr", "eval_loss", "trial", "state"} <= {*found["columns"]}
    assert found["best"] == [min(range(4), key=found["losses"].__getitem__), pytest.approx(min(found["losses"]))]


@pytest.mark.long
def test_a_search_whose_slots_are_stopped_continues_with_the_same_trials(local: LocalDriver) -> None:
    words = (*WORDS, "train.num_steps=400", "train.eval_every_steps=100", "search=random", "search.trials=3",
             "search.parallel=2", "sweep_name=stopped", LR)  # fmt: skip
    made = local.json("submit", *words)
    deadline = time.monotonic() + 120
    while len([run for run in local.json("status", "stopped")["runs"] if run["step"]]) < 2:
        assert time.monotonic() < deadline
        time.sleep(1)
    os.kill(int(made["job_id"].split(":")[1]), signal.SIGTERM)
    while {run["state"] for run in local.json("status", "stopped")["runs"]} & {"RUNNING", "PENDING"}:
        assert time.monotonic() < deadline
        time.sleep(1)
    first = [run["run_id"] for run in local.json("status", "stopped")["runs"]]
    local.run("submit", *words, "--wait")
    runs = local.json("status", "stopped")["runs"]
    assert [run["state"] for run in runs] == ["COMPLETED"] * 3
    assert [run["run_id"] for run in runs[: len(first)]] == first


@pytest.mark.long
def test_a_hydra_app_pauses_at_rungs_and_continues_from_its_own_checkpoint(local: LocalDriver) -> None:
    shutil.copytree(RUNGS, local.folder, dirs_exist_ok=True)
    words = ("search=asha", "search.eta=2", "search.metric=loss", "search.trials=4", "search.parallel=2",
             "search.rungs=[3,6]", "sweep_name=app")  # fmt: skip
    of_app = ("--app", "train.py", "optim.lr=tag(log,interval(1e-4,1e-1))", "model=small,big")
    planned = json.loads(local.run("plan", "--json", *words, *of_app).stdout)
    assert (planned["problems"], planned["space"]) == (
        [], ["params.optim.lr from 0.0001 to 0.1 (log)", "params.model=small,big"]
    )  # fmt: skip
    local.run("submit", *words, "--wait", *of_app)
    status = local.json("status", "app")
    assert (status["search"]["drawn"], status["search"]["is_over"], status["search"]["stopped"]) == (4, True, None)
    runs = {run["run_id"]: run for run in status["runs"]}
    assert {run["state"] for run in runs.values()} == {"PAUSED", "COMPLETED"}
    for run_id, run in runs.items():
        output = local.runs / "app" / run_id / "output"
        lines = [line.split() for line in (output / "checkpoints" / "computed.txt").read_text().splitlines()]
        assert [int(step) for step, _ in lines] == list(range(1, run["step"] + 1)), "no step is computed twice"
        assert (run["state"] == "COMPLETED") == (run["step"] == 12)
        assert {f"{float(lr):.6g}" for _, lr in lines} == {run["axes"]["params.optim.lr"]}
        assert f"model={run['axes']['params.model']}\n" in (output / ".hydra" / "overrides.yaml").read_text()
    best = local.json("best", "app")
    assert runs[best["run_id"]]["state"] == "COMPLETED"
    again = json.loads(local.run("plan", "--json", *best["again"]).stdout)
    assert len(again["runs"]) == 3
    other = local.run("submit", *words, "--app", "train.py", "optim.lr=interval(1e-4,1e-1)", check=False)
    assert other.returncode == 2
    assert "another search" in other.stderr


def test_a_search_of_an_app_draws_the_keys_of_the_app(local: LocalDriver) -> None:
    def refused(*words: str) -> str:
        done = local.run("plan", "search=random", *words, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "is before --app" in refused("optim.lr=interval(1,2)", "--app", "train.py", "lr=1,2")
    assert "a search needs an axis to draw values for, after --app" in refused("--app", "train.py", "lr=1")
    assert "--wait comes after --app" in refused("--app", "train.py", "lr=interval(1,2)", "--wait")
