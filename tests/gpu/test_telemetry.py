"""What NVML tells of a real GPU, beside what nvidia-smi says."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.gpu.runs import ON_GPU, Figures, Runs

pytestmark = ON_GPU


def test_a_run_tells_what_its_gpu_did(runs: Runs, figures: Figures) -> None:
    done = runs.train(
        "experiment=gpt2_124m", "train.compile=false", "train.global_batch_size=16", "train.num_steps=150",
        "monitor.log_every_steps=25", "schedule.warmup_steps=1", "train.eval_every_steps=0", "data.num_eval=8",
        "monitor.on_overheat=warn", "monitor.telemetry_every_s=1",
    )  # fmt: skip
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,uuid,power.limit,memory.total,temperature.gpu,power.draw", "--format=csv"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    (path,) = (done.paths.folder / "telemetry").glob("*.jsonl")
    told = [json.loads(line) for line in path.read_text().splitlines()]
    figures.tell("telemetry", smi=smi, first=told[0], last=told[-1], count=len(told))
    text = path.read_text()
    for word in ("temperature_c", "power_w", "sm_clock_mhz", "memory_used", "energy_j"):
        assert word in text
    for command in ("show", "advise", "why"):
        said = subprocess.run(
            [sys.executable, "-m", "hpc_trainer", command, done.paths.run_id, "--runs-dir", str(runs.folder),
             "--sweep", done.paths.folder.parent.name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        figures.tell(command, said=said.stdout[-2500:])
        assert said.returncode == 0, said.stderr
        assert "host-bound" not in said.stdout, "its GPU is at full load while it trains"
