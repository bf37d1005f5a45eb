"""The estimate without memory is what the same step holds with it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.memory.estimate import MemoryEstimate, estimate
from hpc_trainer.features.offload import offload
from hpc_trainer.features.offload.offload import PIECE
from hpc_trainer.features.pipeline.cut import Between, keep, stages_of
from hpc_trainer.features.pipeline.step import run_parts
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.step import autocast
from tests import warm
from tests.composed import composed
from tests.unit.training.built_parts import optimizer_of
from tests.unit.training.train_here import train_here

_GPT = ["data=text_bytes", "data.seq_len=64", "model=gpt", "train.global_batch_size=8", "precision=bf16"]
_RESNET = ["data=synthetic_images", "model=resnet18", "model.width=8", "train.global_batch_size=16"]


def _config(words: list[str]) -> TrainConfig:
    config = composed(["experiment=digits", "cluster=local", *words])
    validate(config)
    return config


def _really(config: TrainConfig) -> dict[str, int]:
    """The same step on real tensors: bytes of weights and of moments. Of activations: test_memory_peak.py."""
    dataset = build_dataset(config, "train", build_task(config))
    model = build_model(config, dataset)
    loss, optimizer = VotingLoss(model, CrossEntropy()), optimizer_of(config.optim, model)
    inputs, targets = dataset.__getitems__(range(config.train.global_batch_size))
    with autocast(config.precision, "cpu"):
        value = loss((inputs, targets))
    value.backward()
    optimizer.step()
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    buffers = sum(each.numel() * each.element_size() for each in model.buffers())
    moments = [each for state in optimizer.state.values() for each in state.values()]
    return {
        "weights": weights + buffers,
        "gradients": weights,
        "optimizer": sum(each.numel() * each.element_size() for each in moments if isinstance(each, torch.Tensor)),
    }


@pytest.mark.long
def test_a_chunked_loss_saves_the_logits() -> None:
    """Of 8 x 64 tokens and 256 classes: logits in bf16 and log-probabilities in fp32, of all tokens or of 32."""
    all_at_once, chunked = (estimate(_config([*_GPT, f"train.loss_chunk_size={size}"])) for size in ("null", 32))
    logits = 8 * 64 * 256 * (2 + 4)
    saved = all_at_once.activations - chunked.activations
    assert 0.5 * logits < saved < 1.1 * logits
    assert dataclasses.replace(chunked, activations=0) == dataclasses.replace(all_at_once, activations=0)


@pytest.mark.parametrize("words", [_GPT, _RESNET, ["model=cnn"]], ids=["gpt", "resnet", "cnn"])
def test_it_is_what_the_step_holds(words: list[str]) -> None:
    config = _config(words)
    found, real = dataclasses.asdict(estimate(config)), _really(config)
    for name in ("weights", "gradients", "optimizer"):
        assert found[name] == real[name], name


@pytest.mark.long
def test_adapters_are_estimated_as_they_are_trained(tmp_path: Path) -> None:
    """The checkpoint has the adapters alone; measured of a run."""
    pytest.importorskip("peft")
    words = [*_GPT, "data.eval_fraction=0.01", "train.lora.rank=8", "train.num_steps=1", "schedule.warmup_steps=0"]
    config = _config(words)
    found, run = estimate(config), train_here(config, tmp_path)
    saved = sum(path.stat().st_size for path in run.paths.checkpoints.rglob("*.safetensors"))
    assert found.checkpoint == pytest.approx(saved, rel=0.1), "their headers"
    base = sum(each.nbytes for each in _built(config).parameters())
    assert found.weights == base + found.gradients
    assert found.optimizer == pytest.approx(2 * found.gradients, rel=0.01)
    assert found.checkpoint == found.gradients + found.optimizer < base / 2


def _built(config: TrainConfig) -> torch.nn.Module:
    return build_model(config, build_dataset(config, "train", build_task(config)))


def test_recomputing_needs_less() -> None:
    sizes = [
        estimate(_config([*_GPT, "model.num_layers=8", f"train.recompute={mode}"])).activations
        for mode in ("none", "selective", "full")
    ]
    assert sizes[0] > 1.3 * sizes[1] > 1.3 * sizes[2], sizes


def _of_four(*words: str) -> MemoryEstimate:
    return estimate(_config([*_GPT, "hardware.tasks_per_node=4", *words]))


def test_ranks_share() -> None:
    ddp, zero1, fsdp = _of_four(), _of_four("parallel.zero1=true"), _of_four("parallel=fsdp")
    assert (zero1.weights, zero1.gradients) == (ddp.weights, ddp.gradients)
    assert zero1.optimizer == ddp.optimizer // 4 == fsdp.optimizer
    assert (fsdp.weights, fsdp.gradients) == (ddp.weights // 4, ddp.gradients // 4)
    assert 0 == ddp.gathered < fsdp.gathered < ddp.weights
    assert ddp.checkpoint == zero1.checkpoint == fsdp.checkpoint


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words",
    [
        [], ["parallel=fsdp"], ["parallel=hsdp"], ["parallel=tp"], ["parallel=fsdp_tp"],
        ["parallel=pp", "train.grad_accum_steps=2"],
        ["parallel=fsdp", "parallel.pipeline_parallel=2", "train.grad_accum_steps=2"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_averages_are_divided_as_the_weights_are(words: list[str]) -> None:
    plain, averaged = _of_four(*words), _of_four(*words, "train.ema_decay=0.9")
    assert (plain.average, averaged.average) == (0, plain.weights)
    assert averaged.weights == plain.weights
    assert averaged.checkpoint == plain.checkpoint + _of_four().weights


@pytest.mark.long
def test_what_fsdp_gathers_and_reduces() -> None:
    """Half the bytes in bf16; all weights where they stay whole; micro-batches are added up in `reduce_dtype`."""
    words = ["parallel=fsdp", "model.num_layers=4", "precision=bf16"]
    fp32, bf16 = _of_four(*words), _of_four(*words, "parallel.param_dtype=bf16")
    assert bf16.gathered == fp32.gathered // 2
    changed = dataclasses.replace(fp32, gathered=bf16.gathered, activations=bf16.activations)
    assert bf16 == changed, "parts, moments and checkpoint stay fp32"
    assert 0.4 * fp32.activations < bf16.activations < 0.9 * fp32.activations, "no copies of weights, a narrow stream"
    kept = _of_four(*words, "parallel.reshard_after_forward=false")
    assert kept == dataclasses.replace(fp32, gathered=4 * fp32.weights)
    added = [*words, "train.grad_accum_steps=2", "train.micro_batch_size=1", "train.global_batch_size=8"]
    whole, narrow = _of_four(*added), _of_four(*added, "parallel.reduce_dtype=bf16")
    assert narrow == dataclasses.replace(whole, gradients=whole.gradients // 2)


def test_hsdp_keeps_a_copy_in_each_group() -> None:
    fsdp, hsdp = _of_four("parallel=fsdp"), _of_four("parallel=hsdp")
    assert (hsdp.weights, hsdp.optimizer) == (2 * fsdp.weights, 2 * fsdp.optimizer)
    assert (hsdp.gathered, hsdp.checkpoint) == (fsdp.gathered, fsdp.checkpoint)


def test_tensor_parallel_divides_layers_and_what_they_keep() -> None:
    """Each figure beside those of a model that really is half as wide where the plan divides it."""
    words = ["train.micro_batch_size=4", "model.embed_dim=64", "model.num_layers=2"]
    ddp, tp = _of_four(*words, "train.global_batch_size=16"), _of_four(*words, "parallel=tp")
    dim, blocks = 64, 2
    copied = 4 * (64 * dim + blocks * (4 * dim + 2 * dim) + 2 * dim)  # positions, norms, biases after the sum
    assert tp.weights == (ddp.weights - copied) // 2 + copied == tp.gradients
    assert tp.optimizer == pytest.approx(2 * tp.weights, rel=0.01)
    assert tp.checkpoint == ddp.checkpoint
    assert 0.4 * ddp.activations < tp.activations < 0.95 * ddp.activations
    both = _of_four(*words, "parallel=fsdp_tp")
    assert both.weights == tp.weights // 2
    assert 0 < both.gathered <= tp.weights


@pytest.mark.long
def test_what_ranks_keep_for_what_they_send() -> None:
    ddp, bf16 = _of_four(), _of_four("parallel.comm_hook=bf16")
    assert (ddp.communication, bf16.communication) == (0, ddp.gradients // 2)
    powersgd = _of_four("parallel.comm_hook=powersgd")
    assert powersgd.communication == ddp.gradients
    assert powersgd.checkpoint == ddp.checkpoint + 4 * ddp.gradients, "each rank's errors"
    local = _of_four("parallel=post_local_sgd", "train.eval_every_steps=0")
    assert local.communication == 0
    assert local.checkpoint == ddp.checkpoint + 4 * ddp.weights + 3 * ddp.optimizer, "each rank's weights and moments"
    diloco = _of_four("parallel=diloco", "parallel.sync_every_steps=50")
    assert diloco.communication == 2 * ddp.weights
    assert diloco.checkpoint == local.checkpoint + diloco.communication


@pytest.mark.long
def test_what_muon_makes_for_its_step() -> None:
    """A copy of the matrices in case the step is skipped, messages of half of that, and the largest while it turns."""
    words = ["optim=muon", "model.num_layers=8", "model.num_heads=8", "model.embed_dim=512", "data.seq_len=16"]
    words += ["precision=fp32", "hardware.tasks_per_node=4", "train.global_batch_size=4"]
    found = {
        name: estimate(_config([*_GPT, *words, *more]))
        for name, more in {
            "ddp": ["parallel=ddp"], "zero1": ["parallel.zero1=true"], "fsdp": ["parallel=fsdp"],
            "hsdp": ["parallel=hsdp"], "tp": ["parallel=tp", "parallel.tensor_parallel=4"],
            "always": ["parallel=ddp", "train.max_skipped_steps=null"],
        }.items()
    }  # fmt: skip
    matrices = 8 * 4 * 12 * 512**2
    largest = 2 * (3 * 4 * 512**2 + 2 * 512**2)

    def made(name: str) -> int:
        assert found[name].update > 0
        return found[name].update + found[name].activations + found[name].gathered

    assert made("ddp") == matrices + largest
    assert found["always"].update == max(0, largest - found["always"].activations)
    assert made("zero1") == matrices // 4 + largest
    assert made("fsdp") == made("tp") == 2 * matrices // 4 + largest
    assert made("hsdp") == 2 * matrices // 2 + largest
    stage = estimate(_config([*_GPT, *words, "parallel=pp", "hardware.tasks_per_node=2", "train.grad_accum_steps=2"]))
    assert stage.update + stage.activations == matrices // 2 + largest
    adamw = estimate(_config([*_GPT, *words[1:], "parallel=fsdp"]))
    assert adamw.update == 0
    assert found["fsdp"].optimizer == pytest.approx(adamw.optimizer - matrices // 4, rel=1e-4), "one moment, not two"


@pytest.mark.long
def test_where_the_optimizer_works() -> None:
    large = ["model.num_layers=12", "model.num_heads=16", "model.embed_dim=1024"]
    plain, offloaded = _of_four(*large), _of_four(*large, "optim.offload=true")
    assert (plain.host, offloaded.host) == (0, plain.optimizer)
    assert (offloaded.optimizer, offloaded.update) == (0, 0)
    assert offloaded.activations > 2 * PIECE, "the moments of one piece come when these are freed"
    words = ["optim.in_backward=true", "train.max_grad_norm=null", "train.max_skipped_steps=null"]
    alone = estimate(_config([*_GPT, *large, *words]))
    assert alone.gradients == 4 * 4 * 1024 * 1024, "the largest weight's"
    fsdp = _of_four(*large, *words, "parallel=fsdp")
    assert alone.gradients < fsdp.gradients < plain.gradients / 8


@pytest.mark.long
def test_a_large_model_takes_no_memory() -> None:
    """6.7 billion weights, 27 GB of them: more than this machine has."""
    words = ["model.num_layers=32", "model.num_heads=32", "model.embed_dim=4096", "data.seq_len=128"]
    found = estimate(_config([*_GPT, *words]))
    assert found.weights == pytest.approx(25.8e9, rel=0.01)
    assert found.optimizer == pytest.approx(2 * found.weights, rel=0.01)


@pytest.mark.long
def test_the_checkpoint_is_as_large_as_it_says(tmp_path: Path) -> None:
    words = ["experiment=digits", "model=cnn", "cluster=local", "train.num_steps=20", "train.ema_decay=0.9"]
    argv = [sys.executable, "-m", "hpc_trainer", "train", *words, f"paths.runs_dir={tmp_path}"]
    done = warm.run(argv, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("*/*/checkpoints/step-*")
    size = sum(each.stat().st_size for each in folder.iterdir())
    missing = size - estimate(_config(words[1:])).checkpoint  # names, structure, checksums, random states
    assert 0 < missing < 50_000


def _stage_really(config: TrainConfig, index: int) -> tuple[int, int]:
    """(bytes of a stage's weights and buffers, what autograd keeps of one of its micro-batches, in real memory)."""
    dataset = build_dataset(config, "train", build_task(config))
    model = build_model(config, dataset)
    assert config.train.micro_batch_size is not None
    inputs, targets = dataset.__getitems__(range(config.train.micro_batch_size))
    stages = stages_of(
        model, config.parallel.pipeline_parallel, inputs=Between(tuple(inputs.shape), inputs.dtype),
        precision=config.precision, device_type="cpu",
    )  # fmt: skip
    keep(model, stages[index])
    run_parts(model, stages[index], config.precision, channels_last=False)
    value = inputs if index == 0 else torch.randn(stages[index].inputs.shape, requires_grad=True)
    own = {each.data_ptr() for each in [*model.parameters(), *model.buffers(), value, targets]}
    kept: dict[int, torch.Tensor] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda each: each):
        outputs = model(value)
        if stages[index].is_last:
            with autocast(config.precision, "cpu"):
                outputs = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    state = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    return state, sum(each.untyped_storage().nbytes() for each in kept.values())


