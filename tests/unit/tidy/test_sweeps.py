"""Tags, notes, names and columns of sweeps; `rm` and its tombstones."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from hpc_trainer.cli import main as cli
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.output import BestMode, CheckpointConfig
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.grids import plan_grid, submit_grid
from hpc_trainer.operate.find import find_sweep, list_sweeps, select
from hpc_trainer.operate.results import result_table
from hpc_trainer.operate.show import sweep_lines
from hpc_trainer.record import chain
from hpc_trainer.record.holds import write_hold
from hpc_trainer.record.known_runs import known_by_files
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import write_intent, write_waiting
from hpc_trainer.search.commands import SOURCE
from hpc_trainer.tidy.cleaning import Needs, check_not_needed, remove_runs
from hpc_trainer.tidy.labels import at_rest, change_note, change_tags, read_labels, rename_sweep
from hpc_trainer.tidy.walk import best_of, size_of, size_words, sizes_of_sweep
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.search.searches import SearchOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> SweepOnDisk:
    """Three runs that have ended: complete, failed, complete."""
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    sweep = SweepOnDisk(tmp_path / "runs" / "mine", make_specs(3, "cluster=slurm"))
    (tmp_path / "runs").chmod(0o700)
    sweep.paths.folder.chmod(0o700)
    sweep.submit()
    for index in range(3):
        sweep.start(index)
    sweep.done(0, eval_accuracy=0.7)
    sweep.end(1, state=RunState.FAILED, cause="exception")
    sweep.done(2, eval_accuracy=0.9)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_0|COMPLETED|0:0|n1\n500_2|COMPLETED|0:0|n1\n")
    for path in sweep.paths.folder.iterdir():
        path.chmod(0o700 if path.is_dir() else 0o600)
    return sweep


def _call(*words: str) -> int:
    import sys

    before, sys.argv = sys.argv, ["hpc-trainer", *words]
    try:
        cli.main()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.argv = before
    return 0


def test_tags_and_the_note_are_kept_and_shown(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> None:
    assert change_tags(sweep.paths, ["v2", "good"]).tags == ("good", "v2")
    assert change_note(sweep.paths, "the first try").tags == ("good", "v2")
    as_ascii = "zu groß".encode().decode("ascii", "surrogateescape")  # as Python reads an argument in the locale POSIX
    assert change_note(sweep.paths, as_ascii).note == read_labels(sweep.paths).note == "zu groß"
    change_note(sweep.paths, "the first try")
    assert change_tags(sweep.paths, [], ["v2"]).tags == ("good",)
    assert read_labels(sweep.paths).note == "the first try"
    _call("sweeps", "--json")
    (line,) = json.loads(capsys.readouterr().out)
    assert line["tags"] == ["good"]
    assert line["note"] == "the first try"
    assert line["states"] == {"COMPLETED": 2, "FAILED": 1}
    assert line["best"] == {"metric": "eval_accuracy", "value": 0.9, "run_id": sweep.specs[2].run_id}
    assert _call("sweeps", "--tag", "good") == 0
    assert "0.9" in capsys.readouterr().out
    assert _call("sweeps", "--tag", "goood") == 2
    assert "Did you mean good?" in capsys.readouterr().err


@pytest.mark.parametrize("tag", ["", "a b", "-x", "x" * 51, "ä", "a\nb", "../x y"])
def test_no_odd_tag(tag: str, sweep: SweepOnDisk) -> None:
    with pytest.raises(ConfigError, match="must be a letter or digit"):
        change_tags(sweep.paths, [tag])


def test_a_tag_that_is_not_there_and_a_sweep_that_is_not_there(sweep: SweepOnDisk) -> None:
    change_tags(sweep.paths, ["good"])
    with pytest.raises(ConfigError, match=r"no tag god\. Did you mean good"):
        change_tags(sweep.paths, [], ["god"])
    with pytest.raises(RunStateError, match=r"no sweep mime\. Did you mean mine"):
        change_tags(SweepPaths(sweep.paths.folder.with_name("mime")), ["x"])


@pytest.mark.parametrize("content", ["", "[]", '{"tags": 3, "note": []}', '{"tags": [1, "ok"]}', "\x00"])
def test_damaged_labels_are_no_labels(content: str, sweep: SweepOnDisk) -> None:
    sweep.paths.labels.write_text(content)
    sweep.paths.labels.chmod(0o600)
    labels = read_labels(sweep.paths)
    assert labels.note == ""
    assert set(labels.tags) <= {"ok"}
    assert len(sweep_lines(sweep.paths.folder.parent, seconds=5.0)) == 1


def test_a_walk_is_remembered_until_a_name_changes(sweep: SweepOnDisk) -> None:
    (sweep.run(0).logs / "big").write_bytes(b"x" * 100_000)
    size, _ = sizes_of_sweep(sweep.paths)
    assert size is not None
    assert size.num_bytes >= 100_000
    assert size.inodes + 1 == size_of(sweep.paths.folder).inodes, "the memory is written after the count"
    time.sleep(0.01)
    late, _ = sizes_of_sweep(sweep.paths, deadline=0.0)
    assert late is not None, "nothing has to be walked"
    (sweep.run(0).logs / "more").write_bytes(b"x" * 100_000)
    assert sizes_of_sweep(sweep.paths, deadline=0.0)[0] is None, "it has to be walked, and there is no time"
    grown, _ = sizes_of_sweep(sweep.paths)
    assert grown is not None
    assert grown.num_bytes >= size.num_bytes + 100_000


def test_hard_links_count_once_and_links_lead_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"x" * 50_000)
    os.link(folder / "a", folder / "b")
    (folder / "loop").symlink_to(folder)
    size = size_of(folder)
    assert size.inodes == 3
    assert size.num_bytes < 100_000
    assert size_of(tmp_path / "nothing").inodes == 0
    assert [size_words(each) for each in (0, 999, 1_000, 87_300_000, 1.2e9, 3e12, 999_600)] == [
        "0 B", "999 B", "1 kB", "87.3 MB", "1.2 GB", "3 TB", "1 MB",
    ]  # fmt: skip


def test_sweeps_asks_no_scheduler_and_says_what_is_open(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit("501")
    fake_slurm.forget_calls()
    (line,) = sweep_lines(sweep.paths.folder.parent, seconds=5.0)
    assert line.more["states"] == {"COMPLETED": 2, "OPEN": 1}
    assert [fake_slurm.calls(name) for name in ("squeue", "sacct", "scontrol")] == [[], [], []]


# Names.


def test_a_renamed_sweep_is_found_by_both_names(sweep: SweepOnDisk, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    new, note = rename_sweep(sweep.paths, "yours")
    assert note is None
    assert new.folder == runs / "yours"
    assert [each.name for each in list_sweeps(runs)] == ["yours"], "listed once"
    assert find_sweep(runs, "mine").folder == runs / "yours"
    assert find_sweep(Path("elsewhere"), str(runs / "mine")).folder == runs / "yours"
    status, run_ids = select(runs, ["mine", sweep.specs[0].run_id], None)
    assert status.sweep.name == "yours"
    assert run_ids == [sweep.specs[0].run_id]
    rename_sweep(new, "ours")
    assert find_sweep(runs, "mine").folder == runs / "ours"
    assert find_sweep(runs, "yours").folder == runs / "ours"
    assert not (runs / "ours" / "submit.lock").exists()
    back, _ = rename_sweep(find_sweep(runs, "mine"), "mine")
    assert find_sweep(runs, "ours").folder == back.folder == runs / "mine"
    assert not back.folder.is_symlink()


def test_the_same_submit_finds_a_renamed_sweep(sweep: SweepOnDisk, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    import hpc_trainer

    grid = ("cluster=slurm", "experiment=digits", "seed=0,1", "sweep_name=before", "snapshot=off")
    done = hpc_trainer.submit(*grid)
    for run_id in done.arrays[0].run_ids:
        run = SweepPaths(tmp_path / "runs" / "before").run(run_id)
        run.folder.mkdir(mode=0o700)
        run.marker("DONE").write_text("{}\n")
    fake_slurm.clear_queue()
    rename_sweep(SweepPaths(tmp_path / "runs" / "before"), "after")
    again = hpc_trainer.submit(*grid)
    assert again.num_submitted == 0
    assert again.plan.grid.sweep.name == "after"


def test_a_sweep_at_work_keeps_its_name(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    sweep.submit("501")
    fake_slurm.answer("squeue", "501_1|PENDING||Priority|x\n")
    with pytest.raises(RunStateError, match=r"rename is refused while something of mine waits or works: .*PENDING"):
        rename_sweep(sweep.paths, "yours")
    assert sweep.paths.exists
    fake_slurm.answer("squeue", error="down\n", code=1)
    with pytest.raises(RunStateError, match="UNKNOWN"):
        rename_sweep(sweep.paths, "yours")


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", ".x", "x" * 101, "a\n", "-x"])
def test_no_odd_name(name: str, sweep: SweepOnDisk) -> None:
    with pytest.raises(ConfigError, match="name"):
        rename_sweep(sweep.paths, name)


def test_no_name_that_is_taken(sweep: SweepOnDisk, tmp_path: Path) -> None:
    SweepOnDisk(tmp_path / "runs" / "other", make_specs(1, "cluster=slurm"))
    with pytest.raises(RunStateError, match="exists already"):
        rename_sweep(sweep.paths, "other")
    with pytest.raises(ConfigError, match="its name already"):
        rename_sweep(sweep.paths, "mine")


def test_a_link_to_elsewhere_is_no_earlier_name(sweep: SweepOnDisk, tmp_path: Path) -> None:
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "runs" / "mine")
    assert find_sweep(tmp_path / "runs", "link").name == "link"
    (tmp_path / "runs" / "ring").symlink_to("ring")
    assert find_sweep(tmp_path / "runs", "ring").name == "ring"


# rm.


def test_a_removed_run_is_gone_and_the_same_grid_begins_it_anew(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ids = [spec.run_id for spec in sweep.specs]
    assert _call("rm", run_ids[1], run_ids[2]) == 0
    assert "would remove" in capsys.readouterr().out
    assert sweep.run(1).folder.exists()
    assert _call("rm", run_ids[1], run_ids[2], "--yes") == 0
    assert not (sweep.paths.folder / run_ids[1]).exists()
    assert not list(sweep.paths.folder.glob(".trash-*"))
    for is_look in (True, False):
        states = read_status(sweep.paths, is_look=is_look).states
        assert [states[run_id] for run_id in run_ids] == [RunState.COMPLETED, RunState.GONE, RunState.GONE]
    assert "removed by" in str(read_status(sweep.paths).run(run_ids[1]).cause)
    grid = make_grid(sweep.paths.folder, sweep.specs, Executor.slurm)
    plan = plan_grid(grid)
    assert [spec.run_id for spec in plan.specs] == run_ids[1:]
    assert sum("begins anew" in note for note in plan.notes) == 2
    done = submit_grid(grid, command_line=["hpc-trainer", "submit"])
    assert done.num_submitted == 2
    states = read_status(sweep.paths).states
    assert [states[run_id] for run_id in run_ids[1:]] == [RunState.PENDING, RunState.PENDING], "the tombstone is void"


def test_a_killed_rm_is_finished_by_the_same_command(sweep: SweepOnDisk) -> None:
    """The tombstone is there and the folder too: the run counts as removed."""
    run_id = sweep.specs[0].run_id
    with at_rest(sweep.paths, "rm", [run_id]) as status:
        remove_runs(status, [run_id])
    sweep.run(0)  # half of it is back
    assert read_status(sweep.paths).states[run_id] is RunState.GONE
    with at_rest(sweep.paths, "rm", [run_id]) as status:
        remove_runs(status, [run_id])
    assert not (sweep.paths.folder / run_id).exists()


def test_a_removed_sweep_is_named_so_and_its_name_is_free(
    sweep: SweepOnDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm
) -> None:
    rename_sweep(sweep.paths, "later")
    assert _call("rm", "mine", "--yes") == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["later"]
    assert [path.name for path in (tmp_path / "runs" / "later").iterdir()] == ["REMOVED"]
    capsys.readouterr()
    assert _call("status", "later") == 1
    assert "was removed by" in capsys.readouterr().err
    assert list_sweeps(tmp_path / "runs") == []
    for verb in ("why", "rm", "cancel", "hold", "release", "retry", "logs"):  # which also take runs
        assert _call(verb, "later") == 1
        assert "the sweep later was removed by" in capsys.readouterr().err, verb
    grid = make_grid(tmp_path / "runs" / "later", sweep.specs, Executor.slurm)
    done = submit_grid(grid, command_line=["hpc-trainer", "submit"])
    assert done.num_submitted == 3
    assert any("An earlier sweep later was removed" in note for note in done.plan.notes)
    assert read_status(grid.sweep).counts == {"PENDING": 3}


def test_a_folder_that_is_no_sweep_of_ours_is_not_removed(
    sweep: SweepOnDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("a", "[]", '{"method": "grid"}'):  # a file of another program has the name of one of ours
        foreign = tmp_path / "runs" / "foreign"
        foreign.mkdir(parents=True, exist_ok=True)
        (foreign / "sweep.json").write_text(text)
        (foreign / "thesis.tex").write_text("x")
        assert _call("rm", "foreign", "--yes") == 1
        assert "has no run, and no sweep.json or search.json of hpc-trainer" in capsys.readouterr().err
        assert (foreign / "thesis.tex").exists()
        assert _call("rm", "--sweep", "foreign", "--yes") == 1
    (foreign / "sweep.json").write_text('{"sweep": "foreign", "run_ids": []}')
    assert _call("rm", "foreign", "--yes") == 0
    search = SearchOnDisk(tmp_path / "runs", "search=random", "search.trials=2")
    write_intent(search.paths, executor="slurm", hardware="x", run_ids=[], slots=1, source=SOURCE)
    assert _call("rm", search.paths.name, "--yes") == 0, "a search that has drawn nothing"
    assert not search.paths.search.exists()


def test_what_waits_or_works_is_not_removed(
    sweep: SweepOnDisk, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.submit("501")
    fake_slurm.answer("squeue", "501_1|RUNNING|n1|None|x\n")
    assert _call("rm", "mine", "--yes") == 1
    assert "RUNNING" in capsys.readouterr().err
    assert _call("rm", sweep.specs[1].run_id, "--yes") == 1
    assert sweep.run(1).folder.exists()
    assert _call("rm", sweep.specs[0].run_id, "--yes") == 0, "the others may go"
    assert _call("rm") == 2


def test_what_another_run_begins_with_stays(sweep: SweepOnDisk, tmp_path: Path) -> None:
    checkpoint = sweep.run(0).checkpoints / "step-00000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    child = SweepOnDisk(
        tmp_path / "runs" / "child", make_specs(1, "cluster=slurm", checkpoint__resume_from=str(checkpoint))
    )
    needs = Needs(tmp_path / "runs")
    for folder in (sweep.paths.folder, sweep.run(0).folder, checkpoint):
        with pytest.raises(RunStateError, match=r"child/.* is not complete and begins with"):
            check_not_needed([folder], sweep.paths, needs, [])
    check_not_needed([sweep.run(1).folder], sweep.paths, needs, [])
    child.done(0)
    check_not_needed([sweep.paths.folder], sweep.paths, Needs(tmp_path / "runs"), [])
    assert Needs(tmp_path / "runs").of(checkpoint), "clean keeps it all the same"


@pytest.mark.parametrize(
    ("kept", "metrics", "expected"),
    [
        ("spikes", {"eval_accuracy": [0.1, 0.9], "spikes": [0.8, 0.2]}, "spikes"),
        (None, {"eval_accuracy": [0.1, 0.9], "spikes": [0.8, 0.2]}, "eval_accuracy"),
        ("eval_loss", {"eval_accuracy": [0.1, 0.9], "eval_loss": [0.2, 0.3]}, "eval_loss"),
        ("spikes", {"eval_accuracy": [0.1, 0.9]}, "eval_accuracy"),
    ],
)
def test_sweeps_results_and_followers_compare_runs_by_one_metric(
    tmp_path: Path, fake_slurm: FakeSlurm, kept: str | None, metrics: dict[str, list[float]], expected: str
) -> None:
    mode = BestMode.max if kept == "spikes" else BestMode.auto  # its name does not tell
    checkpoint = CheckpointConfig(keep_best=kept, best_mode=mode)
    sweep = SweepOnDisk(tmp_path / "runs" / "s", make_specs(2, "cluster=slurm", checkpoint=checkpoint))
    sweep.submit()
    for index in range(2):
        sweep.start(index, resumed=0)
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index, **{name: values[index] for name, values in metrics.items()})
    found = best_of(known_by_files(sweep.paths)[1], sizes_of_sweep(sweep.paths, math.inf)[1])
    table = result_table(read_status(sweep.paths, is_look=True))
    assert found is not None
    assert (found[0], table.compared_by) == (expected, expected)
    assert found[2] == table.sorted_by(expected).rows[0]["run_id"]
    if kept in (None, *metrics):  # a run that follows insists on the metric of its checkpoints
        run, metric = chain.best_of(sweep.paths.folder)
        assert (run.run_id, metric) == (found[2], expected)


def test_the_best_metric_follows_best_mode(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """The user may know better than the name of a metric; `results` agrees."""
    cases = (("a", "eval_accuracy", "min", 0.1), ("b", "eval_loss", "max", 0.9), ("c", "eval_loss", "auto", 0.1))
    for name, metric, mode, best in cases:
        checkpoint = CheckpointConfig(keep_best=metric, best_mode=BestMode[mode])
        sweep = SweepOnDisk(tmp_path / "runs" / name, make_specs(3, "cluster=slurm", checkpoint=checkpoint))
        sweep.submit()
        for index, value in enumerate((0.5, 0.1, 0.9)):
            sweep.start(index, resumed=0)
            sweep.end(index, state=RunState.COMPLETED, cause="done")
            sweep.done(index, **{metric: value})
            lines = [{"step": 1, metric: value}, {"step": 2, metric: value + 1.0}]
            sweep.run(index).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        specs = known_by_files(sweep.paths)[1]
        found = best_of(specs, sizes_of_sweep(sweep.paths, math.inf)[1])
        assert found is not None
        assert found[:2] == (metric, best), name
        table = result_table(read_status(sweep.paths, is_look=True), best=True)
        assert table.sorted_by(metric).rows[0][metric] == best, name
        (step,) = {row[f"{metric}.best_step"] for row in table.rows}
        assert step == (2 if mode == "max" else 1), name


def test_sweeps_knows_held_runs_by_the_marker_of_the_sweep(sweep: SweepOnDisk, fake_slurm: FakeSlurm) -> None:
    write_waiting(sweep.paths, [spec.run_id for spec in sweep.specs], "no room", None)
    assert sweep_lines(sweep.paths.folder.parent, seconds=5.0)[0].more["states"] == {"COMPLETED": 2, "PENDING": 1}
    write_hold(sweep.paths.hold, "a reason")
    (line,) = sweep_lines(sweep.paths.folder.parent, seconds=5.0)
    assert line.more["states"] == {"COMPLETED": 2, "HELD": 1}
    assert [fake_slurm.calls(name) for name in ("squeue", "sacct", "scontrol")] == [[], [], []]
