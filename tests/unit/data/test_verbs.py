"""`hpc-trainer data ...`: what it prints, its JSON, its exit codes, and that Tab knows it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli.main import main
from tests import warm
from tests.unit.data.prepare.raw_data import raw_pictures

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Gives a command in a folder with raw data; returns exit code, standard output, standard error."""
    raw_pictures(tmp_path / "raw")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("".join(f"line {n}\n" for n in range(40)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    # What is started forks a process that has torch already.
    monkeypatch.setattr(subprocess.Popen, "_execute_child", warm.execute_child)

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", "data", *argv])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as error:
            code = int(error.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


IMAGES = ("prepare", "images", "raw", "--to", "out", "--size", "16", "--eval-fraction", "0.3", "--workers", "1")


def test_pictures_are_prepared_checked_and_measured(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli(*IMAGES)
    assert (code, err) == (0, "")
    *_, folder, last = out.splitlines()
    assert folder == f"Folder: {tmp_path / 'out'} (2 of 2 pieces made now)"
    assert last.startswith("Next: hpc-trainer train model=")
    words = last.split()[4:]
    assert words == ["data=image_shards", f"data.path={tmp_path / 'out'}", "data.image_size=14"]
    assert "all was there already" in cli(*IMAGES)[1]

    code, out, err = cli(*IMAGES, "--json")
    told = json.loads(out)
    assert set(told) == {
        "folder", "is_whole", "num_pieces", "num_made", "num_missing", "counts", "num_broken", "words", "seconds",
    }  # fmt: skip
    assert (told["num_made"], told["num_pieces"], told["counts"].keys()) == (0, 2, {"train", "eval"})
    code, out, err = cli(*IMAGES, "--size", "20")
    assert (code, out) == (2, "")
    assert "--size was 16, is 20" in err

    code, out, err = cli("check", *words)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "No problems."
    code, out, _ = cli("bench", *words, "train.global_batch_size=4", "--workers", "0", "--seconds", "0.05", "--json")
    told = json.loads(out)
    assert code == 0
    assert set(told) == {"batch_size", "num_samples", "rows", "shares", "step_ms", "enough_workers"}
    assert set(told["rows"][0]) == {
        "num_workers", "samples_per_s", "batch_ms", "mb_per_s", "first_batch_s", "num_batches",
    }  # fmt: skip

    shard = tmp_path / "out" / "train" / "shard-000000.tar"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    code, out, err = cli("check", *words, "--json")
    told = json.loads(out)
    assert code == 1
    assert set(told) == {"splits", "num_problems", "problems", "duplicates"}
    assert told["num_problems"] == len(told["problems"]) >= 1
    assert told["problems"][0] == {
        "split": "train", "file": str(shard), "offset": None,
        "cause": "its SHA-256 has changed since it was indexed",
    }  # fmt: skip


def test_texts_are_prepared_in_parts(cli: Cli, tmp_path: Path) -> None:
    words = ("prepare", "tokens", "texts/*.txt", "--to", "out", "--document", "line")
    code, out, _ = cli(*words, "--part", "2/2")
    assert code == 0
    assert "1 of 1 are for other parts" in out
    code, out, _ = cli(*words, "--part", "1/2")
    assert code == 0
    assert "Next: hpc-trainer train model=gpt data=tokens" in out
    for wrong in ("0/2", "3/2", "x", "1/0"):
        code, _, err = cli(*words, "--part", wrong)
        assert code == 2
        assert "must be I/N with 1 ≤ I ≤ N" in err
    assert cli(*words, "--workers", "0")[0] == 2


def test_shards_that_are_there_are_indexed(cli: Cli, tmp_path: Path) -> None:
    cli(*IMAGES)
    before = json.loads((tmp_path / "out" / "train" / "index.json").read_text())
    (tmp_path / "out" / "train" / "index.json").unlink()
    code, out, _ = cli("index", "out/train")
    assert code == 0
    assert f"{before['num_samples']} samples in 1 shard." in out
    assert json.loads((tmp_path / "out" / "train" / "index.json").read_text()) == before
    assert json.loads(cli("index", "out/train", "--json")[1])["samples"] == before["num_samples"]


def test_wrong_configurations_end_with_2(cli: Cli, tmp_path: Path) -> None:
    for argv, match in (
        (("check", "data=image_shards", "data.path=none"), "data.path"),
        (("check", "data=digits", "--sample", "0"), "--sample=0 must be 1 or more"),
        (("bench", "data=digits", "--workers", "2,x"), "must be numbers with commas"),
        (("bench", "data=digits", "--step-ms", "-1"), "must be greater than 0"),
        (("check", "seed=1,2"), "takes one configuration"),
        (("prepare", "images", "none", "--to", "out"), "must be a folder with a folder of pictures"),
        (("prepare", "tokens", "none", "--to", "out"), "must be a file, a folder or a pattern"),
    ):
        code, out, err = cli(*argv)
        assert (code, out) == (2, ""), argv
        assert match in err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_grid_of_parts_on_this_machine(cli: Cli, tmp_path: Path) -> None:
    # The pieces are few: of three parts the last has none, and any of them may be the one that finishes.
    slurm = ("--slurm", "cluster=local", "--slurm", "local.max_parallel=3", "--parts", "3", "--json")
    submit = [sys.executable, "-m", "hpc_trainer", "data", *IMAGES, *slurm]
    done = warm.run(submit, text=True, timeout=120, cwd=tmp_path)
    assert json.loads(done.stdout)["submitted"] == 3, done.stderr
    status = [sys.executable, "-m", "hpc_trainer", "status", "prepare-out", "--watch"]
    done = warm.run(status, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.count("COMPLETED") >= 3, done.stdout
    assert "all was there already" in cli(*IMAGES)[1]
    assert "all was there already" in cli(*IMAGES, "--slurm", "cluster=local")[1]
