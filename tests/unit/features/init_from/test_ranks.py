"""Weights from outside, frozen ones and factors on several ranks: each way to share a model begins with the same ones.

A source that FSDP saved in parts, and a file; on two ranks by DDP, ZeRO-1, FSDP, tensor parallel and a pipeline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.training.ranks import play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.timeout(600)]
GPT = ("experiment=gpt_bytes", "model.num_layers=2", "model.embed_dim=16", "model.num_heads=2", "data.seq_len=16",
       "train.global_batch_size=8", "train.num_steps=3", "train.eval_every_steps=0", "checkpoint.every_steps=2",
       "schedule=constant", "schedule.warmup_steps=0", "model.dropout=0", "monitor.log_every_steps=1")  # fmt: skip
FROZEN = ("train.freeze=['blocks.0.*','*_norm.bias']", "+optim.lr_of={*.weight:0.5}")
WAYS = {
    "ddp": ("train.ema_decay=0.9", *FROZEN),
    "zero1": ("parallel.zero1=true", *FROZEN),
    "fsdp": ("parallel=fsdp", "train.ema_decay=0.9", *FROZEN),
    "muon": ("parallel=fsdp", "optim=muon", *FROZEN),
    "tp": ("parallel=tp", *FROZEN),
    "pp": ("parallel=pp", "train.micro_batch_size=4", "train.grad_accum_steps=2", "+optim.lr_of={blocks.1.*:0.5}"),
}
EACH_WAY = pytest.mark.parametrize("name", WAYS)
# No weight moves, so the checkpoint shows what each way began with.
STILL = ("optim=sgd", "optim.lr=1e-30", "optim.weight_decay=0", "optim.momentum=0", "optim.nesterov=false")


def _objects(run: Path) -> dict[str, Any]:
    store = CheckpointStore(run / "checkpoints", group=RankGroup(), keep_last=1, attempt=0, read_only=True)
    info = store.newest_valid()
    assert info is not None
    found: dict[str, Any] = store.load(info)[0]["objects"]
    return found


def _well(folder: Path, ranks: int, tag: str, jobs: list[dict[str, Any]]) -> None:
    ends = play_jobs(folder, ranks, tag, jobs)
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-4000:]}" for code, output in ends)


def _job(name: str, *words: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "words": [*GPT, *words], "attempt": 0, "stop_at": None, **values}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, and then every way: what it begins with, what it trains, and that cut in two."""
    path = tmp_path_factory.mktemp("weights")
    _well(path, 2, "source", [_job("source", "parallel=fsdp")])
    safetensors.torch.save_file(
        {name: each.clone() for name, each in _objects(path / "source")["model"].items()}, path / "w.safetensors"
    )
    run, file = f"init_from.path={path / 'source'}", f"init_from.path={path / 'w.safetensors'}"
    jobs = [
        job
        for name, words in WAYS.items()
        for job in (
            _job(f"begun-{name}", *(word for word in words if word != "optim=muon"), *STILL, run),
            _job(f"whole-{name}", *words, file),
            _job(f"cut-{name}", *words, file, stop_at=2),
            _job(f"cut-{name}", *words, file, attempt=1),
        )
    ]
    _well(path, 2, "ways", jobs)
    return path


@EACH_WAY
def test_each_way_begins_with_the_weights_of_the_source(folder: Path, name: str) -> None:
    source, begun = _objects(folder / "source")["model"], _objects(folder / f"begun-{name}")["model"]
    assert source.keys() == begun.keys()
    assert all(torch.allclose(begun[key], each, rtol=0, atol=1e-25) for key, each in source.items())


@EACH_WAY
def test_what_is_frozen_stays_and_all_else_is_trained(folder: Path, name: str) -> None:
    source, trained = _objects(folder / "source")["model"], _objects(folder / f"whole-{name}")
    same = {key for key, each in source.items() if torch.equal(trained["model"][key], each)}
    frozen = {key for key in source if key.startswith("blocks.0.") or key.endswith("_norm.bias")}
    assert same == (set() if name == "pp" else frozen)
    assert len(frozen) > 10
    assert not {f"model.{key}" for key in same} & set(trained["optimizer"]["state"])


@EACH_WAY
def test_a_resumed_run_has_the_same_bits(folder: Path, name: str) -> None:
    whole, cut = (_objects(folder / f"{kind}-{name}")["model"] for kind in ("whole", "cut"))
    assert all(torch.equal(cut[key], each) for key, each in whole.items())


def test_fsdp_trains_as_ddp_does(folder: Path) -> None:
    ddp, fsdp = (_objects(folder / f"whole-{name}")["model"] for name in ("ddp", "fsdp"))
    assert all(torch.allclose(fsdp[key], each, rtol=1e-4, atol=1e-6) for key, each in ddp.items())