@pytest.mark.long
def test_of_a_pipeline_the_largest_stage_counts() -> None:
    words = ["hardware.tasks_per_node=4", "parallel=pp", "train.grad_accum_steps=2"]
    gpipe = estimate(_config([*_GPT, *words, "parallel.pipeline_schedule=gpipe"]))
    found = estimate(_config([*_GPT, *words]))
    states, kept = zip(*(_stage_really(_config([*_GPT, *words]), index) for index in range(2)), strict=True)
    # Two micro-batches of two samples; between stages [2, 64, 128] in fp32.
    between, handed = 2 * 64 * 128 * 4, 2 * 64 * 8
    totals = [
        (states[0] + kept[0] * 2 + 2 * (between + handed), states[0], kept[0] * 2),
        (states[1] + kept[1] * 1 + 2 * (between + handed), states[1], kept[1] * 1),
    ]
    largest = max(range(2), key=lambda index: totals[index][0] + 3 * states[index])
    assert found.weights == states[largest]
    held = totals[largest][2] + 2 * (between + handed)
    assert held < found.activations < 1.2 * held, "and what the backward pass of one micro-batch makes"
    assert found.note == f"stage {largest} of 0 to 1 needs most"
    assert gpipe.activations >= found.activations
    whole = estimate(_config([*_GPT, "hardware.tasks_per_node=2"]))
    assert found.weights < whole.weights
    assert found.checkpoint == pytest.approx(whole.checkpoint, rel=0.01)


