"""A worker whose file system refuses: by `ulimit -f`, which needs no disk of one's own to fill."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.operate.why import explain
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.spec import append_specs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status

_WORDS = (
    "cluster=local", "experiment=digits", "model=mlp", "train.num_steps=40", "train.eval_every_steps=0",
    "checkpoint.every_steps=10", "monitor.log_every_steps=1", "sweep_name=full",
)  # fmt: skip


def _worker(folder: Path, num_bytes: int) -> tuple[RunPaths, int]:
    folder.chmod(0o700)
    grid = freeze_grid([*_WORDS, f"paths.runs_dir='{folder}'"])
    grid.sweep.folder.mkdir(mode=0o700)
    append_specs(grid.sweep, grid.specs)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"  # Python puts a .pyc that was cut off in place, for whoever comes next
    paths = grid.sweep.run(grid.specs[0].run_id)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_trainer.worker", "--sweep-dir", grid.sweep.folder, "--run", paths.run_id],
        capture_output=True, text=True, check=False, env=environ,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes)),
    )  # fmt: skip
    return paths, done.returncode


@pytest.mark.long
def test_training_goes_on_to_its_end_and_why_says_what_refused(tmp_path: Path) -> None:
    """No checkpoint fits, and after some lines neither does the log; metrics do. Only the last save is an error."""
    paths, code = _worker(tmp_path, 12_000)
    log = paths.log(0, 0).read_text()
    assert code == 74, log
    assert "WARNING: step 10: the checkpoint was NOT saved" in log
    assert [record["step"] for record in read_lines(paths.metrics)][-1] > 20
    sweep = read_status(SweepPaths(paths.folder.parent))
    (run,) = sweep.runs
    why = explain(sweep, run, asks_slurm=False)
    assert (why.state, why.cause) == (RunState.FAILED, "storage")
    assert "File too large" in why.evidence[0]
