"""Slurm's commands that answer as a recorded cluster did."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.slurm.commands import user_name

RECORDED = Path(__file__).with_name("recorded")
_COMMAND = """#!/bin/sh
name=$(basename "$0")
if [ "$name" = scontrol ]; then
    read -r _ what _ || true
    if [ "$what" = node ]; then name=nodes; fi
fi
echo "$name" >> {folder}/calls
cat {folder}/$name.out
"""


class Recorded:
    """A recorded cluster on PATH."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.parts: dict[str, str] = {}
        text = (RECORDED / f"{name}.txt").read_text()
        for section in text.split("\n=== ")[1:]:
            command, _, answer = section.partition("\n")
            self.answer(command, answer + "\n" if answer and not answer.endswith("\n") else answer)
        (folder / "bin").mkdir()
        for command in ("scontrol", "sinfo", "sacctmgr"):
            script = folder / "bin" / command
            script.write_text(_COMMAND.replace("{folder}", str(folder)))
            script.chmod(0o755)

    def answer(self, command: str, text: str) -> None:
        """From now on a command prints this; `nodes` is scontrol's answer about nodes."""
        self.parts[command] = re.sub(r"\bann\b", user_name(), text)
        (self.folder / f"{command}.out").write_text(self.parts[command])

    @property
    def calls(self) -> list[str]:
        """Commands that were called, in order."""
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Recorded]:
    """Play a recorded cluster, whose user ann is the user of this process."""

    def play(name: str) -> Recorded:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        return Recorded(folder, name)

    return play
