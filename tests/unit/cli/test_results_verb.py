"""`results` and `status` as asked: chosen runs and columns, means over seeds, and every format, letter by letter."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_trainer.cli.results_verbs import Asked, chosen_format, run_results
from hpc_trainer.cli.run_verbs import ChosenRuns, run_status
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate import formats
from hpc_trainer.record import journal, submissions
from hpc_trainer.record.files import append_lines, write_json
from hpc_trainer.record.states import RunState
from tests.unit.cli.screens import Screen
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

Terminal = Callable[[int], Callable[[], str]]
Told = Callable[..., str]


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> SweepOnDisk:
    """Two learning rates times three seeds, of which the last failed; each had its node for half an hour."""
    now = time.time()  # one moment for all files, however slow the machine is
    for module in (journal, submissions):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now))
    specs = [
        make_spec("cluster=slurm", optim__lr=float(lr), seed=seed, axes={"optim.lr": lr, "seed": str(seed)})
        for lr in ("1e-3", "1e-2") for seed in (0, 1, 2)
    ]  # fmt: skip
    sweep = SweepOnDisk(tmp_path / "runs" / "grid", specs)
    sweep.submit(age_s=7200)
    for index in range(6):
        sweep.start(index, age_s=3600, resumed=0)
        evaluations = [(100, 0.8 + index / 100), (150, 0.9 + index / 100), (200, 0.85 + index / 100)]
        append_lines(sweep.run(index).metrics, [{"step": step, "eval_accuracy": value} for step, value in evaluations])
        if index == 5:
            sweep.end(index, state=RunState.FAILED, cause="exception", step=150, saved_step=150, age_s=1800)
            continue
        sweep.end(index, state=RunState.COMPLETED, cause="done", step=200, age_s=1800)
        sweep.done(index, eval_accuracy=0.85 + index / 100)
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    return sweep


@pytest.fixture
def results(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> Told:
    """What `results` prints on standard output with these options."""

    def told(**options: object) -> str:
        asked = Asked(**options)  # type: ignore[arg-type]
        run_results("grid", sweep.paths.folder.parent, sort=None, as_json=False, asked=asked)
        return capsys.readouterr().out

    return told


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_means_over_seeds(results: Told) -> None:
    assert results(group_by=["seed"]).splitlines()[:5] == [
        "OPTIM.LR  EVAL_ACCURACY   N  RUNS  STATE                  ATTEMPTS  CORE_HOURS  WALL   QUEUE",
        "1e-3      0.86 ± 0.01     3  3     3 COMPLETED            3         1.5         1h30m  3h00m",
        "1e-2      0.885 ± 0.0071  2  3     2 COMPLETED, 1 FAILED  3         1.5         1h30m  3h00m",
        "Best eval_accuracy: 0.885 (optim.lr=1e-2)",
        "1 run(s) are not complete: they are not in the means.",
    ]


def test_means_in_json_and_over_several_axes(results: Told) -> None:
    one, two = json.loads(results(group_by=["seed"], format="json"))
    assert (one["optim.lr"], one["n"], one["runs"]) == (0.001, 3, 3)
    assert one["eval_accuracy"] == pytest.approx(0.86)
    assert one["eval_accuracy.std"] == pytest.approx(0.01)
    assert one["eval_accuracy.best"] == pytest.approx(0.91)
    assert two["eval_accuracy.std"] == pytest.approx(0.0070710678)
    (both,) = json.loads(results(group_by=["seed", "optim.lr"], format="json"))
    assert (both["n"], both["runs"]) == (5, 6)
    assert "optim.lr" not in both
    with pytest.raises(ConfigError, match=r"--group-by sed: the runs do not differ in it\. Did you mean seed\?"):
        results(group_by=["sed"])


def test_a_mean_of_one_run_has_no_deviation(results: Told) -> None:
    row = json.loads(results(group_by=["seed"], where="seed==0", format="json"))[0]
    assert (row["n"], row["eval_accuracy.std"]) == (1, None)


def test_runs_that_diverged_in_both_directions_have_no_mean(results: Told, sweep: SweepOnDisk) -> None:
    for value in (math.inf, 1.7e308):
        for index in range(3):
            sweep.done(index, eval_accuracy=-value if index == 0 else value)
        row = json.loads(results(group_by=["seed"], format="json"))[0]
        assert (row["n"], row["eval_accuracy.std"]) == (3, None)
        assert row["eval_accuracy"] in (None, pytest.approx(1.7e308 / 3))


def test_chosen_runs_and_columns_best_first(results: Told) -> None:
    asked = {"where": 'optim.lr>=1e-2 and state=="COMPLETED"', "columns": ["seed", "eval_accuracy.best"]}
    assert results(**asked, sort="eval_accuracy.best").splitlines()[:3] == [
        "SEED  EVAL_ACCURACY.BEST", "1     0.94", "0     0.93",
    ]  # fmt: skip
    assert _rows(results(**asked, sort="-eval_accuracy.best", format="csv")) == [
        {"seed": "0", "eval_accuracy.best": "0.93"}, {"seed": "1", "eval_accuracy.best": "0.9400000000000001"},
    ]  # fmt: skip
    assert results(where="seed==7").splitlines()[0] == "No run of grid fits --where seed==7"
    assert json.loads(results(where="seed==7", format="json")) == []
    with pytest.raises(ConfigError, match=r"there is no column eval_acuracy\. Did you mean eval_accuracy\?"):
        results(where="eval_acuracy > 0.9")
    with pytest.raises(ConfigError, match=r"--columns stat: there is no such column\. Did you mean state\?"):
        results(columns=["stat"])


def test_csv_has_every_figure_of_every_run(results: Told, sweep: SweepOnDisk) -> None:
    rows = _rows(results(format="csv"))
    assert [row["run_id"] for row in rows] == [spec.run_id for spec in sweep.specs]
    first, last = rows[0], rows[-1]
    assert (first["optim.lr"], first["eval_accuracy"], first["eval_accuracy.best"]) == ("0.001", "0.85", "0.9")
    assert (first["eval_accuracy.best_step"], first["state"], first["step"]) == ("150", "COMPLETED", "200")
    assert float(first["wall_s"]) == pytest.approx(1800, abs=5)
    assert float(first["queue_s"]) == pytest.approx(3600, abs=5)
    assert (first["gpu_hours"], first["core_hours"], first["redone_s"]) == ("0.0", "0.5", "0.0")
    assert (last["state"], last["eval_accuracy.best_step"]) == ("FAILED", "150")
    assert float(last["eval_accuracy"]) == pytest.approx(0.95), "of step 150, to which the run goes back"


def test_latex_and_markdown(results: Told) -> None:
    asked = {"group_by": ["seed"], "columns": ["optim.lr", "eval_accuracy", "n"]}
    assert results(**asked, format="latex") == "\n".join([
        r"\begin{tabular}{rrr}", r"\toprule", r"optim.lr & eval\_accuracy & n \\", r"\midrule",
        r"0.001 & $0.86 \pm 0.01$ & 3 \\", r"0.01 & $0.885 \pm 0.0071$ & 2 \\", r"\bottomrule", r"\end{tabular}", "",
    ])  # fmt: skip
    assert results(**asked, format="markdown") == (
        "| optim.lr | eval\\_accuracy | n |\n| ---: | ---: | ---: |\n"
        "| 0.001 | 0.86 ± 0.01 | 3 |\n| 0.01 | 0.885 ± 0.0071 | 2 |\n"
    )


def test_parquet_is_what_pandas_reads(results: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    assert results(parquet=tmp_path / "grid.parquet") == f"6 row(s) of grid are in {tmp_path}/grid.parquet.\n"
    found = pandas.read_parquet(tmp_path / "grid.parquet")
    assert found["eval_accuracy.best"].tolist()[0] == 0.9
    assert found.groupby("optim.lr")["eval_accuracy"].count().tolist() == [3, 3]
    with pytest.raises(ConfigError, match="there is no folder"):
        results(parquet=tmp_path / "no" / "grid.parquet")
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs pandas and pyarrow, .*: pip install 'hpc_trainer\[pandas,tables\]'"):
        results(parquet=tmp_path / "grid.parquet")


def test_two_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="--csv and --latex are several formats"):
        chosen_format(json=False, csv=True, latex=True)
    assert chosen_format(json=False, csv=True) == "csv"


@pytest.mark.parametrize("width", [60, 80, 130])
def test_what_is_alike_stands_above_and_no_line_is_too_wide(
    width: int, sweep: SweepOnDisk, on_terminal: Terminal
) -> None:
    close = on_terminal(width)
    try:
        run_results("grid", sweep.paths.folder.parent, sort=None, as_json=False)
    finally:
        got = close()
    screen = Screen(width)
    screen.feed(got.split("Best eval")[0])
    assert screen.num_wraps == 0
    lines = [line for line in screen.lines if line.strip()]
    assert lines[0] == "All: attempts=1 core_hours=0.5 wall=30m00s queue=1h00m"
    assert lines[1].split()[:4] == ["RUN_ID", "OPTIM.LR", "SEED", "EVAL_ACCURACY"]


def test_a_pipe_gets_whole_ids(results: Told, sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert [line.split()[0] for line in results().splitlines()[1:7]] == [spec.run_id for spec in sweep.specs]


def test_the_best_run_is_known_from_a_programs_own_metrics(sweep: SweepOnDisk, results: Told) -> None:
    for index in range(5):
        metrics = {"loss": 0.5 - index / 10, "val_loss": 0.1 + index / 10, "grad_norm": 3.0}
        write_json(sweep.run(index).result, {"metrics": metrics})
    assert f"Best val_loss: 0.1 ({sweep.specs[0].run_id})" in results(where="state=='COMPLETED'")


def test_a_metric_named_like_a_best_value_shadows_none(sweep: SweepOnDisk, results: Told) -> None:
    write_json(sweep.run(0).result, {"metrics": {"eval_accuracy": 0.5, "eval_accuracy.best": 7.0, "wall_s": 3.0}})
    row = json.loads(results(format="json"))[0]
    assert (row["metrics.eval_accuracy.best"], row["metrics.wall_s"], row["eval_accuracy.best"]) == (7.0, 3.0, 0.9)


@pytest.mark.parametrize(("encoding", "sign"), [("ascii", b"0.86 +- 0.01"), ("latin-1", b"0.86 \xb1 0.01")])
def test_a_locale_without_the_letters_gets_plain_ones(sweep: SweepOnDisk, encoding: str, sign: bytes) -> None:
    words = [sys.executable, "-m", "hpc_trainer", "results", "grid", "--group-by", "seed", "--runs-dir"]
    environ = {**os.environ, "PYTHONIOENCODING": encoding, "NO_COLOR": "1"}
    done = subprocess.run([*words, str(sweep.paths.folder.parent)], env=environ, capture_output=True, check=True)
    assert sign in done.stdout
    assert b"\x1b" not in done.stdout
    heading, first, *_ = done.stdout.decode(encoding).splitlines()
    assert heading.index("N  RUNS") == first.index("3  3"), "columns stand below their headings"


def test_a_narrow_terminal_without_the_letters_wraps_no_line(sweep: SweepOnDisk) -> None:
    code = (
        "import os, pty, sys; pid, fd = pty.fork()\n"
        "if pid == 0: os.execv(sys.executable, [sys.executable, '-m', 'hpc_trainer', *sys.argv[1:]])\n"
        "import fcntl, struct, termios; fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 50, 0, 0))\n"
        "try:\n"
        "    while got := os.read(fd, 65536): os.write(1, got)\n"
        "except OSError: pass\n"
    )
    words = ["results", "grid", "--runs-dir", str(sweep.paths.folder.parent)]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    environ.pop("COLUMNS", None)
    done = subprocess.run([sys.executable, "-c", code, *words], env=environ, capture_output=True, check=True)
    lines = done.stdout.decode("ascii").replace("\r", "").splitlines()
    rows = [line for line in lines if line.startswith("~-")]
    assert len(rows) == len(sweep.specs)
    assert all(len(line) <= 50 for line in rows), rows


# --- status ---


def test_a_metric_named_like_a_heading_has_that_heading_alone(sweep: SweepOnDisk, results: Told) -> None:
    for index in range(6):
        write_json(sweep.run(index).result, {"metrics": {"wall": 3, "eval_accuracy": 0.5 + index / 100}})
    headings = results().splitlines()[0].split()
    assert headings.count("WALL") == headings.count("WALL_S") == headings.count("QUEUE") == 1


@pytest.fixture
def status(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> Told:
    """What `status` prints with these options."""

    def told(*, as_json: bool = False, every_run: bool = False, **options: object) -> str:
        chosen = ChosenRuns(**options)  # type: ignore[arg-type]
        folder = sweep.paths.folder.parent
        run_status("grid", folder, watch=False, as_json=as_json, every_run=every_run, chosen=chosen)
        return capsys.readouterr().out

    return told


def test_status_of_chosen_runs(status: Told, sweep: SweepOnDisk) -> None:
    ids = [spec.run_id for spec in sweep.specs]
    for options, wanted in (
        ({"failed": True}, ids[5:]), ({"states": ["completed"], "where": "optim.lr<5e-3"}, ids[:3]),
        ({"where": "seed in [0, 2] and state!='FAILED'"}, [ids[0], ids[2], ids[3]]),
        ({"where": "eval_accuracy>=0.88"}, ids[3:]), ({"where": "node=='n1' and wall_s>1700 and attempt==1"}, ids),
    ):  # fmt: skip
        shown = status(**options)
        assert [line.split()[0] for line in shown.splitlines()[1 : len(wanted) + 1]] == wanted
        assert f"{len(wanted)} of 6 runs match.\nSweep grid: 5 COMPLETED, 1 FAILED." in shown
        assert [run["run_id"] for run in json.loads(status(**options, as_json=True))["runs"]] == wanted
    with pytest.raises(ConfigError, match=r"--state DONE: there is no such state\. .*Valid: NEW, PENDING"):
        status(states=["DONE"])
    with pytest.raises(ConfigError, match=r"there is no column optim\.rl\. Did you mean optim\.lr\?"):
        status(where="optim.rl > 1")


def test_status_with_chosen_columns(status: Told, sweep: SweepOnDisk) -> None:
    lines = status(columns=["seed", "state", "time", "eval_accuracy"], where="optim.lr==0.01").splitlines()
    assert lines[:4] == [
        "SEED  STATE      TIME    EVAL_ACCURACY", "0     COMPLETED  30m00s  0.88", "1     COMPLETED  30m00s  0.89",
        "2     FAILED     30m00s  0.95",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"--columns sed: there is no such column\. Did you mean seed\?"):
        status(columns=["sed"])


def test_a_metric_named_like_a_column_of_status_is_found_by_its_prefix(status: Told, sweep: SweepOnDisk) -> None:
    for index in range(2):
        write_json(sweep.run(index).result, {"metrics": {"state": 60 + index, "step": 7, "wall_s": 3, "seed": 5}})
    shown = status(columns=["run", "state", "metrics.state"], where="metrics.state>60 and state=='COMPLETED'")
    assert shown.splitlines()[1].split() == [sweep.specs[1].run_id, "COMPLETED", "61"]
    assert "1 of 6 runs match" in shown
    assert "1 of 6 runs match" in status(where="metrics.wall_s==3 and seed==0 and wall_s>1700 and metrics.seed==5")


def test_a_waiting_run_says_why_for_how_long_and_when_it_is_expected(
    status: Told, sweep: SweepOnDisk, fake_slurm: FakeSlurm
) -> None:
    sweep.submit("600", age_s=1000)
    (sweep.run(5).marker("DONE")).unlink(missing_ok=True)
    fake_slurm.answer("squeue", "600_5|PENDING||Priority|x\n")
    shown = status(where="state=='PENDING'").splitlines()[1]
    assert re.search(r" waits 1[67]m\d\ds ", shown)
    assert shown.endswith("Priority: jobs of higher priority are before it"), "squeue tells no start here"
    run = json.loads(status(states=["PENDING"], as_json=True))["runs"][0]
    assert (run["waiting_s"], run["start"]) == (pytest.approx(1000, abs=90), None)
    calls = fake_slurm.calls("squeue")
    assert len(calls) == 4, "one of all jobs, and one of starts, each time"
    assert calls[1].startswith("squeue --start -a -r -j 600 ")
