"""The losses of a run on the GPU, beside those of a loop by hand and of the same run on the CPU."""

from __future__ import annotations

import pytest
import torch

from hpc_trainer.tasks.cross_entropy import CrossEntropy
from tests.gpu.runs import DEVICE, ON_GPU, Figures, Runs, by_hand

_STEPS = 30
_MODELS = {
    "digits": ("experiment=digits", "model.dropout=0"),
    "gpt_bytes": ("experiment=gpt_bytes",),
    "resnet18": ("experiment=resnet_synthetic",),
}
# Steps that are compared. In a ResNet with batch norm and SGD differences of rounding grow with each step.
_COMPARED = {"digits": _STEPS, "gpt_bytes": _STEPS, "resnet18": 8}
# Bounds of the relative difference of the loss at the worst of these steps: beside the loop by hand, and beside the CPU
# in fp32.
_TOLERANCE = {"fp32": (1e-5, 1e-3), "tf32": (1e-3, 2e-2), "bf16": (2e-2, 5e-2), "fp16": (5e-3, 5e-2)}


def _far(ours: list[float], other: list[float], steps: int = _STEPS) -> float:
    assert len(ours) == len(other) == _STEPS
    return max(abs(one - two) / abs(two) for one, two in zip(ours[:steps], other[:steps], strict=True))


@pytest.mark.parametrize("precision", _TOLERANCE)
@pytest.mark.parametrize("model", _MODELS)
def test_losses_are_those_of_a_loop_by_hand_and_of_the_cpu(
    model: str, precision: str, runs: Runs, figures: Figures
) -> None:
    words = (
        *_MODELS[model], f"train.num_steps={_STEPS}", "monitor.log_every_steps=1", "schedule.warmup_steps=5",
        "train.eval_every_steps=0", "checkpoint.every_steps=1000",
    )  # fmt: skip
    if DEVICE.type == "cpu" and precision == "tf32":
        pytest.skip("a CPU has no TF32")
    # With the default scale of 65536 the first steps in fp16 overflow and are skipped, so the run lags behind fp32.
    scale = ("precision.init_scale=1024",) if precision == "fp16" else ()
    ours = runs.train(*words, f"precision={precision}", *scale)
    twin = by_hand(ours.config, DEVICE)
    beside_twin = _far(ours.losses, twin, _COMPARED[model])
    cpu = runs.train(*words, "precision=fp32", hardware="cpu_x1")
    beside_cpu = _far(ours.losses, cpu.losses, _COMPARED[model])
    figures.tell(
        f"{model} {precision}", by_hand=beside_twin, cpu_in_fp32=beside_cpu, ours=ours.losses, twin=twin,
        cpu=cpu.losses,
    )  # fmt: skip
    to_twin, to_cpu = _TOLERANCE[precision]
    assert beside_twin <= to_twin
    assert beside_cpu <= to_cpu


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_16_bit_logits_is_computed_in_fp32(dtype: torch.dtype) -> None:
    logits = 4 * torch.randn(512, 1000, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 1000, (512,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ours = logits.to(DEVICE, dtype).requires_grad_()
    exact = ours.detach().double().requires_grad_()
    with torch.autocast(DEVICE.type, dtype=dtype):
        CrossEntropy().loss_of(ours, targets).backward()
        (loss, *_) = CrossEntropy().sums_of(ours, targets)
    torch.nn.functional.cross_entropy(exact, targets).backward()
    assert ours.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=1e-7)
    wanted = torch.nn.functional.cross_entropy(exact, targets, reduction="sum")
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


@ON_GPU
def test_fp8_trains_near_bf16(runs: Runs, figures: Figures) -> None:
    pytest.importorskip("torchao")
    words = (
        "experiment=gpt_bytes", "model.embed_dim=128", f"train.num_steps={_STEPS}", "monitor.log_every_steps=1",
        "schedule.warmup_steps=5", "train.eval_every_steps=0",
    )  # fmt: skip
    far = _far(runs.train(*words, "precision=fp8").losses, runs.train(*words, "precision=bf16").losses)
    figures.tell("fp8 beside bf16", far=far)
    assert far <= 0.1


@ON_GPU
@pytest.mark.parametrize(
    "change",
    [
        "train.compile=true", "train.compile=true train.compile_mode=reduce_overhead", "train.channels_last=true",
        "train.deterministic=false", "train.recompute=full", "optim.offload=true", "optim.in_backward=true",
    ],
)  # fmt: skip
def test_what_makes_a_step_faster_or_smaller_leaves_the_losses(change: str, runs: Runs, figures: Figures) -> None:
    """In fp32 within 1e-4 of the plain run at the worst of 30 steps."""
    is_picture = "channels_last" in change
    words: tuple[str, ...] = (
        "experiment=resnet_synthetic" if is_picture else "experiment=gpt_bytes", "optim=adamw", "precision=fp32",
        f"train.num_steps={_STEPS}", "monitor.log_every_steps=1", "schedule.warmup_steps=5",
        "train.eval_every_steps=0",
    )  # fmt: skip
    if "in_backward" in change:
        words += ("train.max_grad_norm=null", "train.max_skipped_steps=null")
    plain = runs.train(*words)
    other = runs.train(*words, *change.split())
    far = _far(other.losses, plain.losses)
    figures.tell(change, far=far)
    assert torch.isfinite(torch.tensor(other.losses)).all()
    assert far <= 1e-4
