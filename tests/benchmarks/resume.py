"""From the start of a process to its first step after a resume, beside a raw script; and the loader's skip."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PAIRS = 7
NEAR, FAR = 10, 1_000_000
FIRST_BATCHES = 41

# What a person writes who trusts the folder: the same model, data, optimizer, clipping and state, one step. It reads
# the file of the digits as we do: importing scikit-learn would take as long as all the rest.
RAW = """
import gzip, importlib.util, sys, time
from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.set_num_threads(1)
path = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets/data/digits.csv.gz"
text = gzip.decompress(path.read_bytes()).decode().replace("\\n", ",").rstrip(",")
table = np.fromstring(text, sep=",").reshape(-1, 65)
images, labels = torch.tensor(table[:, :64], dtype=torch.float32), torch.tensor(table[:, 64], dtype=torch.int64)
width = 256
model = nn.Sequential(
    nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1),
    nn.Linear(width, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step():
    rows = torch.randint(1400, (64,))
    loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if sys.argv[2] == "save":
    step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(state, sys.argv[1])
else:
    state = torch.load(sys.argv[1], weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    step()
    print(time.time(), flush=True)
"""


def run() -> None:
    """Prints both tables."""
    _first_step()
    _skip()


def _first_step() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "raw.py").write_text(RAW)
        subprocess.run([sys.executable, "raw.py", "state.pt", "save"], cwd=folder, check=True)
        sweep, run_id = _prepare(folder)
        pairs = []
        for _ in range(PAIRS + 1):
            begin = time.time()
            done = subprocess.run(
                [sys.executable, "raw.py", "state.pt", "load"], cwd=folder, check=True, capture_output=True, text=True
            )
            pairs.append((_ours(sweep, run_id), float(done.stdout) - begin))
    ours, raw = (statistics.median(column) for column in zip(*pairs[1:], strict=True))  # the first pair warms the disk
    extra = statistics.median(mine - theirs for mine, theirs in pairs[1:])
    print(f"\nresume to first step (mlp 64-256-256-10, AdamW, digits; one rank; n={PAIRS} pairs, new processes)")
    print(f"raw script {raw:.2f} s, worker {ours:.2f} s, added: median {extra:+.2f} s; bar +0.30 s")


def _prepare(folder: Path) -> tuple[Path, str]:
    """A finished run of 20 steps, and the spec of one that goes on from it."""
    from hpc_trainer.launch.freeze import freeze_grid
    from hpc_trainer.record.spec import append_specs

    words = [
        "cluster=local", "experiment=digits", "model=mlp", "monitor.log_every_steps=1", "train.eval_every_steps=0",
        f"paths.runs_dir='{folder}'",
    ]  # fmt: skip
    folder.chmod(0o700)
    origin = None
    for name, steps in (("first", 20), ("second", 22)):
        more = [f"checkpoint.resume_from='{origin}'"] if origin else []
        grid = freeze_grid([*words, f"train.num_steps={steps}", f"sweep_name={name}", *more])
        grid.sweep.folder.mkdir(mode=0o700)
        append_specs(grid.sweep, grid.specs)
        run_id = grid.specs[0].run_id
        if origin is None:
            work(grid.sweep.folder, run_id)
            origin = grid.sweep.run(run_id).folder
    return grid.sweep.folder, run_id


def work(sweep: Path, run_id: str, env: Mapping[str, str] | None = None) -> None:
    """Run the worker of one run, as a process of its own on this machine. Raises CalledProcessError: it failed.

    `env`: more variables than this process has.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
    command = [sys.executable, "-m", "hpc_trainer.worker", "--sweep-dir", str(sweep), "--run", run_id]
    subprocess.run(command, env={**kept, **(env or {})}, check=True, capture_output=True)


def _ours(sweep: Path, run_id: str) -> float:
    """Seconds from the start of a worker to the line of its first step."""
    shutil.rmtree(sweep / run_id, ignore_errors=True)
    begin = time.time()
    work(sweep, run_id)
    first = json.loads((sweep / run_id / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 21
    return float(first["time"]) - begin


def _skip() -> None:
    from hpc_trainer.config.schema.data import DigitsConfig
    from hpc_trainer.training.data.digits import build
    from hpc_trainer.training.data.loader import train_batches
    from hpc_trainer.training.data.order import BatchOrder

    dataset = build(DigitsConfig(), "train")

    def first_batch(first_step: int) -> float:
        begin = time.perf_counter()
        batches = train_batches(
            dataset, BatchOrder(len(dataset), 64, seed=0), first_step=first_step, num_steps=FAR + 10, rank=0,
            world_size=1, micro_batch_size=64, grad_accum_steps=1, num_workers=0,
        )  # fmt: skip
        next(batches)
        seconds = time.perf_counter() - begin
        batches.close()
        return seconds

    first_batch(NEAR)
    pairs = [(first_batch(NEAR), first_batch(FAR)) for _ in range(FIRST_BATCHES)]
    near, far = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    print(f"\nloader's first batch after a resume (digits, batch 64, n={FIRST_BATCHES} pairs)")
    print(
        f"at step {NEAR}: {near:.0f} µs, at step {FAR:,}: {far:.0f} µs, ratio {far / near:.2f}; a replay would have "
        f"{FAR / NEAR:,.0f}"
    )


if __name__ == "__main__":
    run()
