"""A training that is killed and signalled comes back on the GPU with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.runs import HARDWARE

TRAININGS = {
    "digits_fp32": ("experiment=digits", "precision=fp32"),
    "digits_tf32": ("experiment=digits", "precision=tf32"),
    "digits_bf16": ("experiment=digits", "precision=bf16"),
    "digits_fp16": ("experiment=digits", "precision=fp16"),
    "gpt_bytes": ("experiment=gpt_bytes", "model.dropout=0.1", "precision=bf16"),
    "gpt_compiled": ("experiment=gpt_bytes", "train.compile=true", "precision=bf16"),
    "resnet18": ("experiment=resnet_synthetic", "precision=bf16", "train.channels_last=true"),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_identical_after_signals_and_kills(name: str, tmp_path: Path) -> None:
    words = (*TRAININGS[name], f"hardware={HARDWARE}", "snapshot=off", f"paths.runs_dir='{tmp_path}'")
    command = [sys.executable, "-m", "hpc_trainer", "verify", "resume", *words, "--steps", "16", "--interruptions", "3"]
    if HARDWARE.startswith("cpu") and "tf32" in name:
        pytest.skip("a CPU has no TF32")
    done = subprocess.run(
        [*command, "--seed", "4711", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    told = json.loads(done.stdout)
    assert told["is_identical"]
    assert told["num_compared"] > 0
