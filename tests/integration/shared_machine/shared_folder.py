"""A project folder that a team may write, with a colleague who is another user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import warm

TEAM, COLLEAGUE = 43210, 54321
# Says who imported it, and from where; then does as if nothing had been there.
TRAP = """
import os
with open({record!r}, "a") as file:
    file.write(f"{{__name__}} imported by user {{os.getuid()}}: {{__file__}}\\n")
raise ImportError("this is the colleague's")
"""
TRAPS = (
    "numpy", "yaml", "psutil", "sklearn", "torch", "submitit", "safetensors", "omegaconf", "hydra", "rich", "typer",
    "hpc_trainer", "runpy", "json", "contextlib", "hashlib", "zipfile", "argparse", "logging", "multiprocessing",
)  # fmt: skip


@dataclass
class SharedFolder:
    """A project folder with mode 2775; the person is root here, the colleague another user of the group."""

    folder: Path
    record: Path
    home: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def colleague_writes(self, name: str, text: str) -> None:
        """As the colleague, by a process of theirs."""
        subprocess.run(
            ["/bin/sh", "-c", 'umask 022; mkdir -p "$(dirname "$0")"; cat > "$0"', name], input=text, text=True,
            check=True, cwd=self.folder, user=COLLEAGUE, group=TEAM, extra_groups=[],
        )  # fmt: skip

    def set_traps(self) -> None:
        for name in TRAPS:
            self.colleague_writes(f"{name}.py", TRAP.format(record=str(self.record)))

    def run(self, *words: str, code: int = 0, is_forked: bool = False, **environ: str) -> str:
        """What `hpc-trainer` says to the person in this folder, who sets no PYTHONPATH.

        Args:
            is_forked: for what does not depend on how Python starts: from the warm process, as others do.
        """
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "PYTHON"))}
        own = {"HPC_TRAINER_RUNS": str(self.home / "runs"), "XDG_CONFIG_HOME": str(self.home), "COLUMNS": "300"}
        start = [sys.executable, "-m", "hpc_trainer"] if is_forked else [Path(sys.executable).with_name("hpc-trainer")]
        done = (warm.run if is_forked else subprocess.run)(
            [*start, *words], cwd=self.folder, env={**kept, **own, **self.env, **environ}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, check=False, timeout=250,
        )  # fmt: skip
        logs = "\n".join(path.read_text(errors="replace") for path in (self.home / "runs").glob("*/l*/*"))
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{logs}"
        return done.stdout + done.stderr

    @property
    def sprung(self) -> str:
        return self.record.read_text() if self.record.exists() else ""


def make_shared_folder(tmp_path: Path) -> SharedFolder:
    """The folder, in `tmp_path`, where runs go to `runs`."""
    folder = tmp_path / "project"
    folder.mkdir()
    os.chown(folder, 0, TEAM)
    folder.chmod(0o2775)
    record = tmp_path / "record"
    record.touch()
    record.chmod(0o666)
    return SharedFolder(folder, record, tmp_path)
