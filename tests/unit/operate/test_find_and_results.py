"""From what a person types to sweeps and runs; and one row a run, best first."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from hpc_trainer.errors import ConfigError, RunStateError, UntrustedFileError
from hpc_trainer.operate.find import elsewhere_too, find_runs, find_sweep, list_sweeps, select
from hpc_trainer.operate.results import named_apart, result_table, sort_rows
from hpc_trainer.operate.show import find_run
from hpc_trainer.record.files import write_json
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_spec, make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def sweeps(runs_dir: Path) -> dict[str, SweepOnDisk]:
    """`old` has seeds 0-2, `new` seeds 7-8."""
    made = {
        "old": SweepOnDisk(runs_dir / "old", make_specs(3)),
        "new": SweepOnDisk(runs_dir / "new", [make_spec(seed=seed) for seed in (7, 8)]),
    }
    os.utime(made["old"].paths.specs, (time.time() - 100,) * 2)
    (runs_dir / "not-a-sweep").mkdir()
    return made


def test_the_newest_sweep_comes_first(runs_dir: Path, sweeps: dict[str, SweepOnDisk]) -> None:
    assert [sweep.name for sweep in list_sweeps(runs_dir)] == ["new", "old"]
    assert find_sweep(runs_dir, None).name == "new"
    sweeps["old"].submit(age_s=0)
    assert find_sweep(runs_dir, None).name == "old"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_colleagues_sweep_in_a_shared_folder_is_none_of_ours(
    runs_dir: Path, sweeps: dict[str, SweepOnDisk], fake_slurm: FakeSlurm
) -> None:
    theirs = SweepOnDisk(runs_dir / "theirs", make_specs(3))  # newer, readable, and with runs of the same names
    for path in (theirs.paths.folder, theirs.paths.specs):
        os.chown(path, 54321, -1)
        path.chmod(path.stat().st_mode | 0o050)
    assert [sweep.name for sweep in list_sweeps(runs_dir)] == ["new", "old"]
    assert find_sweep(runs_dir, None).name == "new"
    status, runs = select(runs_dir, [theirs.specs[0].run_id], None)
    assert (status.sweep.name, len(runs)) == ("old", 1)
    with pytest.raises(UntrustedFileError, match=r"theirs/specs\.jsonl belongs to user 54321"):
        read_status(find_sweep(runs_dir, "theirs"))
    for sweep in ("old", "new"):
        shutil.rmtree(runs_dir / sweep)
    with pytest.raises(RunStateError, match=r"holds no sweep of yours, and 1 of others\."):
        find_sweep(runs_dir, None)


def test_a_sweep_by_name_or_path(
    runs_dir: Path, sweeps: dict[str, SweepOnDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_sweep(runs_dir, "old").folder == runs_dir / "old"
    assert find_sweep(Path("/elsewhere"), str(runs_dir / "old")).folder == runs_dir / "old"
    monkeypatch.chdir(runs_dir)
    assert find_sweep(Path("/elsewhere"), "old").folder == runs_dir / "old"


def test_no_sweep_at_all_is_said(runs_dir: Path) -> None:
    with pytest.raises(
        RunStateError,
        match=r"/.* holds no sweep.*\. For sweeps in another folder add --runs-dir",
    ):
        find_sweep(runs_dir, None)


def test_a_folder_without_sweeps_says_why_nothing_is_there(
    runs_dir: Path, sweeps: dict[str, SweepOnDisk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    with pytest.raises(RunStateError, match=r"/other holds no sweep: there is no such folder\. .*HPC_TRAINER_RUNS="):
        find_sweep(other, None)
    other.mkdir()
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(other))
    with pytest.raises(RunStateError, match=r"/other \(HPC_TRAINER_RUNS\) holds no sweep: it is empty\. For"):
        find_sweep(other, None)
    for name in ("data", "notes.txt", "a", "b"):
        (other / name).mkdir()
    few = r"it has only a, b, data and 1 more, without specs\.jsonl, submissions\.jsonl or sweep\.json\. For"
    with pytest.raises(RunStateError, match=few):
        find_sweep(other, None)
    (other / "data" / "train.bin").touch()
    with pytest.raises(RunStateError, match=rf"there is no sweep data: .*/data is a folder with other files\. .*{few}"):
        read_status(find_sweep(other, "data"))


def test_the_folder_of_a_sweep_is_no_folder_of_sweeps(runs_dir: Path, sweeps: dict[str, SweepOnDisk]) -> None:
    """A copy of the specs is in `submissions/`, which looked like a sweep of that name."""
    old = sweeps["old"].paths
    sweeps["old"].submit()
    old.intents.mkdir(exist_ok=True)
    shutil.copy(old.specs, old.specs_copy)
    is_one = rf"/old is a sweep itself, and not a folder of sweeps\. Its name is old: add --runs-dir {runs_dir}\. "
    assert list_sweeps(old.folder) == []
    with pytest.raises(RunStateError, match=is_one):
        find_sweep(old.folder, None)
    with pytest.raises(RunStateError, match=rf"there is no sweep olds\. .*{is_one}"):
        read_status(find_sweep(old.folder, "olds"))
    nested = SweepOnDisk(old.folder / "nested", make_specs(1))
    write_json(nested.paths.sweep, {"run_ids": []})
    assert [sweep.name for sweep in list_sweeps(old.folder)] == ["nested"]


def test_runs_by_id_beginning_or_end(sweeps: dict[str, SweepOnDisk]) -> None:
    status = read_status(sweeps["old"].paths)
    ids = [run.run_id for run in status.runs]
    assert find_runs(status, [ids[1]]) == [ids[1]]
    assert find_runs(status, [ids[2][-8:]]) == [ids[2]]
    assert find_runs(status, ["mlp-"]) == ids
    assert find_runs(status, [ids[1][-8:], ids[1]]) == [ids[1]], "once"
    assert find_runs(status, []) == ids
    with pytest.raises(RunStateError, match=rf"no run of old is named 'nope'\. Runs: {ids[0]}, "):
        find_runs(status, [ids[0], "nope"])


def test_runs_are_looked_for_in_the_newest_sweep_then_in_the_others(
    runs_dir: Path, sweeps: dict[str, SweepOnDisk]
) -> None:
    old, new = ([spec.run_id for spec in sweeps[name].specs] for name in ("old", "new"))
    assert _selected(runs_dir, [new[0][-8:]], None) == ("new", [new[0]])
    assert _selected(runs_dir, [old[0][-8:]], None) == ("old", [old[0]])
    assert _selected(runs_dir, [], None) == ("new", new)
    assert _selected(runs_dir, ["old"], None) == ("old", old)
    assert _selected(runs_dir, [], "old") == ("old", old)
    assert _selected(runs_dir, ["mlp-"], "old") == ("old", old)
    with pytest.raises(RunStateError, match=r"no such sweep, and no run of new is named 'nope'.* Sweeps: new, old\."):
        select(runs_dir, ["nope"], None)
    with pytest.raises(RunStateError, match=r"no such sweep, .* Did you mean new\? Sweeps: new, old\."):
        select(runs_dir, ["neww"], None)
    with pytest.raises(RunStateError, match="no run of old is named"):
        select(runs_dir, [new[0]], "old")


def test_sweep_slash_run_says_which(runs_dir: Path, sweeps: dict[str, SweepOnDisk]) -> None:
    old, new = ([spec.run_id for spec in sweeps[name].specs] for name in ("old", "new"))
    SweepOnDisk(runs_dir / "again", sweeps["old"].specs)  # newer, with runs of the same ids
    assert _selected(runs_dir, [old[0]], None) == ("again", [old[0]])
    assert _selected(runs_dir, [f"old/{old[0]}"], None) == ("old", [old[0]])
    assert _selected(runs_dir, [f"old/{old[0]}", f"old/{old[1][-8:]}"], None) == ("old", old[:2])
    assert find_run(runs_dir, f"old/{old[0][-8:]}", None).sweep.name == "old"
    assert find_run(runs_dir, old[0], None).sweep.name == "again"
    status, runs = select(runs_dir, [old[0]], None)
    assert elsewhere_too(status, runs, [old[0]], None) == (
        f"{old[0]} is the run of sweep again; old has a run of this name too: write old/{old[0]} for that one."
    )
    status, runs = select(runs_dir, [f"old/{old[0]}"], None)
    assert elsewhere_too(status, runs, [f"old/{old[0]}"], None) is None
    assert _selected(runs_dir, ["old", old[0], old[1][-8:]], None) == ("old", old[:2])
    with pytest.raises(RunStateError, match="there is no such sweep, and no run of again is named"):
        select(runs_dir, [f"nosuch/{old[0]}"], None)
    for names in ([old[0], new[0]], [f"old/{old[0]}", f"new/{new[0]}"]):
        with pytest.raises(RunStateError, match="are runs of several sweeps: name runs of one sweep at a time"):
            select(runs_dir, names, None)
    with pytest.raises(RunStateError, match="old is a sweep: name one of its runs, as mlp-"):
        find_run(runs_dir, "old/", None)
    with pytest.raises(RunStateError, match="no run is named 'new/nope'"):
        find_run(runs_dir, "new/nope", None)


def test_a_second_sweep_is_no_run_of_the_first(runs_dir: Path, sweeps: dict[str, SweepOnDisk]) -> None:
    """Its name may begin the ids of runs there: `cancel old mlp` would cancel all of old."""
    SweepOnDisk(runs_dir / "mlp", make_specs(1))
    for names in (["old", "mlp"], ["old", "mlp/"]):
        with pytest.raises(RunStateError, match=r"old and mlp/? are sweeps: name one at a time"):
            select(runs_dir, names, None)


def _selected(runs_dir: Path, names: list[str], sweep: str | None) -> tuple[str, list[str]]:
    status, runs = select(runs_dir, names, sweep)
    return status.sweep.name, runs


# --- results ---


def test_a_row_says_what_was_asked_what_came_out_and_what_it_cost(runs_dir: Path, fake_slurm: FakeSlurm) -> None:
    spec = make_spec("cluster=slurm", "hardware=gpu_x8", axes={"optim.lr": "0.1", "model": "mlp"})
    sweep = SweepOnDisk(runs_dir / "s", [spec, make_spec("cluster=slurm", seed=1, axes={"optim.lr": "0.2"})])
    sweep.submit()
    sweep.start(age_s=1800)
    sweep.end(state=RunState.COMPLETED, cause="done")
    sweep.done(eval_accuracy=0.9, eval_loss=0.3, loss=0.1, lr=0.0, steps_per_s=3.0, samples_per_s=3.0, grad_norm=1.0)
    fake_slurm.answer("squeue", "500_1|PENDING||Priority|x\n")
    first, second = result_table(read_status(sweep.paths)).rows
    assert first == {
        "run_id": spec.run_id, "optim.lr": "0.1", "model": "mlp", "hardware": "gpu_x8", "eval_accuracy": 0.9,
        "eval_loss": 0.3, "state": "COMPLETED", "step": 200, "gpu_hours": pytest.approx(4.0, abs=0.1), "attempts": 1,
        "core_hours": pytest.approx(0.5 * 8 * spec.shape.cpus_per_task, abs=0.1), "redone_s": 0.0,
        "wall_s": pytest.approx(1800, abs=5), "queue_s": pytest.approx(1800, abs=5),
    }  # fmt: skip
    assert list(first)[:1] + list(first)[5:9] == ["run_id", "eval_loss", "state", "step", "gpu_hours"]
    assert (second["state"], second["gpu_hours"], second["attempts"]) == ("PENDING", 0, 0)


def test_a_told_name_never_shadows_a_column_of_ours(runs_dir: Path, no_slurm: None) -> None:
    words = ("train.command=python",)
    specs = [
        make_spec(*words, f"+params.lr={lr}", f"+params.width={width}", axes={"params.lr": lr, "params.width": width})
        for lr, width in (("1e-3", "16"), ("1e-2", "32"))
    ]
    sweep = SweepOnDisk(runs_dir / "s", specs)
    sweep.submit(executor="local")
    told = {"run_id": 7.0, "params.lr": 99.0, "state": 1.0, "step": 5.0, "energy_kwh": 3.0, "accuracy": 0.5}
    for index in (0, 1):
        sweep.start(index, executor="local")
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        write_json(sweep.run(index).result, {"metrics": told})
        sweep.mark("DONE", index)
    first, second = result_table(read_status(sweep.paths)).rows
    assert (first["run_id"], second["run_id"]) == tuple(spec.run_id for spec in specs)
    assert (first["params.lr"], first["params.width"], first["state"]) == ("1e-3", "16", "COMPLETED")
    assert {name: first[f"metrics.{name}"] for name in told if name != "accuracy"} == {
        name: value for name, value in told.items() if name != "accuracy"
    }
    assert first["accuracy"] == 0.5
    (typed, _) = result_table(read_status(sweep.paths), typed=True).rows
    assert (typed["params.lr"], typed["params.width"], typed["run_id"]) == (0.001, 16, specs[0].run_id)
    assert json.loads(json.dumps(typed))["params.width"] == 16
    assert typed["metrics.params.lr"] == 99.0


def test_no_two_told_names_share_a_column_nor_take_the_name_of_a_constant() -> None:
    """A program that told `metrics.run_id` too lost one of the two; `seed` was taken for the seed of all runs."""
    told = ("run_id", "metrics.run_id", "metrics.metrics.run_id", "seed", "params.depth", "loss", "metrics.loss")
    assert named_apart(told, {"run_id"}) == {
        "run_id": "metrics.run_id", "metrics.run_id": "metrics.metrics.run_id",
        "metrics.metrics.run_id": "metrics.metrics.metrics.run_id", "seed": "metrics.seed",
        "params.depth": "metrics.params.depth", "loss": "loss", "metrics.loss": "metrics.loss",
    }  # fmt: skip


ROWS = [{"n": 1, "acc": 0.5, "eval_loss": 2.0}, {"n": 2}, {"n": 3, "acc": 0.9, "eval_loss": 1.0}, {"n": 4, "acc": None}]


@pytest.mark.parametrize(("key", "order"), [("acc", [3, 1, 2, 4]), ("eval_loss", [3, 1, 2, 4]), ("n", [4, 3, 2, 1])])
def test_best_first_and_rows_without_a_value_last(key: str, order: list[int]) -> None:
    assert [row["n"] for row in sort_rows(ROWS, key)] == order
    with_value, without = [n for n in order if any(row["n"] == n and row.get(key) is not None for row in ROWS)], 4
    reversed_order = [row["n"] for row in sort_rows(ROWS, f"-{key}")]
    assert reversed_order[: len(with_value)] == with_value[::-1]
    assert key == "n" or reversed_order[-1] == without


def test_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--sort nope: there is no such column\. Valid: n, acc, eval_loss"):
        sort_rows(ROWS, "nope")
    assert sort_rows([], "nope") == []
    assert sort_rows(ROWS, "-N") == sort_rows(ROWS, "-n")


def test_words_are_sorted_as_words() -> None:
    rows = [{"state": "RUNNING"}, {"state": "COMPLETED"}]
    assert [row["state"] for row in sort_rows(rows, "state")] == ["COMPLETED", "RUNNING"]


def test_a_loss_that_is_not_a_number_is_not_best() -> None:
    rows = [{"n": 1, "eval_loss": 2.0}, {"n": 2, "eval_loss": float("nan")}, {"n": 3, "eval_loss": 1.0}]
    for shuffled in (rows, rows[::-1], [rows[1], rows[0], rows[2]], [rows[2], rows[1], rows[0]]):
        assert [row["n"] for row in sort_rows(shuffled, "eval_loss")] == [3, 1, 2]


def test_axes_are_sorted_as_numbers_where_they_are_numbers() -> None:
    rows = [{"lr": "1e-3"}, {"lr": "0.3"}, {"lr": "0.01"}, {"lr": "2"}]
    assert [row["lr"] for row in sort_rows(rows, "lr")] == ["2", "0.3", "0.01", "1e-3"]
    mixed = [{"x": "null"}, {"x": "1"}, {"x": "b"}, {"x": "30"}]
    assert [row["x"] for row in sort_rows(mixed, "x")] == ["30", "1", "b", "null"]