@pytest.mark.long
def test_of_a_stage_whose_layers_are_divided() -> None:
    """Beside the same stage with whole layers; its neighbours hold the rest of what the checkpoint has."""
    words = [*_GPT, "parallel=pp", "train.micro_batch_size=2", "train.grad_accum_steps=2", "model.num_layers=4"]
    pp = estimate(_config([*words, "hardware.tasks_per_node=2", "train.global_batch_size=4"]))
    words.append("parallel.tensor_parallel=2")
    three = estimate(_config([*words, "hardware.tasks_per_node=4", "train.global_batch_size=4"]))
    assert three.note == pp.note
    assert 0.5 * pp.weights < three.weights == three.gradients < 0.53 * pp.weights, "norms and some biases are copied"
    assert three.optimizer == pytest.approx(2 * three.weights, rel=0.01)
    assert 0.3 * pp.activations < three.activations < 0.95 * pp.activations
    assert three.checkpoint == pytest.approx(pp.checkpoint, rel=1e-3)
    words.append("parallel.strategy=fsdp")
    fsdp = estimate(_config([*words, "hardware.tasks_per_node=8", "train.global_batch_size=8"]))
    assert (fsdp.weights, fsdp.gathered) == (three.weights // 2, three.weights)


_WIDE = 4 * 128 * 512  # bytes of a perceptron's matrix, the largest weight


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "largest"),
    [
        (["parallel.zero1=true"], _WIDE),
        (["parallel=fsdp"], _WIDE // 4),
        (["parallel=tp"], _WIDE // 2),
        (["parallel=fsdp_tp"], _WIDE // 4),
        (["parallel=pp", "train.grad_accum_steps=2"], _WIDE),
        (["parallel=fsdp", "parallel.pipeline_parallel=2", "train.grad_accum_steps=2"], _WIDE // 2),
    ],
)
def test_a_rank_keeps_its_own_moments_in_host_memory(
    words: list[str], largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PIECE", 1)
    plain, offloaded = _of_four(*words), _of_four(*words, "optim.offload=true")
    assert (plain.host, offloaded.host) == (0, plain.optimizer)
    # A step brings two moments of the largest weight, when activations are freed: these are larger here.
    assert offloaded.optimizer == 0
    assert offloaded.update == max(0, 2 * largest - offloaded.activations - offloaded.gathered) == 0
    assert dataclasses.replace(offloaded, optimizer=plain.optimizer, host=0) == plain


def test_moments_that_a_step_brings_count_as_far_as_they_exceed_the_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "PIECE", 1)
    hidden = 2048
    words = ["model=mlp", f"model.hidden_dim={hidden}", "train.global_batch_size=1", "optim.offload=true"]
    found = estimate(_config(words))
    assert found.optimizer == 0
    assert found.update == pytest.approx(2 * 4 * hidden**2 - found.activations, rel=0.01)


_RADAM = ["optim=custom", "optim._target_=torch.optim.RAdam"]
_GPUS = ["cluster=slurm", "hardware.gpus_per_node=4"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "is_put_back"),
    [
        ([*_RADAM], True),
        ([*_RADAM, "train.max_skipped_steps=null"], False),
        ([*_RADAM, "precision=fp16"], False),  # the loss scaler asks
        ([*_RADAM, "precision=fp16", "train.guard.on_spike=skip"], True),
        ([*_RADAM, "parallel.zero1=true"], False),
        ([*_RADAM, "parallel=fsdp", "model.num_layers=12", "precision=fp32"], True),
        ([*_RADAM, "parallel=pp", "train.grad_accum_steps=2"], True),
        ([*_RADAM, "cluster=local", "hardware.gpus_per_node=0"], False),  # a CPU's host looks first
        ([*_RADAM, "+optim.kwargs.fused=true", "optim._target_=torch.optim.Adam"], False),
        (["optim=adamw"], False),
    ],
)
def test_copies_that_a_step_may_be_put_back_by(
    words: list[str], is_put_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and both moments again, beside what the step itself makes, in the place of activations."""
    small = ["data.seq_len=8", "train.global_batch_size=8", "train.max_grad_norm=null", "model.num_layers=4"]
    found = _of_four(*_GPUS, *small, *words)
    large = _of_four(*_GPUS, *small, *words, "data.seq_len=1024")
    assert large.update <= found.update
    monkeypatch.setattr("hpc_trainer.features.custom_optim.custom_optim.is_put_back", lambda optimizer: False)
    copied = found.update - _of_four(*_GPUS, *small, *words).update
    state = found.weights + found.optimizer
    assert 0.8 * state < copied < 1.02 * state if is_put_back else copied == 0, "in part in the place of activations"


@pytest.mark.long
def test_an_optimizer_that_takes_all_weights_at_a_time_on_a_gpu() -> None:
    """torch's foreach steps make lists of temporaries as large as the weights; one weight after the other on a CPU."""
    small = ["data.seq_len=8", "train.global_batch_size=8", "train.max_skipped_steps=null", "model.num_layers=4"]
    on_gpu, on_cpu = (_of_four(*more, *small, *_RADAM) for more in (_GPUS, ["cluster=local"]))
    assert on_cpu.update == 0
    assert on_gpu.update + on_gpu.activations > 0.9 * on_gpu.weights
