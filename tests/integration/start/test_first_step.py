"""What a rank does not wait for before its first step: libraries that it does not use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.record.spec import append_specs

# Each takes from a tenth of a second (OmegaConf) to as long as torch itself (scikit-learn).
_HEAVY = ("hydra", "omegaconf", "submitit", "sklearn", "scipy", "rich")
_PROGRAM = f"""
import sys
from pathlib import Path
from hpc_trainer.worker.__main__ import main
code = main(sys.argv[2:])
Path(sys.argv[1]).write_text(" ".join(each for each in {_HEAVY} if each in sys.modules))
sys.exit(code)
"""
_WORDS = (
    "cluster=local", "experiment=digits", "model=cnn", "precision=fp16", "train.num_steps=4", "schedule.warmup_steps=0",
    "train.ema_decay=0.9",
    "train.grad_accum_steps=2", "train.eval_every_steps=2", "checkpoint.every_steps=2", "model.num_channels=4",
)  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_imports_no_heavy_library_that_it_does_not_use(tmp_path: Path, num_ranks: int) -> None:
    """Mixed precision with its scaler, averages, accumulation, evaluations, saves beside training, DDP: no compile."""
    tmp_path.chmod(0o700)
    words = (*_WORDS, f"hardware=cpu_x{num_ranks}", f"paths.runs_dir='{tmp_path}'", "sweep_name=light")
    grid = freeze_grid(words)
    grid.sweep.folder.mkdir(mode=0o700)
    append_specs(grid.sweep, grid.specs)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    paths = grid.sweep.run(grid.specs[0].run_id)
    heavy = [tmp_path / f"heavy-{rank}" for rank in range(num_ranks)]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, path in enumerate(heavy):
            command = [sys.executable, "-c", _PROGRAM, path, "--sweep-dir", grid.sweep.folder, "--run", paths.run_id]
            place = {
                "TORCHELASTIC_RUN_ID": "t", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
            }  # fmt: skip
            ranks.append(stack.enter_context(subprocess.Popen(command, env={**environ, **place})))
            stack.callback(ranks[-1].kill)
        codes = [rank.wait(timeout=200) for rank in ranks]
    assert codes == [0] * num_ranks, [path.read_text() for path in sorted(paths.logs.iterdir())]
    assert paths.result.exists(), "it trained"
    assert [path.read_text() for path in heavy] == [""] * num_ranks
