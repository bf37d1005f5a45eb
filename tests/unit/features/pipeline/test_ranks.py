"""Pipeline stages on ranks take the steps of one rank that accumulates, and write a checkpoint that one rank reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.journals import journal_records
from tests.unit.training.ranks import RankEnd, has_long, play_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]
STEPS = 8
# Eight micro-batches of two samples, whoever computes them.
BASE = ["experiment=digits", f"train.num_steps={STEPS}", "monitor.log_every_steps=1", "checkpoint.every_steps=1000",
        "train.global_batch_size=16", "train.micro_batch_size=2", "train.eval_every_steps=4", "schedule=constant",
        "schedule.warmup_steps=0"]  # fmt: skip
# A short one: evaluations of it take no longer than the steps.
TEXT = ("data=text_bytes", f"data.path={Path(__file__).parents[3] / 'text.txt'}")
MODELS = {
    "gpt": [*BASE, "model=gpt", *TEXT, "data.seq_len=16", "model.num_layers=3", "model.num_heads=2",
            "model.embed_dim=16", "model.dropout=0", "data.eval_fraction=0.05", "train.ema_decay=0.5"],
    # Batch norm. Evaluations of both are of averaged weights.
    "resnet": [*BASE, "model=resnet18", "model.width=8", "data=synthetic_images", "data.num_samples=100",
               "data.num_eval=30", "data.image_size=8", "train.ema_decay=0.5", "optim=sgd"],
    "muon": [*BASE, "model=gpt", *TEXT, "data.seq_len=16", "model.num_layers=3", "model.num_heads=2",
             "model.embed_dim=16", "model.dropout=0", "data.eval_fraction=0.05", "optim=muon", "optim.adamw_lr=0.002",
             "optim.adamw_weights=[blocks.0.*]"],
    # Overflows at first, and a growing scale later.
    "fp16": [*BASE, "model=gpt", "data=text_bytes", "data.seq_len=16", "model.num_layers=2", "model.num_heads=2",
             "model.embed_dim=16", "model.dropout=0", "data.eval_fraction=0.01", "precision=fp16",
             "precision.init_scale=524288", "precision.growth_interval=2"],
}  # fmt: skip
THREE = ("parallel=pp", "parallel.pipeline_parallel=2", "parallel.tensor_parallel=2")
MUON = {"loss": 1e-5, "eval_loss": 1e-5, "grad_norm": 5e-4}
"""Relative: bf16 rounds a gradient's last bits up or down before Newton-Schulz."""
KEYS = ("loss", "grad_norm", "eval_loss", "eval_accuracy")


def well(ends: list[RankEnd]) -> None:
    assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-3000:]}" for code, output in ends)


def job(name: str, *more: str, attempt: int = 0, stop_at: int | None = None) -> dict[str, Any]:
    words = [*MODELS[name.split("/")[1]], *more]
    return {"name": name, "words": words, "attempt": attempt, "stop_at": stop_at}


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run alone and in two stages; of gpt alone where no long test was chosen."""
    folder = tmp_path_factory.mktemp("pipeline")
    if not has_long(request):
        well(play_jobs(folder, 1, "one", [job("1/gpt")]))
        well(play_jobs(folder, 2, "two", [job("2/gpt", "parallel=pp")]))
        return folder
    alone = [*(job(f"1/{name}") for name in MODELS), job("chain/resnet", stop_at=3)]
    alone.append(job("chain/gpt", stop_at=6))
    well(play_jobs(folder, 1, "one", alone))
    stages = [
        job("2/gpt", "parallel=pp"),
        job("2/resnet", "parallel=pp", "parallel.pipeline_schedule=gpipe"),
        job("2/fp16", "parallel=pp"),
        job("offload/gpt", "parallel=pp", "optim.offload=true"),
        job("2/muon", "parallel=pp"),
    ]
    # The signal comes to the last stage's rank alone.
    for attempt, stop_at in ((1, 5), (2, None)):
        stages.append(job("chain/resnet", "parallel=pp", attempt=attempt, stop_at=stop_at))
    well(play_jobs(folder, 2, "two", stages))
    return folder


def metrics(folder: Path, *keys: str) -> list[tuple[Any, ...]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [tuple(line.get(key) for key in ("step", *keys)) for line in lines]


def close(here: Path, there: Path, rel: float, keys: tuple[str, ...] = KEYS) -> None:
    ours, theirs = metrics(here, *keys), metrics(there, *keys)
    assert len(ours) == len(theirs) >= STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert [each is None for each in one] == [each is None for each in other]
        for value, expected in zip(one, other, strict=True):
            assert value == expected or value == pytest.approx(expected, rel=rel, nan_ok=True), (one, other)


def same_training(here: Path, there: Path) -> None:
    """The same bits of what a step tells. Stages evaluate smaller batches: some CPUs have another kernel for them."""
    training = KEYS[:2]
    assert metrics(here, *training) == metrics(there, *training)
    close(here, there, 1e-6)


def close_muon(here: Path, there: Path) -> None:
    for key, rel in MUON.items():
        close(here, there, rel, (key,))


def tree(folder: Path) -> tuple[Any, Any]:
    """What ranks share, and rank 0's own, of the last checkpoint, as one rank without stages reads it."""
    store = CheckpointStore(folder / "checkpoints", group=RankGroup(), keep_last=9, attempt=99, read_only=True)
    newest = store.newest_valid()
    assert newest is not None
    assert newest.step == STEPS
    return store.load(newest)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in leaves(item, f"{path}.{name}").items()}
    if isinstance(value, (list, tuple)):
        return {key: leaf for index, item in enumerate(value) for key, leaf in leaves(item, f"{path}.{index}").items()}
    return {path: value}


