"""What CI plays of the long tests: what a change touches, the nearest first, and each file within some days."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import pytest

from tests import chosen, warm
from tests.chosen import (
    ALSO,
    ALWAYS,
    MATRIX,
    NEAR,
    ON_SLURM,
    PAIRS,
    ROOT,
    Chosen,
    choose,
    folders_near,
    has_long,
    long_files,
    play_all,
    scenarios_of,
    slurm_files,
)
from tests.each_alone import PASSED, UNFINISHED, main, passed_before, play

DAY = datetime.date(2026, 11, 26)


def test_the_folders_and_files_that_it_names_are_there() -> None:
    assert [name for name in NEAR if not (ROOT / "hpc_trainer" / name).is_dir()] == []
    named = {f"tests/integration/{folder}" for folders in NEAR.values() for folder in folders}
    assert [folder for folder in sorted(named) if not (ROOT / folder).is_dir()] == []
    assert [folder for folders in ALSO.values() for folder in folders if not (ROOT / folder).is_dir()] == []
    on_slurm = {f"tests/slurm/{name}" for names in ON_SLURM.values() for name in names}
    assert [path for path in sorted(on_slurm) if not (ROOT / path).is_file()] == []
    assert set(ALWAYS) <= set(long_files())


def test_a_change_chooses_the_nearest_tests_first() -> None:
    lion, test = "hpc_trainer/features/lion/lion.py", "tests/unit/training/test_pairs.py"
    touched = [each.path for each in choose([lion, test], long_files(), DAY) if each.why == "touched"]
    assert touched[:2] == [test, "tests/unit/features/lion/test_sharded_ranks.py"]
    assert "tests/integration/resume_matrix/test_resume_matrix.py" in touched
    assert "tests/unit/features/muon/test_sharded_ranks.py" not in touched
    assert all(each.more for each in choose([], long_files(), DAY) if each.path in (PAIRS, MATRIX)), "not for hours"


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ("hpc_trainer/features/lion/lion.py", "tests/unit/features/lion"),
        ("hpc_trainer/training/checkpoint/store.py", "tests/unit/training/checkpoint"),
        ("hpc_trainer/launch/plan.py", "tests/unit/launch"),
        ("hpc_trainer/new_folder/file.py", "tests/integration/verbs"),
        ("hpc_trainer/api.py", "tests/integration/start"),
        ("pyproject.toml", "tests/integration/start"),
        ("tests/unit/features/lion/sharded_child.py", "tests/unit/features/lion"),
        ("tests/warm.py", "tests/integration/tools"),
        ("tests/shared_folder/kinds.py", "tests/shared_folder"),
    ],
)
def test_what_is_near_a_file(changed: str, first: str) -> None:
    assert folders_near(changed)[0] == first


def test_a_change_chooses_long_tests_on_a_slurm() -> None:
    apps, store = "hpc_trainer/hydra_apps/points.py", "hpc_trainer/record/status.py"
    assert slurm_files([apps], 2) == ["tests/slurm/test_hydra_apps.py"]
    assert slurm_files([store, apps], 2) == ["tests/slurm/test_hydra_apps.py", "tests/slurm/test_submission.py"]
    assert slurm_files([store, "tests/slurm/test_own_loop.py"], 1) == ["tests/slurm/test_own_loop.py"]
    assert slurm_files(["README.md", "hpc_trainer/errors.py", "tests/slurm/conftest.py"], 2) == []


def test_every_test_that_is_not_in_make_test_is_in_a_file_that_is_chosen(tmp_path: Path) -> None:
    """One that is left out by `few` is as long as any."""
    path = tmp_path / "test_few.py"
    path.write_text(
        "import pytest\n"
        "@pytest.mark.few(2)\n"
        "@pytest.mark.parametrize('number', [pytest.param(0, marks=pytest.mark.long), 1, 2, 3, 4])\n"
        "def test_number(number): pass\n"
    )
    assert has_long(path)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "--collect-only"]
    words += ["-W", "ignore:Module already imported"]  # the plugin of hydra is in the warm process
    for chosen_by, numbers in (("not long", "13"), ("long", "024")):
        done = warm.run([*words, "-c", str(ROOT / "pyproject.toml"), "-m", chosen_by, str(path)], cwd=ROOT, text=True)
        assert re.findall(r"test_number\[(\d)\]", done.stdout) == list(numbers), done.stdout + done.stderr


def test_every_long_file_is_among_the_first_of_some_day_and_a_day_draws_the_same_again() -> None:
    files = long_files()
    assert len(files) > 40
    days = [DAY + datetime.timedelta(days=number) for number in range(90)]
    drawn = [[each.path for each in choose([], files, day) if each.why == "drawn"] for day in days]
    assert set().union(*(set(paths[:10]) for paths in drawn)) == set(files) - set(ALWAYS)
    assert drawn[0] == [each.path for each in choose([], files, DAY) if each.why == "drawn"]
    assert len({tuple(scenarios_of(day, 2)) for day in days}) > 20


@pytest.mark.long
def test_verdicts_of_files_that_are_played_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.each_alone.ROOT", tmp_path)
    monkeypatch.setattr(chosen, "ROOT", tmp_path)
    bodies = {"good": "pass", "bad": "assert 1 == 2", "slow": "import time; time.sleep(100)"}
    for name, body in bodies.items():
        mark = "import pytest\n@pytest.mark.long\n"
        (tmp_path / f"test_{name}.py").write_text(f"{mark}def test_it(): {body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    long: x\n    slurm: x\n    xla: x\n")
    assert play(tmp_path / "test_bad.py", "not long") == (PASSED, ""), "no test of it was chosen"
    assert play(tmp_path / "test_slow.py", "long", timeout_s=1)[0] == UNFINISHED

    assert play_all([Chosen("test_good.py", "touched"), Chosen("test_bad.py", "drawn")], 5, 5) == 1
    assert "assert 1 == 2" in capsys.readouterr().out
    assert play_all([Chosen("test_bad.py", "drawn")], 5, -1) == 0, "no time to draw"
    assert play_all([Chosen("test_bad.py", "touched")], -1, 5) == 0
    assert capsys.readouterr().out.splitlines()[-3:-1] == ["For want of time not played:", "  test_bad.py"]

    log = tmp_path / "alone.log"
    quick = tmp_path / "test_quick.py"
    quick.write_text("def test_it(): assert False\n")
    assert main(["--log", str(log), str(quick), str(tmp_path / "test_good.py")]) == 1
    assert passed_before(log) == {"test_good.py"}
    quick.write_text("def test_it(): assert True\n")
    assert main(["--log", str(log), "--resume", str(quick), str(tmp_path / "test_good.py")]) == 0
    assert log.read_text().splitlines()[-1] == "1 of 1 files pass alone"
