"""Files that a person names, or that lie where a verb looks: nothing waits for the writer of a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.data.text import TextBytesConfig
from hpc_trainer.data.text.dataset import build as build_text
from hpc_trainer.data.tokens.files import DOCUMENTS, read_tokens, write_tokens
from hpc_trainer.deploy.exported import CARD, CARD_FORMAT, CONFIG, FORMATS, read_card
from hpc_trainer.errors import DataError, RunStateError
from hpc_trainer.record.states import RunState
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

Play = Callable[..., tuple[int, str]]
PLAN = ("plan", "experiment=digits", "cluster=local", "snapshot=off")
PIPES = {
    "a table": ("rows.csv", (*PLAN, "data=table", "data.path=rows.csv")),
    "a table of another kind": ("rows.parquet", (*PLAN, "data=table", "data.path=rows.parquet")),
    "arrays": ("arrays.npz", (*PLAN, "data=arrays", "data.path=arrays.npz")),
    "arrays of another kind": ("rows.parquet", (*PLAN, "data=arrays", "data.path=rows.parquet")),
    "the description of a model": ("model/config.json", (*PLAN, "model=hf", "model.path=model")),
    "the project's pyproject.toml": ("pyproject.toml", PLAN),
    "a configuration file": ("conf/hardware/mine.yaml", (*PLAN, "--config-dir", "conf", "hardware=mine")),
    "the card of an export": ("export/card.json", ("eval", "export")),
    "the configuration of an export": ("export/config.yaml", ("eval", "export")),
    "a tar to index": ("shards/train-0.tar", ("data", "index", "shards")),
    "an archive": ("sweep.tar", ("unarchive", "sweep.tar")),
    "a tokenizer": ("tok.json", ("data", "prepare", "tokens", "a.txt", "--to", "out", "--tokenizer", "tok.json")),
}
pytestmark = pytest.mark.timeout(20)  # who opens a pipe waits for a writer


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    """Play a verb in the test's folder; return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPC_TRAINER_RUNS", raising=False)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        return code or 0, out.out + out.err

    return run


@pytest.mark.parametrize(("name", "words"), PIPES.values(), ids=PIPES)
def test_no_verb_waits_for_a_pipe(name: str, words: tuple[str, ...], play: Play, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    pipe = tmp_path / name
    pipe.parent.mkdir(parents=True, exist_ok=True)
    if pipe.parent.name == "export":
        (pipe.parent / "card.json").write_text("{}")
        (pipe.parent / "config.yaml").write_text("{}")
        pipe.parent.chmod(0o700)
        pipe.unlink()
    os.mkfifo(pipe, 0o600)
    code, said = play(*words)
    if name == "pyproject.toml":  # one that cannot be read is no project file
        assert code == 0, said
    else:
        assert code in (1, 2), said
        assert pipe.name in said or pipe.parent.name in said
    assert "Traceback" not in said


def test_no_export_is_read_from_a_pipe(tmp_path: Path) -> None:
    kind = FORMATS["torch"]
    card = {"format": CARD_FORMAT, "to": "torch", "file": kind.file, "quantize": None, "sha256": "0" * 64}
    (tmp_path / CARD).write_text(json.dumps(card))
    (tmp_path / CONFIG).write_text("{}")
    os.mkfifo(tmp_path / kind.file, 0o600)
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    with pytest.raises(RunStateError, match="it is a pipe, not a file"):
        read_card(tmp_path)


def test_the_sweep_of_a_colleague_cannot_stop_rm_and_clean(play: Play, tmp_path: Path) -> None:
    """They look in every sweep of the folder for runs that begin with the files that would go."""
    sweep = SweepOnDisk(tmp_path / "runs" / "mine", make_specs(1, "cluster=local"))
    sweep.submit()
    sweep.start()
    sweep.end(state=RunState.FAILED, cause="error")
    (tmp_path / "runs" / "theirs").mkdir()
    os.mkfifo(tmp_path / "runs" / "theirs" / "specs.jsonl")
    for verb in ("clean", "rm"):
        code, said = play(verb, "mine")
        assert code == 0, said


def test_no_data_set_waits_for_a_pipe(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    write_tokens(folder, [np.arange(5)], vocab_size=8)
    (folder / DOCUMENTS).unlink()
    os.mkfifo(folder / DOCUMENTS)
    with pytest.raises(DataError, match="it is a pipe, not a file"):
        read_tokens(folder)
    pipe = tmp_path / "book.txt"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="it is a pipe, not a file"):
        build_text(TextBytesConfig(path=str(pipe)), "train")
