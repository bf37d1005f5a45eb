"""What a rank does not wait for before its first step: libraries that it does not use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.runs.spec import append_specs

# Each takes from a tenth of a second (OmegaConf) to as long as torch itself (torch._dynamo, scikit-learn).
_HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "hydra", "omegaconf", "submitit", "sklearn", "scipy", "rich")
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


def test_a_run_imports_neither_dynamo_nor_other_heavy_libraries(tmp_path: Path) -> None:
    """Mixed precision with its scaler, averages, accumulation, evaluations, saves beside training: all but compile."""
    tmp_path.chmod(0o700)
    grid = freeze_grid([*_WORDS, f"paths.runs_dir='{tmp_path}'", "sweep_name=light"])
    grid.sweep.folder.mkdir(mode=0o700)
    append_specs(grid.sweep, grid.specs)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    paths = grid.sweep.run(grid.specs[0].run_id)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, tmp_path / "heavy", "--sweep-dir", grid.sweep.folder, "--run", paths.run_id],
        capture_output=True, text=True, check=False, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, paths.log(0, 0).read_text()
    assert paths.result.exists(), "it trained"
    assert (tmp_path / "heavy").read_text() == ""
