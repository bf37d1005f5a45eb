"""Fixtures: a folder to work in, and the command line in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.main import main


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Play a command line in a folder of its own; return the exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *words])
        code: object = 0
        try:
            main()
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        return int(str(code or 0)), out.out + out.err

    return run


@pytest.fixture
def document(play: Callable[..., tuple[int, str]]) -> Callable[..., Any]:
    """Play a command line that succeeds, with --json; return its document."""

    def run(*words: str) -> Any:
        code, said = play(*words, "--json")
        assert code == 0, said
        return json.loads(said)

    return run
