"""Loops of a person's own: interrupted they end with the same bits, and an end that is none is an error."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

JOB = Path(__file__).parents[3] / "jobs" / "own_loop.py"
BASE = ("monitor.heartbeat_every_s=0", "checkpoint.every_steps=100000")


def _words(main: str, *more: str) -> list[str]:
    return ["--trust", main.partition(".")[0], f"train.main={main}", *BASE, *more]


def _interrupt(local: LocalDriver, sweep: str, words: list[str], step: int) -> dict[str, Any]:
    """Trains until `step`, stops it by a signal to rank 0 alone, and returns the record of the end."""
    process = local.start("train", *words, f"sweep_name={sweep}")
    local.wait_for_step(sweep, step)
    local.signal_rank(sweep, signal.SIGUSR2)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1, output + errors + local.logs()
    (end,) = local.events(sweep, "end")
    assert (end["state"], end["signal"]) == ("PREEMPTED", "SIGUSR2")
    return end


@pytest.mark.dist
@pytest.mark.parametrize(("hardware", "steps"), [pytest.param("cpu_x1", 3000, marks=pytest.mark.long), ("cpu_x2", 800)])
def test_the_loop_of_jobs_goes_on_with_the_same_bits(local: LocalDriver, hardware: str, steps: int) -> None:
    shutil.copy(JOB, local.folder)
    words = _words("own_loop.main", f"hardware={hardware}", f"train.num_steps={steps}", "params.width=32")
    end = _interrupt(local, "stopped", words, 20)
    assert 20 <= end["saved_step"] < steps
    assert end["step"] == end["saved_step"]

    resumed = local.train(*words, "sweep_name=stopped")
    assert (resumed["state"], resumed["step"]) == ("COMPLETED", steps)
    assert [record["step"] for record in local.events("stopped", "resume")] == [0, end["saved_step"]]
    undisturbed = local.train(*words, "sweep_name=undisturbed")
    assert local.final_state("stopped") == local.final_state("undisturbed")
    assert resumed["metrics"] == undisturbed["metrics"]
    assert resumed["metrics"]["eval_accuracy"] > 0.9
    lines = (local.run_folder("stopped") / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["step"] for line in lines]
    assert logged == list(range(10, steps + 1, 10)), "no step twice, none left out"
    assert local.metrics("stopped", "loss") == local.metrics("undisturbed", "loss")


SCIKIT = '''
"""scikit-learn writes its own files: the run says which one counts."""

import pathlib
import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier


def main(config, run):
    images, labels = load_digits(return_X_y=True)
    model = SGDClassifier(alpha=config.params["alpha"], random_state=0)
    shuffle = np.random.default_rng(config.seed)
    saved = run.restore(shuffle=shuffle, file=None)
    if saved["file"]:
        with np.load(run.checkpoint_dir / saved["file"]) as arrays:
            for name in arrays:
                setattr(model, name, arrays[name] if arrays[name].ndim else arrays[name].item())
    for step in range(saved.step + 1, run.num_steps + 1):
        rows = shuffle.integers(1400, size=32)
        if pathlib.Path("slowly").exists():  # the test has time to stop it
            time.sleep(0.05)
        model.partial_fit(images[rows], labels[rows], classes=np.arange(10))
        run.log(step, {"train_accuracy": model.score(images[rows], labels[rows])})
        stop = run.should_stop(step)
        if stop or run.should_save(step) or step == run.num_steps:
            file = f"model-{step:06d}.npz"
            if run.is_rank_zero:
                np.savez(run.checkpoint_dir / file, coef_=model.coef_, intercept_=model.intercept_, t_=model.t_)
            run.save(step, shuffle=shuffle, file=file)
        if stop:
            return
    run.finish({"eval_accuracy": model.score(images[1400:], labels[1400:])})
'''


@pytest.mark.long
def test_another_framework_with_checkpoints_of_its_own(local: LocalDriver) -> None:
    (local.folder / "scikit_loop.py").write_text(SCIKIT)
    words = _words("scikit_loop.main", "train.num_steps=200", "params.alpha=1e-3")
    (local.folder / "slowly").touch()
    end = _interrupt(local, "stopped", words, 30)
    (local.folder / "slowly").unlink()
    assert local.train(*words, "sweep_name=stopped")["state"] == "COMPLETED"
    assert [record["step"] for record in local.events("stopped", "resume")] == [0, end["saved_step"]]
    undisturbed = local.train(*words, "sweep_name=undisturbed")
    assert undisturbed["metrics"]["eval_accuracy"] > 0.8
    models = []
    for sweep in ("stopped", "undisturbed"):
        folder = local.run_folder(sweep) / "output" / "checkpoints"
        assert folder.stat().st_mode & 0o777 == 0o700
        with np.load(folder / "model-000200.npz") as arrays:
            models.append({name: arrays[name].tobytes() for name in arrays})
    assert models[0] == models[1]
    assert (local.run_folder("stopped") / "output" / "checkpoints" / f"model-{end['saved_step']:06d}.npz").exists()
    assert local.metrics("stopped", "train_accuracy") == local.metrics("undisturbed", "train_accuracy")


ENDS = """
import sys