def hold_near_tensors(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert list(here) == list(there), "the names of the whole model, in its order"
    for name, value in there.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(here[name], value, rtol=1e-3, atol=1e-5), name


@pytest.mark.long
def test_a_resnet_in_two_stages_has_the_bits_of_one_rank(played: Path) -> None:
    """Losses and norms; weights, their averages, momenta, batch norm's statistics."""
    same_training(played / "2" / "resnet", played / "1" / "resnet")
    here, there = (leaves(tree(played / which / "resnet")[0]) for which in ("2", "1"))
    assert sorted(here) == sorted(there)
    assert len(here) > 200
    for name, value in there.items():
        same = torch.equal(here[name], value) if isinstance(value, torch.Tensor) else here[name] == value
        assert same, name


def test_a_gpt_in_two_stages_has_the_curve_of_one_rank(played: Path) -> None:
    """Its first and its last stage share the embedding, whose gradients are added stage by stage: other last bits."""
    close(played / "2" / "gpt", played / "1" / "gpt", 1e-6)
    here, there = (leaves(tree(played / which / "gpt")[0]) for which in ("2", "1"))
    hold_near_tensors(here, there)
    for name, value in there.items():
        assert isinstance(value, torch.Tensor) or here[name] == value, name


@pytest.mark.long
def test_moments_in_host_memory_change_no_bit(played: Path) -> None:
    """Of losses and norms, and in the files of each stage: the same names with the same bytes."""
    assert metrics(played / "offload" / "gpt", *KEYS) == metrics(played / "2" / "gpt", *KEYS)
    plain, offloaded = (
        {path.name: path.read_bytes() for path in (played / which / "gpt").glob("checkpoints/step-*/*.safetensors")}
        for which in ("2", "offload")
    )
    assert len(plain) > 3
    assert plain == offloaded


@pytest.mark.long
def test_muon_in_two_stages_has_the_curve_of_one_rank(played: Path) -> None:
    """With the same groups of weights, whichever stage holds them."""
    close_muon(played / "2" / "muon", played / "1" / "muon")
    here, there = (leaves(tree(played / which / "muon")[0]) for which in ("2", "1"))
    assert list(here) == list(there), "the names of the whole model, in its order"
    momenta = [name for name in there if name.endswith("momentum_buffer")]
    assert len(momenta) == 2 * 4, "of two blocks: the first is AdamW's here"
    for name, value in there.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(here[name], value, rtol=1e-2, atol=1e-3), name
        else:
            assert here[name] == value, name


@pytest.mark.long
def test_an_overflow_in_one_stage_skips_the_step_in_all(played: Path) -> None:
    close(played / "2" / "fp16", played / "1" / "fp16", 2e-3, ("loss", "eval_loss"))
    here, there = (tree(played / which / "fp16")[0]["objects"]["scaler"] for which in ("2", "1"))
    assert here == there
    norms = [norm for _, norm in metrics(played / "1" / "fp16", "grad_norm") if norm is not None]
    assert not norms[0] < float("inf"), "no overflow: nothing was shown"
    assert norms[-1] < float("inf") or norms[-2] < float("inf")


@pytest.mark.long
def test_one_rank_then_two_stages_then_a_stop_of_the_last_stage(played: Path) -> None:
    same_training(played / "chain" / "resnet", played / "1" / "resnet")
    assert [record["step"] for record in journal_records(played / "chain" / "resnet", "resume")] == [0, 3, 5]


def test_each_stage_writes_what_it_holds_and_nothing_twice(played: Path) -> None:
    folder = next((played / "2" / "gpt" / "checkpoints").glob("step-*"))
    manifest = json.loads((folder / "manifest.json").read_text())
    writers = {name: [piece[0] for piece in entry["pieces"]] for name, entry in manifest["sharded"].items()}
    assert writers["objects.model.token_embedding.weight"] == [0]
    assert writers["objects.model.norm.weight"] == [1]
    assert writers["objects.optimizer.state.model.norm.weight.exp_avg"] == [1]
    assert all(len(ranks) == 1 for ranks in writers.values())
    (alone,) = (played / "1" / "gpt" / "checkpoints").glob("step-*/state.safetensors")
    shards = sum(path.stat().st_size for path in folder.glob("shard-*"))
    assert shards < 1.2 * alone.stat().st_size


@pytest.fixture(scope="module")
def divided(played: Path) -> Path:
    """Two stages whose layers two ranks share: the end of a run that one rank began."""
    well(play_jobs(played, 4, "divided", [job("chain/gpt", *THREE, attempt=1)]))
    return played


@pytest.mark.long
def test_stages_whose_layers_are_divided_have_the_curve_of_one_rank(divided: Path) -> None:
    """Losses, norms and evaluations; and one rank reads the checkpoint."""
    close(divided / "chain" / "gpt", divided / "1" / "gpt", 2e-6)
    hold_near_tensors(*(leaves(tree(divided / which / "gpt")[0]) for which in ("chain", "1")))


@pytest.mark.long
def test_neighbours_that_share_a_stage_s_layers_write_each_part_once(divided: Path) -> None:
    folder = divided / "chain" / "gpt" / "checkpoints" / f"step-{STEPS:08}"
    manifest = json.loads((folder / "manifest.json").read_text())
    writers = {name: [piece[0] for piece in entry["pieces"]] for name, entry in manifest["sharded"].items()}
    assert writers["objects.model.token_embedding.weight"] == [0, 1]
    assert writers["objects.model.norm.weight"] == [2], "of copies one is written"
    assert writers["objects.optimizer.state.model.blocks.2.mlp_in.weight.exp_avg"] == [2, 3]


def alike(folder: Path, *ranks: int) -> bool:
    """Whether random streams stand at one place, in a checkpoint."""
    first, *others = (load_file(folder / f"rank-{rank:03}.safetensors")["rng.torch"] for rank in ranks)
    return all(torch.equal(first, other) for other in others)


@pytest.mark.long
def test_three_dimensions(played: Path, tmp_path: Path) -> None:
    """Stages, data-parallel ranks, shared layers: copies and FSDP2, overflows, a stop in between, any mesh after it."""
    fsdp = ("parallel=fsdp", *THREE[1:])
    jobs = [job("ddp/gpt", *THREE), job("fsdp/gpt", *fsdp), job("fsdp/fp16", *fsdp), job("moved/gpt", *fsdp, stop_at=3)]
    jobs.append(job("dropout/gpt", *THREE, "model.dropout=0.2", "train.num_steps=2", "train.eval_every_steps=0"))
    well(play_jobs(tmp_path, 8, "eight", jobs))
    # Of half as many micro-batches a rank's gradient is twice as large, and overflows sooner: the measure has as many.
    jobs = [job("moved/gpt", *THREE, attempt=1, stop_at=5), job("divided/fp16", *THREE), job("halves/fp16", *THREE[:2])]
    well(play_jobs(tmp_path, 4, "four", jobs))
    well(play_jobs(tmp_path, 2, "two", [job("moved/gpt", "parallel=tp", attempt=2)]))
    (folder,) = (tmp_path / "dropout" / "gpt" / "checkpoints").glob("step-*")
    assert all(alike(folder, rank, rank + 1) for rank in range(0, 8, 2)), "they have drawn as many numbers"
    assert not any(alike(folder, rank, rank + 2) for rank in range(0, 6, 2))
    for name in ("ddp", "fsdp", "moved"):
        close(tmp_path / name / "gpt", played / "1" / "gpt", 2e-6)
    for one, other in ((tmp_path / "divided", played / "1"), (tmp_path / "fsdp", tmp_path / "halves")):
        close(one / "fp16", other / "fp16", 2e-3, ("loss", "eval_loss"))
        here, there = (tree(path / "fp16")[0]["objects"]["scaler"] for path in (one, other))
        assert here == there, "overflows skipped the same steps"


@pytest.mark.long
def test_stages_with_data_parallel_ranks(played: Path, tmp_path: Path) -> None:
    """DDP and FSDP2 among the ranks of a stage; then on one rank again."""
    jobs = [job(f"4/{name}", "parallel=pp") for name in ("gpt", "resnet")]
    jobs += [
        job("fsdp/gpt", "parallel=fsdp", "parallel.pipeline_parallel=2", "parallel.pipeline_schedule=gpipe"),
        job("four/gpt", "parallel=pp", "parallel.pipeline_parallel=4", "train.recompute=full"),
        job("back/gpt", "parallel=fsdp", "parallel.pipeline_parallel=2", stop_at=5),
    ]
    jobs[3]["words"].append("model.num_layers=4")
    well(play_jobs(tmp_path, 4, "four", jobs))
    layers = {**job("deep/gpt"), "words": [*MODELS["gpt"], "model.num_layers=4"]}
    well(play_jobs(tmp_path, 1, "one", [job("back/gpt", attempt=1), layers]))
    close(tmp_path / "4" / "gpt", played / "1" / "gpt", 1e-6)
    # Batch norm over two samples makes much of last bits: what two ranks of plain DDP make of them is the measure.
    # Evaluations differ: which rank's running statistics count, and when, is another matter there.
    well(play_jobs(tmp_path, 2, "ddp", [job("ddp/resnet")]))
    assert metrics(tmp_path / "4" / "resnet", "loss") == metrics(tmp_path / "ddp" / "resnet", "loss")
    close(tmp_path / "fsdp" / "gpt", played / "1" / "gpt", 1e-6)
    close(tmp_path / "back" / "gpt", played / "1" / "gpt", 1e-6)
    close(tmp_path / "four" / "gpt", tmp_path / "deep" / "gpt", 1e-6)


@pytest.mark.long
def test_muon_in_stages_with_more_ranks(played: Path, tmp_path: Path) -> None:
    """Copies, parts, shared layers; a stage may have no matrix of Muon's; one rank goes on from it."""
    fsdp = ("parallel=fsdp", "parallel.pipeline_parallel=2")
    bare = ("optim.adamw_weights=[blocks.0.*,blocks.1.*]",)
    jobs = [job("ddp/muon", "parallel=pp"), job("fsdp/muon", *fsdp), job("tp/muon", *THREE)]
    jobs.append(job("back/muon", *fsdp, stop_at=5))
    well(play_jobs(tmp_path, 4, "four", jobs))
    jobs = [job("all/muon", *fsdp, *THREE[2:]), job("bare/muon", *fsdp, *THREE[2:], *bare)]
    well(play_jobs(tmp_path, 8, "eight", jobs))
    well(play_jobs(tmp_path, 1, "one", [job("back/muon", attempt=1), job("alone/muon", *bare)]))
    for name in ("ddp", "fsdp", "tp", "back", "all"):
        close_muon(tmp_path / name / "muon", played / "1" / "muon")
    close_muon(tmp_path / "bare" / "muon", tmp_path / "alone" / "muon")


@pytest.mark.long
def test_stages_whose_weights_are_gathered_in_bf16(tmp_path: Path) -> None:
    """What goes from stage to stage is bf16 then; beside fp32 messages, losses alone are near."""
    fsdp = ("parallel=fsdp", "parallel.pipeline_parallel=2", "precision=bf16")
    low = ("parallel.param_dtype=bf16", "parallel.reduce_dtype=bf16")
    well(play_jobs(tmp_path, 4, "four", [job("fp32/gpt", *fsdp), job("bf16/gpt", *fsdp, *low)]))
    close(tmp_path / "bf16" / "gpt", tmp_path / "fp32" / "gpt", 2e-3, ("loss", "eval_loss"))
    assert metrics(tmp_path / "bf16" / "gpt", "loss") != metrics(tmp_path / "fp32" / "gpt", "loss")


@pytest.mark.long
def test_compiled_stages_have_the_curve_of_one_rank(played: Path, tmp_path: Path) -> None:
    compiled = ("train.compile=true", "train.compile_scope=blocks")
    well(play_jobs(tmp_path, 2, "two", [job("2/gpt", "parallel=pp", *compiled, "train.recompute=full")]))
    close(tmp_path / "2" / "gpt", played / "1" / "gpt", 2e-6)


@pytest.mark.long
def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    words = [*BASE, "parallel=pp", "model=custom", "model._target_=tests.unit.features.pipeline.breaking.Breaking",
             "data=synthetic_images", "data.num_samples=100", "data.num_eval=30", "data.image_size=8"]  # fmt: skip
    broken = {"name": "broken/model", "words": words, "attempt": 0, "stop_at": None}
    (first, second) = play_jobs(tmp_path, 2, "broken", [broken])
    assert second[0] not in (0, None)
    assert "ZeroDivisionError: at step 3" in second[1].splitlines()[-1], second[1][-2000:]
    assert first[0] not in (0, None), "it waits for the other stage"
