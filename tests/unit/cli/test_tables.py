"""Tables on a terminal: never wider than it is; in a pipe as they are."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli.common import cut, fit_table, print_table, short_headings
from hpc_trainer.cli.results_verbs import Asked, run_results
from hpc_trainer.cli.run_verbs import ChosenRuns, run_status, status_json
from hpc_trainer.errors import ConfigError
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.cli.screens import Screen
from tests.unit.record.builders import make_spec, make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

Terminal = Callable[[int], Callable[[], str]]


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """A run that is complete, one that has failed with much to say, and one at work."""
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", make_specs(3, "cluster=slurm"))
    sweep.submit()
    fake_slurm.answer("squeue", "500_2|RUNNING|a-node-of-a-long-name|None|x\n")
    fake_slurm.answer("sacct", "")
    for index in range(3):
        sweep.start(index, node="a-node-of-a-long-name", resumed=0)
    sweep.beat(2, step=50, eval_loss=1.5, eval_accuracy=0.123456, samples_per_s=123456.0, data_wait_share=0.5)
    sweep.done(0, eval_loss=0.25, eval_accuracy=0.987654, samples_per_s=123456.0)
    error = {"type": "ValueError", "message": "words and " * 20}
    sweep.end(1, state=RunState.FAILED, cause="exception", error=error)
    return sweep


def _shown(screen_of: Terminal, width: int, sweep: SweepOnDisk, verb: Callable[..., None]) -> Screen:
    close = screen_of(width)
    try:
        verb("sweep", sweep.paths.folder.parent)
    finally:
        got = close()
    screen = Screen(width)
    screen.feed(re.split("Sweep sweep:|Best eval", got)[0])  # sentences go on in the next line
    return screen


def _status(name: str, folder: Path) -> None:
    run_status(name, folder, watch=False, as_json=False)


def _results(name: str, folder: Path) -> None:
    run_results(name, folder, sort=None, as_json=False)


@pytest.mark.few(4)
@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 140])
@pytest.mark.parametrize("verb", [_status, _results])
def test_no_line_of_a_table_is_wider_than_the_terminal(
    width: int, verb: Callable[..., None], sweep: SweepOnDisk, on_terminal: Terminal
) -> None:
    screen = _shown(on_terminal, width, sweep, verb)
    assert screen.num_wraps == 0
    lines = [line for line in screen.lines if line.strip()]
    assert max(map(len, lines)) <= width
    if width >= 60:
        lines = lines[
            next(place for place, line in enumerate(lines) if line.startswith("RUN")) :
        ]  # below what is alike
        for line, spec, state in zip(lines[1:], sweep.specs, ("COMPLETED", "FAILED", "RUNNING"), strict=False):
            assert line.split()[0].endswith(spec.run_id[-10:]), "what one may type"
            assert state in line
    if width >= 80 and verb is _status:
        assert "STEP" in lines[0]
        assert "eval_loss=" in lines[1]
        assert "ValueError: words" in lines[2]


@pytest.fixture
def grid(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """Two axes: two runs that are complete, and two at work."""
    specs = [
        make_spec("cluster=slurm", optim__lr=float(lr), seed=seed, axes={"optim.lr": lr, "seed": str(seed)})
        for lr in ("1e-3", "3e-3") for seed in (0, 1)
    ]  # fmt: skip
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    sweep.submit()
    fake_slurm.answer("squeue", "500_2|RUNNING|n1|None|x\n500_3|RUNNING|n1|None|x\n")
    fake_slurm.answer("sacct", "")
    for index in range(4):
        sweep.start(index, resumed=0)
    for index in (0, 1):
        sweep.done(index, eval_loss=0.25, eval_accuracy=0.987654, samples_per_s=123456.0)
    for index in (2, 3):
        sweep.beat(index, step=50, eval_loss=1.5, eval_accuracy=0.123456, samples_per_s=123456.0)
    return sweep


def test_status_shows_what_runs_differ_in(
    grid: SweepOnDisk, on_terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of `results`, at 80 columns too."""
    _status("sweep", grid.paths.folder.parent)
    piped = [line.split() for line in capsys.readouterr().out.splitlines()[:5]]
    assert piped[0][:6] == ["RUN", "STATE", "STEP", "ETA", "OPTIM.LR", "SEED"]
    assert [line[4:6] for line in piped[1:]] == [["1e-3", "0"], ["1e-3", "1"], ["3e-3", "0"], ["3e-3", "1"]]
    screen = _shown(on_terminal, 80, grid, _status)
    shown = [line.split() for line in screen.lines if line.strip()]
    assert shown[0] == ["RUN", "STATE", "STEP", "ETA", "OPTIM.LR", "SEED", "METRICS"]
    assert [line[4:6] for line in shown[1:5]] == [line[4:6] for line in piped[1:]]
    told = status_json(read_status(grid.paths))["runs"]
    assert told[0]["axes"] == {"optim.lr": "1e-3", "seed": "0"}