def main(config, run):
    restored = run.restore()
    how = config.params["how"]
    for step in range(restored.step + 1, 6):
        if run.is_rank_zero:  # as people write it; the ranks then heard of different steps
            run.log(step, {"x": step})
    if how == "returns":
        return
    if how == "exits":
        sys.exit(0)
    if how == "raises" and run.rank == run.world_size - 1:
        raise RuntimeError("the cluster's coffee is out")
    if how == "early":
        run.finish({"x": 1})
    if how == "differ":
        if run.rank == 0:
            run.finish({"x": 1})
        else:
            run.agree_to_stop(5)
"""


@pytest.mark.few(1)
@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "hardware", "message"),
    [
        (
            "returns",
            "cpu_x1",
            "LoopError: ends.main returned at step 5 of 9, neither finished nor stopped",
        ),
        ("exits", "cpu_x1", "SystemExit: 0"),
        pytest.param("raises", "cpu_x2", "RuntimeError: the cluster's coffee is out", marks=pytest.mark.long),
        (
            "differ",
            "cpu_x2",
            "or all must stop, but rank 0 finished at step 5, rank 1 stopped at",
        ),
    ],
)
def test_an_end_that_is_none_is_a_failure(local: LocalDriver, how: str, hardware: str, message: str) -> None:
    """P8: whatever a person's code does, a run that was not finished is never COMPLETED."""
    (local.folder / "ends.py").write_text(ENDS)
    words = _words("ends.main", f"hardware={hardware}", "train.num_steps=9", f"params.how={how}", "sweep_name=ends")
    done = local.run("train", *words, check=False)
    assert done.returncode == 1, local.logs()
    (run,) = local.json("status", "ends")["runs"]
    assert run["state"] == "FAILED"
    assert message in local.logs()
    (end,) = local.events("ends", "end")
    assert message.partition(": ")[2][:40] in end["error"]["message"] or how in ("exits", "differ")
    assert not (local.run_folder("ends") / "DONE").exists()


@pytest.mark.long
@pytest.mark.dist
def test_a_loop_may_finish_early(local: LocalDriver) -> None:
    (local.folder / "ends.py").write_text(ENDS)
    words = ("hardware=cpu_x2", "train.num_steps=9", "params.how=early", "sweep_name=early")
    trained = local.train(*_words("ends.main", *words))
    assert (trained["state"], trained["step"], trained["metrics"]) == ("COMPLETED", 5, {"x": 1})
    assert local.events("early", "end")[0]["step"] == 5


@pytest.mark.long
def test_a_name_that_leads_nowhere_is_a_configuration_error(local: LocalDriver) -> None:
    (local.folder / "ends.py").write_text(ENDS)
    words = ("train", *_words("ends.nothing", "params.how=early", "sweep_name=typo"))
    done = local.run(*words, check=False)
    assert done.returncode == 2
    assert f"train.main=ends.nothing was not found: {local.folder}/ends.py defines no nothing." in done.stderr
    assert not (local.folder / "runs").exists(), "nothing was submitted"
    # What a module makes when it runs only the run can see.
    (local.folder / "ends.py").write_text(f"{ENDS}\n\ndef __getattr__(name):\n    raise AttributeError(name)\n")
    done = local.run(*words, check=False)
    assert done.returncode == 1
    assert "train.main=ends.nothing was not found" in local.logs()
    assert local.events("typo", "end")[0]["state"] == "FAILED"
