"""What a person types: a sweep's name where overrides belong, and a command that the next line names."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.cli.main import main
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_slurm: None) -> SweepOnDisk:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return SweepOnDisk(tmp_path / "runs" / "demo", make_specs(2))


def _error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", ["submit", "plan", "train", "verify resume", "find-lr"])
def test_a_sweep_in_place_of_overrides_is_told_with_the_verb_that_takes_it(
    sweep: SweepOnDisk, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _error(monkeypatch, capsys, *verb.split(), "demo")
    assert said.startswith(
        f"error: `{verb}` takes overrides KEY=VALUE, such as experiment=digits, and demo is a sweep."
    )
    assert "hpc-trainer retry demo" in said
    assert "hpc-trainer status demo" in said


def test_a_run_in_place_of_overrides_too(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = sweep.run(1).run_id
    said = _error(monkeypatch, capsys, "submit", "seed=1", name)
    assert f"{name} is a run of the sweep demo." in said
    assert f"hpc-trainer retry {name}" in said


def test_a_word_that_names_nothing_is_told_as_before(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _error(monkeypatch, capsys, "submit", "dem")
    assert said.startswith("error: dem: ")
    assert "KEY=VALUE" in said


OLD = {
    ("tune", "demo"): "advise",
    ("log", "step=1", "loss=2"): "log-metrics",
    ("drill", "kill", "demo"): "verify preempt --kind kill",
    ("certify", "experiment=digits", "--steps", "1"): "verify resume",
    ("reproduce", "demo", "--steps", "0"): "verify reproduce",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("old", OLD, ids=lambda words: words[0])
def test_an_old_name_does_the_same_and_names_the_new_one(
    sweep: SweepOnDisk, old: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(*argv: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
        code: object = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    new = OLD[old].split()
    rest = old[2:] if old[0] == "drill" else old[1:]
    json = () if old[0] == "log" else ("--json",)
    code, out, err = play(*old, *json)
    note, _, after = err.partition("\n")
    assert note == (f"Note: `{old[0]}` is an old name that ends with the next version: use hpc-trainer {OLD[old]}")
    assert (code, out, after) == play(*new, *rest, *json)
    assert f"  {old[0]} " not in play("--help")[1]


@pytest.mark.long
def test_the_sweep_of_each_table_is_named_as_elsewhere_too(
    sweep: SweepOnDisk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv, "--json"])
        with contextlib.suppress(SystemExit):
            main()
        return capsys.readouterr().out

    for verb in ("status", "results", "report"):
        assert play(verb, "demo") == play(verb, "--sweep", "demo") == play(verb, "demo", "--sweep", "demo")
        assert "demo and --sweep other are two sweeps" in play(verb, "demo", "--sweep", "other")
        assert play(verb, "--sweep", "other") == play(verb, "other")


def _play(program: str, path: str, folder: Path, *argv: str) -> str:
    environ = {**os.environ, "PATH": path, "HPC_TRAINER_RUNS": str(folder / "runs")}
    done = subprocess.run([program, *argv], cwd=folder, env=environ, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_next_command_works_as_it_is_typed(sweep: SweepOnDisk, tmp_path: Path) -> None:
    """`make demo` starts the program by its path: PATH has no `hpc-trainer` then."""
    place = tmp_path / "my env" / "bin"
    place.mkdir(parents=True)
    program = place / "hpc-trainer"
    program.write_text(f"#!{sys.executable}\nfrom hpc_trainer.cli.main import main\nmain()\n")
    program.chmod(0o755)
    bare = os.environ["PATH"]
    assert shutil.which("hpc-trainer", path=bare) is None
    typed = "'my env/bin/hpc-trainer'"
    assert f"Next: {typed} why " in _play("my env/bin/hpc-trainer", bare, tmp_path, "status", "demo")
    assert f"  {typed} submit\n" in _play("my env/bin/hpc-trainer", bare, tmp_path, "why", sweep.run(0).run_id)
    on_path = f"{place}:{bare}"
    assert "Next: hpc-trainer why " in _play("hpc-trainer", on_path, tmp_path, "status", "demo")
    assert "Next: hpc-trainer why " in _play(str(program), on_path, tmp_path, "status", "demo")
