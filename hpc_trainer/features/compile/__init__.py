"""`train.compile`: the step compiled by torch.compile, with the code cached for the sweep's other runs."""

from collections.abc import Iterator

from hpc_trainer.config.mesh import accum_steps
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.schema.train import CompileMode, TrainConfig
from hpc_trainer.config.table.feature import Feature, Row, models


def _problems(config: TrainConfig) -> Iterator[str]:
    train = config.train
    accum = 1 if train.is_batch_auto else accum_steps(train, config.hardware, config.parallel)
    if train.compile_mode is not CompileMode.default and accum > 1:
        mode = f"train.compile_mode={train.compile_mode.value}"
        ways = f"{_WHOLE}, or train.compile_mode=default"
        yield f"{mode} {_GRAPHS}: train.grad_accum_steps={accum} must be 1. Use {ways}."


# Accumulated gradients are wrong there without an error (pytorch issue 96693), or fail with one (169545).
_WHOLE = "train.grad_accum_steps=1 train.micro_batch_size=null"
_GRAPHS = "captures CUDA graphs, whose results the next forward pass overwrites"

FEATURE = Feature(
    on="train.compile",
    example="train.compile=true",
    excludes=(
        Row("optim.in_backward", "the compiled pass makes all gradients at once"),
        Row("hardware.device=mps", "torch's compiler is for CUDA and CPUs"),
        Row("hardware.device=xla", "XLA compiles each step by itself"),
        Row(
            "model=resnet & model.width<8 & hardware.device_type=cpu",
            "the compiler chooses NHWC, and so few channels in it crash there (oneDNN in torch 2.13)",
            use="model.width=8",
        ),
        Row(
            models(without=[Trait.blocks]),
            "it compiles blocks, and the model has none",
            when="train.compile_scope=blocks",
            use="train.compile_scope=model, or another model",
        ),
        Row(
            "hardware.device_type=cpu",
            "it is for GPUs",
            when="train.compile_mode!=default",
            use="train.compile_mode=default",
        ),
        Row(
            "train.micro_batch_size=auto",
            f"it {_GRAPHS}, and there may be several in a step",
            when="train.compile_mode!=default",
            use="train.compile_mode=default, or a number",
        ),
    ),
    problems=_problems,
)