@pytest.mark.parametrize("width", [60, 70, 80, 100])
def test_a_person_sees_state_progress_and_eta_before_metrics(
    width: int, grid: SweepOnDisk, on_terminal: Terminal
) -> None:
    head, *lines = (line for line in _shown(on_terminal, width, grid, _status).lines if line.strip())
    assert head.split()[:4] == ["RUN", "STATE", "STEP", "ETA"]
    assert all("50/" in line and "30s" in line for line in lines[2:4])
    if width >= 70:
        assert "eval_loss=0.25" in lines[0], "the first metrics, whole"
        assert re.search(r"eval_accuracy=[\d.]*…", lines[0]) is None


@pytest.fixture
def many(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """Four axes, six metrics with long names: one run is complete, one has failed, one is at work, and one waits."""
    keys = ("optim.lr", "optim.weight_decay", "schedule.warmup_steps", "seed")
    points = [("0.001", "0.1", "100", "0"), ("0.001", "0.1", "100", "1"), ("0.003", "0.1", "100", "0")]
    points.append(("0.003", "0.01", "100", "1"))
    specs = [
        make_spec(
            "cluster=slurm", optim__lr=float(point[0]), optim__weight_decay=float(point[1]), seed=int(point[3]),
            axes=dict(zip(keys, point, strict=True)),
        )
        for point in points
    ]  # fmt: skip
    sweep = SweepOnDisk(tmp_path / "runs" / "sweep", specs)
    sweep.submit()
    fake_slurm.answer("squeue", "500_2|RUNNING|n1|None|x\n500_3|PENDING||Priority|x\n")
    fake_slurm.answer("sacct", "")
    for index in range(3):
        sweep.start(index, resumed=0)
    figures = dict.fromkeys((f"eval_precision_of_class_{name}" for name in "abcd"), 0.25)
    sweep.done(0, eval_loss=0.25, eval_accuracy=0.987654, samples_per_s=123456.0, **figures)
    error = {"type": "ValueError", "message": "words and " * 20}
    sweep.end(1, state=RunState.FAILED, cause="exception", error=error)
    sweep.beat(2, step=50, eval_loss=1.5, eval_accuracy=0.123456, samples_per_s=123456.0)
    return sweep


@pytest.mark.parametrize("width", [60, 80, 130])
def test_the_axes_that_tell_runs_apart_stay_before_metrics_and_causes(
    width: int, many: SweepOnDisk, on_terminal: Terminal
) -> None:
    head, *lines = (line.split() for line in _shown(on_terminal, width, many, _status).lines if line.strip())
    axes = ["OPTIM.LR", "OPTIM.WEIGHT_DECAY", "SCHEDULE.WARMUP_STEPS", "SEED"]
    if width == 130:
        assert head == ["RUN", "STATE", "STEP", "ETA", *(axis.rpartition(".")[2] for axis in axes), "METRICS", "CAUSE"]
        assert lines[1][4:8] == ["0.001", "0.1", "100", "1"]
    elif width == 80:
        assert head == ["RUN", "STATE", "STEP", "ETA", "LR", "WEIGHT_DECAY", "WARMUP_STEPS", "SEED"]
        assert lines[1][1:8] == ["FAILED", "0/200", "-", "0.001", "0.1", "100", "1"]
    else:
        assert head == ["RUN", "STATE", "STEP", "LR", "WEIGHT_DECAY", "SEED"]
    assert all(line[0].endswith(spec.run_id[-10:]) for line, spec in zip(lines, many.specs, strict=False))


@pytest.mark.parametrize("width", [60, 80, 130])
def test_results_show_the_state_of_runs_that_are_not_complete(
    width: int, many: SweepOnDisk, on_terminal: Terminal
) -> None:
    shown = [line.split() for line in _shown(on_terminal, width, many, _results).lines if line.strip()]
    head, *lines = shown[next(place for place, words in enumerate(shown) if words[0] == "RUN_ID") :]
    column = head.index("STATE")
    assert [line[column] for line in lines[:4]] == ["COMPLETED", "FAILED", "RUNNING", "PENDING"]
    assert "EVAL_ACCURACY" in head, "by which the runs are compared"
    assert width == 60 or {"LR", "WEIGHT_DECAY", "SEED"} <= {heading.rpartition(".")[2] for heading in head}


def test_the_same_names_choose_columns_of_status_and_results(
    many: SweepOnDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(verb: str, *columns: str) -> list[list[str]]:
        folder = many.paths.folder.parent
        if verb == "status":
            run_status("sweep", folder, watch=False, as_json=False, chosen=ChosenRuns(columns=columns))
        else:
            run_results("sweep", folder, sort=None, as_json=False, asked=Asked(columns=columns))
        return [line.split() for line in capsys.readouterr().out.splitlines()[:3]]

    ids = [spec.run_id for spec in many.specs]
    for verb in ("status", "results"):
        for run in ("run", "run_id", "RUN"):
            head, *rows = shown(verb, run, "Seed", "eval_loss")
            assert head == [run.upper() if verb == "status" else "RUN_ID", "SEED", "EVAL_LOSS"]
            assert rows == [[ids[0], "0", "0.25"], [ids[1], "1", "-"]]
        assert shown(verb, "state", "attempt", "wall")[1:] == shown(verb, "state", "attempts", "wall_s")[1:]
        assert shown(verb, "time", "wall_s")[1:] == shown(verb, "time")[1:], "once each"
        assert {"RUN_ID", "STATE", "OPTIM.LR", "EVAL_LOSS"} <= {*shown(verb, "all")[0]}
        with pytest.raises(ConfigError, match=r"--columns evalloss: .* Did you mean eval_loss\?"):
            shown(verb, "evalloss")


def test_a_heading_is_short_where_no_other_is_alike() -> None:
    assert short_headings(["OPTIM.LR", "SEED", "A.X", "B.X", "PARAMS.STATE"], ["STATE"]) == {"OPTIM.LR": "LR"}


def test_metrics_are_cut_between_words() -> None:
    text = "eval_loss=0.1788 eval_accuracy=0.9639"
    assert cut(text, 37) == text
    assert cut(text, 36) == cut(text, 18) == "eval_loss=0.1788 …"
    assert cut(text, 17) == "eval_loss=0.1788…"
    assert cut(text, 12) == "eval_loss=0…"


def test_the_time_to_cut_a_cell_does_not_double_with_each_pair() -> None:
    """A program may tell metrics named `a=b` and `my loss`."""
    text = " ".join(["a=b=c=d"] * 60)
    begin = time.process_time()
    assert cut(f"{text} my loss=1", 20).endswith("…")
    assert time.process_time() - begin < 1.0
    assert cut(text, 20) == "a=b=c=d a=b=c=d …"


def test_what_is_left_out_is_said(sweep: SweepOnDisk, on_terminal: Terminal) -> None:
    lines = [line for line in _shown(on_terminal, 100, sweep, _status).lines if line.strip()]
    head, told = lines[0].split(), lines[4]
    assert told.startswith("Columns left out: ")
    left_out = told.removeprefix("Columns left out: ").partition(".")[0].split(", ")
    assert "JOB" in left_out
    assert {*head} & {*left_out} == set()
    assert {*head} | {*left_out} == {
        "RUN", "STATE", "STEP", "ETA", "SEED", "SPEED", "ATTEMPTS", "TIME", "JOB", "NODE", "METRICS", "CAUSE",
    }  # fmt: skip


def test_a_wide_terminal_and_a_pipe_have_all(
    sweep: SweepOnDisk, on_terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    _status("sweep", sweep.paths.folder.parent)
    piped = capsys.readouterr().out.splitlines()[:4]
    assert max(map(len, piped)) > 200
    screen = _shown(on_terminal, 400, sweep, _status)
    assert [line.rstrip() for line in screen.lines if line.strip()] == piped


def test_what_tells_least_goes_first_and_what_has_room_after_all_comes_back() -> None:
    columns, rows = ["RUN", "A", "WIDE", "B"], [["r" * 10, "aaa", "w" * 30, "bbb"]]
    assert fit_table(columns, rows, 52) == ([0, 1, 2, 3], [10, 3, 30, 3])
    assert fit_table(columns, rows, 51, ("B", "A", "WIDE")) == ([0, 1, 2], [10, 3, 30])
    assert fit_table(columns, rows, 30, ("B", "WIDE", "A")) == ([0, 1, 3], [10, 3, 3]), "B fits once WIDE is gone"
    cut_first = (("WIDE", 20), "A", ("WIDE", 10))
    assert fit_table(columns, rows, 45, cut_first) == ([0, 1, 2, 3], [10, 3, 23, 3]), "no more than it must"
    assert fit_table(columns, rows, 40, cut_first) == ([0, 2, 3], [10, 23, 3]), "and grows again where a column went"
    assert fit_table(columns, rows, 40) == ([0, 1, 2, 3], [10, 3, 18, 3]), "cut where nothing may be left out"
    assert fit_table(columns, rows, 8) == ([0], [8])


def test_no_figure_is_cut() -> None:
    columns, rows = ["LR", "LOSS", "ACCURACY", "N"], [["0.01", "0.08635 ± 0.017", "0.9502 ± 0.0012", "2"]]
    assert fit_table(columns, rows, 41) == ([0, 1, 2, 3], [4, 15, 15, 1])
    assert fit_table(columns, rows, 38) == ([0, 1, 2], [4, 15, 15])
    assert fit_table(columns, rows, 37) == ([0, 1, 3], [4, 15, 1]), "N alone would not make room"
    long = [["0.01", "0.08635 ± 0.017", "a text that may be cut", "2"]]
    assert fit_table(columns, long, 41) == ([0, 1, 2, 3], [4, 15, 15, 1])


def test_a_cut_id_keeps_its_end() -> None:
    assert cut("mlp-digits-lr0.001-s0-9702569a43", 16) == "…1-s0-9702569a43"
    assert cut("mlp-digits-lr0.001-s0-9702569a43", 28) == "mlp-digi…0.001-s0-9702569a43"
    assert cut("ValueError: words", 12) == "ValueError:…"
    assert cut("short", 12) == "short"


def test_colours_go_with_their_columns(on_terminal: Terminal) -> None:
    close = on_terminal(20)
    print_table(["RUN", "JOB", "STATE"], [["a", "j" * 30, RunState.FAILED]], least=("JOB",))
    got = close()
    assert "\x1b[31mFAILED" in got
    assert "jjj" not in got
