"""Models of transformers and adapters on two ranks, by DDP and FSDP: the steps of one rank, the same bits resumed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record.metrics import read_metrics
from tests.unit.training.ranks import play_jobs

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(900),
    pytest.mark.long,  # each rank imports transformers for 5 s
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is in the extra hf"),
]
TEXT = Path(__file__).parents[3] / "text.txt"
BASE = ("data=text_bytes", f"data.path={TEXT}", "data.seq_len=16", "data.eval_fraction=0.02", "optim.lr=0.01",
        "train.global_batch_size=8", "train.micro_batch_size=4", "train.num_steps=2", "train.eval_every_steps=0",
        "schedule=constant", "schedule.warmup_steps=0", "checkpoint.every_steps=1",
        "monitor.log_every_steps=1")  # fmt: skip
LLAMA = (*BASE, "model=hf", "model.architecture=LlamaForCausalLM",
         "+model.config={num_hidden_layers:2,hidden_size:16,intermediate_size:16,num_attention_heads:2,"
         "max_position_embeddings:16}")  # fmt: skip
# Its output layer is its embedding.
TIED = (*BASE, "model=hf", "model.architecture=GPT2LMHeadModel",
        "+model.config={n_layer:2,n_embd:16,n_head:2,resid_pdrop:0,embd_pdrop:0,attn_pdrop:0}")  # fmt: skip
GPT = (*BASE, "model=gpt", "model.num_layers=2", "model.embed_dim=16", "model.num_heads=2")
LORA = ("train.lora.rank=2", "optim.layer_decay=0.5")
MODELS = {"hf": LLAMA, "tied": TIED, "hf_lora": (*LLAMA, *LORA), "gpt_lora": (*GPT, *LORA)}
WAYS = {
    "hf-ddp": (), "hf-fsdp": ("parallel=fsdp", "train.recompute=full"), "tied-fsdp": ("parallel=fsdp",),
    "hf_lora-ddp": (), "hf_lora-fsdp": ("parallel=fsdp",),
    "gpt_lora-fsdp": ("parallel=fsdp", "train.ema_decay=0.5", "train.recompute=full"),
    "gpt_lora-zero1": ("parallel.zero1=true",),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    _well(path, 1, [_job(name, words, "train.grad_accum_steps=2") for name, words in MODELS.items()])
    jobs = []
    for name, more in WAYS.items():
        words = (*MODELS[name.partition("-")[0]], *more)
        cut = f"cut-{name}"
        jobs += [_job(name, words), _job(cut, words, stop_at=1), _job(cut, words, attempt=1)]
    _well(path, 2, jobs)
    return path


def _job(name: str, words: tuple[str, ...], *more: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "words": [*words, *more], "attempt": 0, "stop_at": None, **values}


def _well(folder: Path, ranks: int, jobs: list[dict[str, Any]]) -> None:
    ends = play_jobs(folder, ranks, str(ranks), jobs)
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-4000:]}" for code, output in ends)


def _tensors(run: Path) -> dict[str, bytes]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in newest.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize("name", WAYS)
def test_the_steps_are_those_of_one_rank(folder: Path, name: str) -> None:
    def steps(run: Path) -> list[tuple[Any, ...]]:
        return [(line["loss"], line["grad_norm"]) for line in read_metrics(run / "metrics.jsonl") if "loss" in line]

    alone, here = steps(folder / name.partition("-")[0]), steps(folder / name)
    assert len({loss for loss, _ in alone}) == 2
    assert here == [pytest.approx(each, rel=1e-4) for each in alone]


@pytest.mark.parametrize("name", WAYS)
def test_a_resumed_run_has_the_same_bits(folder: Path, name: str) -> None:
    whole = _tensors(folder / name)
    assert len(whole) > 1
    assert _tensors(folder / f"cut-{name}") == whole
