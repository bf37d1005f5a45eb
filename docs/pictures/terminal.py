"""Make terminal.svg: a real transcript of `plan`, `submit`, `status` and `results` on this machine.

    .venv/bin/python docs/pictures/terminal.py      # some minutes: four small trainings

Each command runs in a terminal of its own, in a temporary folder; nothing but the picture is left.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 120
GRID = "experiment=digits model=mlp,cnn hardware=cpu_x1,cpu_x2 sweep_name=first_grid"
PICTURE = Path(__file__).with_name("terminal.svg")
PROGRAM = Path(sys.executable).with_name("hpc-trainer")
# The format of rich loads a font from the network; the reader's own fixed-width font does.
FORMAT = re.sub(r"@font-face \{\{.*?\}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def play(command: str, folder: Path, env: dict[str, str]) -> str:
    """Run a command in a terminal of `WIDTH` columns and return all that it printed, colours included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    words = [str(PROGRAM), *command.split()[1:]]
    process = subprocess.Popen(words, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        printed += part
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{command}: exit code {process.returncode}\n{printed.decode()}")
    return printed.decode().replace("\r\n", "\n")


def states(folder: Path, env: dict[str, str]) -> dict[str, int]:
    """Return the number of runs by state."""
    words = [str(PROGRAM), "status", "first_grid", "--json"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True)
    counts: dict[str, int] = json.loads(done.stdout)["counts"]
    return counts


def main() -> None:
    """Play the commands and write the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = folder / ".config" / "hpc_trainer"
        settings.mkdir(parents=True)
        (settings / "config.yaml").write_text("cluster: local\n")
        env = {key: value for key, value in os.environ.items() if not key.startswith(("HPC_TRAINER", "XDG_CONFIG"))}
        env |= {"HOME": name, "TERM": "xterm-256color", "PATH": f"{PROGRAM.parent}:{env['PATH']}"}
        screen = []

        def show(command: str) -> None:
            screen.append(f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m\n{play(command, folder, env)}")

        show(f"hpc-trainer plan {GRID}")
        show(f"hpc-trainer submit {GRID}")
        while not {"COMPLETED", "RUNNING"} <= states(folder, env).keys():
            time.sleep(0.5)
        show("hpc-trainer status first_grid")
        while states(folder, env).get("COMPLETED", 0) < 4:
            time.sleep(1)
        show("hpc-trainer results first_grid")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(screen).replace(name, "~")), overflow="fold")
    PICTURE.write_text(console.export_svg(title="hpc-trainer", code_format=FORMAT, unique_id="terminal"))


if __name__ == "__main__":
    main()
