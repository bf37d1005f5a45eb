"""Names of files: every reader finds what every writer wrote, and what people's scripts rely on stays where it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_trainer.record.layout import (
    RunPaths,
    SweepPaths,
    default_runs_dir,
    is_run_id,
    journals_in,
    no_sweeps_words,
    sweep_folder,
    sweep_folders,
)


def test_where_a_runs_files_are(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "sweep" / "run")
    places = {
        run.run_id: "run", run.folder: ".", run.until(20): "until-000000020.json", run.journal(3): "attempt-003.jsonl",
        run.log(3, 2): "logs/attempt-003.rank-2.log",
        run.telemetry_file(3, 2): "telemetry/attempt-003.rank-2.jsonl", run.move(3): "telemetry/attempt-003.move.json",
        run.environment(3): "logs/attempt-003.environment.json",
        run.environment(3, 1): "logs/attempt-003.environment.node-1.json", run.claim("ab"): "claim-ab.json",
        run.logged_metrics(3): "told/attempt-003.jsonl", run.program_end(3, 2): "logs/attempt-003.rank-2.end",
        run.program_worker(3, 2): "logs/attempt-003.rank-2.worker.json", run.program_stop(3): "logs/attempt-003.stop",
        run.trace(2): "trace.rank-2.jsonl", run.profile_answer(0): "profile/rank-0.json",
        run.profile_files(0): ("profile.txt", "profile.trace.json.gz"),
        run.profile_files(1): ("profile/rank-1.txt", "profile/rank-1.trace.json.gz"),
        run.memory_snapshot(3, 2): "logs/attempt-003.rank-2.memory.json",
        run.flight(3, 2): "logs/attempt-003.rank-2.flight.json",
    }  # fmt: skip
    assert places.pop("run") == "run"
    for found, name in places.items():
        expected = tuple(run.folder / each for each in name) if isinstance(name, tuple) else run.folder / name
        assert found == expected


def test_a_run_of_an_earlier_version_keeps_its_places(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert (run.output, run.own_checkpoints) == (tmp_path / "output", tmp_path / "output/checkpoints")
    (tmp_path / "attempts.jsonl").touch()
    assert (run.output, run.own_checkpoints) == (tmp_path, tmp_path / "own_checkpoints")


def test_where_a_sweeps_files_are(tmp_path: Path) -> None:
    sweep = SweepPaths(tmp_path / "sweep")
    assert sweep.name == "sweep"
    assert sweep.intent("ab") == tmp_path / "sweep/submissions/ab.json"
    assert sweep.script("ab") == tmp_path / "sweep/slurm/ab.sh"
    assert sweep.requeue_request("7_1", 2) == tmp_path / "sweep/slurm/requeue-7_1-2"
    assert sweep.run("a").folder == tmp_path / "sweep/a"


def test_journals_are_in_order_and_the_old_one_is_the_first() -> None:
    names = ["attempt-1000.jsonl", "attempt-010.jsonl", "attempts.jsonl", "attempt-002.jsonl", "attempt-2.jsonl",
             "attempt-002.jsonl.tmp", "attempted", "metrics.jsonl"]  # fmt: skip
    assert journals_in(names) == [
        (-1, "attempts.jsonl"), (2, "attempt-002.jsonl"), (10, "attempt-010.jsonl"), (1000, "attempt-1000.jsonl"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "is_id"),
    [("lr1-0a1b2c3d4e", True), ("a" * 200, True), ("a" * 201, False), ("", False), (".", False), ("..", False),
     ("...", True), ("a/b", False), ("a b", False), ("a\n", False)],
)  # fmt: skip
def test_what_may_be_the_id_of_a_run(name: str, is_id: bool) -> None:
    assert is_run_id(name) is is_id


def test_a_renamed_sweep_is_found_by_its_names_of_before(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    (tmp_path / "then").symlink_to("now")
    (tmp_path / "before").symlink_to("then")
    (tmp_path / "away").symlink_to("../elsewhere")
    (tmp_path / "circle").symlink_to("circle")
    names = ("now", "then", "before", "away", "circle", "none")
    assert [sweep_folder(tmp_path, name).name for name in names] == ["now", "now", "now", "away", "circle", "none"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_link_that_another_user_made_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "then").symlink_to("now")
    os.lchown(tmp_path / "then", 65534, 65534)
    assert sweep_folder(tmp_path, "then").name == "then"


def test_any_sign_of_a_sweep_says_that_it_exists(tmp_path: Path) -> None:
    sweep = SweepPaths(tmp_path / "sweep")
    assert not sweep.exists
    sweep.folder.mkdir()
    assert not sweep.exists
    run = sweep.run("lr1-0a1b2c3d4e")
    run.logs.mkdir(parents=True)
    assert sweep.exists
    assert sweep.signs == [run.logs]
    sweep.specs.touch()
    assert sweep.signs == [sweep.specs]


@pytest.mark.parametrize(("mode", "is_readable"), [(0o700, False), (0o740, True), (0o707, False), (0o750, True)])
def test_whether_the_group_may_read(tmp_path: Path, mode: int, is_readable: bool) -> None:
    tmp_path.chmod(mode)
    assert SweepPaths(tmp_path).is_group_readable is is_readable


def test_a_folder_without_sweeps_says_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPC_TRAINER_RUNS", raising=False)
    runs = tmp_path / "runs"
    assert no_sweeps_words(runs) == f"{runs} holds no sweep: there is no such folder."
    assert no_sweeps_words(runs, " of yours, and 2 of others") == f"{runs} holds no sweep of yours, and 2 of others."
    runs.mkdir()
    assert no_sweeps_words(runs) == f"{runs} holds no sweep: it is empty."
    without = "without specs.jsonl, submissions.jsonl or sweep.json"
    for number, named in enumerate(("a", "a, b", "a, b, c", "a, b, c and 1 more", "a, b, c and 2 more")):
        (runs / "abcde"[number]).mkdir()
        assert no_sweeps_words(runs) == f"{runs} holds no sweep: it has only {named}, {without}."
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(runs))
    assert no_sweeps_words(runs).startswith(f"{runs} (HPC_TRAINER_RUNS) holds no sweep: ")
    assert default_runs_dir() == runs
    monkeypatch.setenv("HPC_TRAINER_RUNS", "elsewhere")
    assert no_sweeps_words(runs).startswith(f"{runs} holds no sweep: ")
    (runs / "specs.jsonl").touch()
    assert no_sweeps_words(runs) == (
        f"{runs} is a sweep itself, and not a folder of sweeps. Its name is runs: add --runs-dir {tmp_path}."
    )
    assert no_sweeps_words(runs / "specs.jsonl").endswith("holds no sweep: Not a directory.")
    monkeypatch.delenv("HPC_TRAINER_RUNS")
    assert default_runs_dir() == Path("runs")


def test_folders_that_may_be_sweeps(tmp_path: Path) -> None:
    assert sweep_folders(tmp_path / "none") == []
    for name in ("a", "b", ".trash-c", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "before").symlink_to("a")
    (tmp_path / "link").symlink_to("/elsewhere/sweep")
    assert sorted(path.name for path in sweep_folders(tmp_path)) == ["a", "b", "elsewhere", "link"]
    (tmp_path / "specs.jsonl").touch()
    (tmp_path / "b" / "sweep.json").touch()
    assert [path.name for path in sweep_folders(tmp_path)] == ["b"], "the others are runs of this sweep"
    assert sweep_folders(tmp_path / "specs.jsonl") == []


def test_a_sweep_that_was_renamed_twenty_times_is_found_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "s0").mkdir()
    for number in range(21):
        (tmp_path / f"s{number + 1}").symlink_to(f"s{number}")
    assert (sweep_folder(tmp_path, "s20").name, sweep_folder(tmp_path, "s21").name) == ("s0", "s1")


def test_a_folder_with_files_of_others_alone_is_foreign(tmp_path: Path) -> None:
    sweep = SweepPaths(tmp_path / "sweep")
    assert not sweep.is_foreign
    sweep.folder.mkdir()
    assert not sweep.is_foreign, "it is empty"
    (sweep.folder / ".hidden").touch()
    assert not sweep.is_foreign
    (sweep.folder / "thesis.tex").touch()
    assert sweep.is_foreign
    (sweep.folder / "submit.lock").touch()
    assert not sweep.is_foreign
