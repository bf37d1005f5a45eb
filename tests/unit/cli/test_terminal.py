"""Nothing that a run, a file or Slurm says steers the terminal; colours of ours, and of a log, do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from hpc_trainer.cli.common import VisibleConsole, one_line, visible_log_line
from hpc_trainer.errors import visible
from hpc_trainer.record.files import write_json
from hpc_trainer.record.states import RunState
from tests import warm
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

# A window's title, the cursor, the clipboard, a hidden line, a bell, C1's one-character escape, a turned name.
EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[1A\x1b]52;c;ZXZpbA==\x07\x1b[8mhidden\x1b[0m\x9b31mred\r\x08\x7fgpj\u202egnp"


def test_control_characters_become_visible() -> None:
    assert visible("a\x1b[31mb\r\n\tc\x7f\x9b\u202e") == "a\\x1b[31mb\\r\n\tc\\x7f\\x9b\\u202e"
    assert one_line("a\nb\tc") == "a\\nb\\tc"
    assert visible("Größe 10 µm ✓ 日本語") == "Größe 10 µm ✓ 日本語"


def test_a_log_line_keeps_its_colours_and_ends_them() -> None:
    assert visible_log_line("plain \r") == "plain \\r"
    assert visible_log_line("\x1b[1;31mloss\x1b[0m 3 \x1b[2K\x1b[A") == "\x1b[1;31mloss\x1b[0m 3 \\x1b[2K\\x1b[A\x1b[0m"
    assert visible_log_line("\x1b[" + "1;" * 100 + "m").startswith("\\x1b["), "no terminal has so long a colour"


def test_the_console_moves_the_cursor_and_texts_do_not() -> None:
    out = io.StringIO()
    console = VisibleConsole(file=out, force_terminal=True, width=200)
    with Progress(TextColumn("{task.fields[note]}", markup=False), console=console) as progress:
        progress.add_task("", note=EVIL)
    plain = io.StringIO()
    with Progress(TextColumn("x"), console=Console(file=plain, force_terminal=True, width=200)) as progress:
        progress.add_task("")
    allowed = {"\x1b", "\r"} & set(plain.getvalue())
    assert {"\x1b", "\r"} == allowed, "rich's own"
    assert visible("\x1b]0;owned") in out.getvalue(), "a bell is left out by rich"
    assert "\x1b]" not in out.getvalue()
    assert "\x07" not in out.getvalue()


@pytest.fixture
def failed(tmp_path: Path) -> SweepOnDisk:
    """A sweep with a run that failed with a hostile message, and one that is complete with hostile metrics."""
    sweep = SweepOnDisk(tmp_path / "runs" / "evil", make_specs(2))
    sweep.submit(executor="local", job_id="host:1:1")
    for index in (0, 1):
        sweep.start(index, executor="local", job_id="host:1:1", node=f"n{EVIL}")
    error = {"type": f"Type{EVIL}", "message": f"message {EVIL}", "traceback": f"traceback {EVIL}", "exit_code": 1}
    sweep.end(0, state=RunState.FAILED, cause="exception", error=error)
    write_json(sweep.run(0).failure(0), error)
    sweep.run(0).log(0, 0).write_text(f"line {EVIL}\n\x1b[32mgreen\x1b[0m\n")
    sweep.done(1, **{f"eval_loss{EVIL}": 1.0, "eval_loss": 2.0})
    return sweep


VERBS = (
    ("status",), ("status", "evil"), ("why", "evil"), ("why", "mlp-digits-lr0.001-s0"),
    ("results", "evil"), ("report", "evil"), ("results", "evil", "--sort", EVIL), ("status", f"no{EVIL}"),
    ("sweeps",), ("clean", "evil"), ("rm", "evil"), ("hold", f"no{EVIL}"),
    ("plan", f"optim.lr={EVIL}"), ("cancel", f"no{EVIL}"), ("why", f"no{EVIL}", "--json"),
)  # fmt: skip


_COLOURS = re.compile("\x1b\\[[0-9;]*m")


def _env(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "NO_COLOR"))}
    return {**kept, "HPC_TRAINER_RUNS": str(folder), "XDG_CONFIG_HOME": str(folder), "TERM": "xterm", "COLUMNS": "500"}


def _run(folder: Path, *words: str) -> str:
    """What a pipe gets from one command."""
    command = [sys.executable, "-m", "hpc_trainer", *words]
    return warm.run(command, check=True, text=True, env=_env(folder), cwd=folder).stdout


def _on_a_terminal(folder: Path, words: Sequence[str]) -> str:
    """What a terminal gets from one command."""
    ours, theirs = pty.openpty()
    process = warm.Popen(
        [sys.executable, "-m", "hpc_trainer", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=_env(folder),
        cwd=folder,
    )  # fmt: skip
    os.close(theirs)
    got = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while data := os.read(ours, 65536):
            got += data
    process.wait()
    os.close(ours)
    return got.decode().replace("\r\n", "\n")


def test_no_verb_lets_a_control_character_reach_a_terminal(failed: SweepOnDisk) -> None:
    got = {words: _on_a_terminal(failed.paths.folder.parent, words) for words in VERBS}
    for words, text in got.items():
        left = _COLOURS.sub("", text)
        assert visible(left) == left, words
    assert "message \\x1b]0;owned" in got["why", "mlp-digits-lr0.001-s0"]
    assert "Type\\x1b]0;owned" in got["status",]


def test_logs_keep_colours_alone_in_a_pipe_too(failed: SweepOnDisk) -> None:
    for text in (
        _on_a_terminal(failed.paths.folder.parent, ("logs", "--sweep", "evil")),
        _run(failed.paths.folder.parent, "logs", "--sweep", "evil"),
    ):
        assert "\x1b[32mgreen\x1b[0m" in text
        assert "line \\x1b]0;owned\\x07\\x1b[2J" in text
        left = _COLOURS.sub("", text)
        assert visible(left) == left


def test_json_stays_json(failed: SweepOnDisk) -> None:
    status = json.loads(_run(failed.paths.folder.parent, "status", "--json"))
    assert status["runs"][0]["node"] == f"n{EVIL}"
    assert f"eval_loss{EVIL}" in status["runs"][1]["metrics"]


def test_an_error_of_ours_is_shown_visible(tmp_path: Path) -> None:
    code = (
        "import hpc_trainer.cli.main as cli, sys\n"
        "def app(): raise ZeroDivisionError('a\\x1b[2Jb')\n"
        "cli.with_one_verb = lambda word: app\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: a\\x1b[2Jb\n")
