"""What `plan --memory` reckons, beside what the allocator of the GPU counts; and the largest batch that fits."""

from __future__ import annotations

import json

import pytest

from hpc_trainer.launch.memory import find_needs
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import read_spec
from tests.gpu.runs import ON_GPU, Figures, Runs

pytestmark = [ON_GPU, pytest.mark.xdist_group("memory")]  # one at a time: each takes up to 20 GB

_GPT = ("experiment=gpt2_124m", "train.compile=false", "train.global_batch_size=8", "data.num_eval=8")
_RESNET = ("experiment=resnet50_synthetic", "train.compile=false", "train.global_batch_size=64", "data.num_samples=256")
TRAININGS = {
    "gpt": _GPT,
    "gpt_fp32": (*_GPT, "precision=fp32"),
    "gpt_recompute_full": (*_GPT, "train.recompute=full"),
    "gpt_recompute_selective": (*_GPT, "train.recompute=selective"),
    "gpt_chunked": (*_GPT, "train.loss_chunk_size=2048"),
    "gpt_offload": (*_GPT, "optim.offload=true"),
    "gpt_micro": (*_GPT, "train.micro_batch_size=2"),
    "gpt_compiled": (*_GPT, "train.compile=true"),
    "resnet50": _RESNET,
    "resnet50_recompute": (*_RESNET, "train.recompute=full"),
}
_EVALUATED = "evaluation"


@pytest.mark.parametrize("name", TRAININGS)
def test_the_estimate_is_within_a_tenth_of_the_allocators_peak(name: str, runs: Runs, figures: Figures) -> None:
    done = runs.train(
        *TRAININGS[name], "train.num_steps=4", "monitor.log_every_steps=2", "schedule.warmup_steps=1",
        "train.eval_every_steps=0",
    )  # fmt: skip
    spec = read_spec(SweepPaths(done.paths.folder.parent), done.paths.run_id)
    (need,) = find_needs([spec])
    assert need.problem is None
    reckoned = 1e9 * sum(size for part, size in need.parts.items() if part != _EVALUATED)
    told = json.loads(done.paths.memory.read_text())
    allocated = sum(told[part] or 0 for part in ("weights", "gradients", "optimizer", "average", "activations"))
    off = reckoned / allocated - 1
    figures.tell(name, reckoned=reckoned, allocated=allocated, off=off, parts=dict(need.parts), told=told)
    assert abs(off) <= 0.1 or (name == "gpt_compiled" and off > 0)


def test_the_largest_batch_that_fits_is_found_and_trains(runs: Runs, figures: Figures) -> None:
    """Real out-of-memory in the forward and in the backward pass on the way to it."""
    done = runs.train(
        "experiment=gpt2_124m", "train.compile=false", "train.global_batch_size=2048", "train.micro_batch_size=auto",
        "train.num_steps=2", "monitor.log_every_steps=1", "schedule.warmup_steps=1", "data.num_eval=8",
        "train.eval_every_steps=0",
    )  # fmt: skip
    measured = json.loads(done.paths.memory.read_text())
    figures.tell("auto", log=[line for line in done.log.splitlines() if "micro" in line], told=measured)
    assert measured["micro_batch_size"] in (32, 64)
    assert done.lines[-1]["step"] == 2


def test_out_of_memory_is_told_with_what_would_help(runs: Runs, figures: Figures) -> None:
    done = runs.train(
        "experiment=gpt2_124m", "train.compile=false", "train.global_batch_size=512", "train.num_steps=2",
        "schedule.warmup_steps=1", "data.num_eval=8", may_fail=True,
    )  # fmt: skip
    failure = json.loads(next(done.paths.logs.glob("*failure*.json")).read_text())
    figures.tell("out of memory", memory=failure["memory"])
    assert failure["cause"] == "out_of_memory"
    assert list(done.paths.logs.glob("*.memory.json"))
