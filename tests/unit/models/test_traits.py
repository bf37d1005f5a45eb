"""What each model of ours declares for `plan` is what the module that is built of it shows (docs/contributing.md)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.parts import blocks
from tests.composed import composed

CONF = Path(__file__).parents[3] / "conf" / "model"
OURS = sorted({path.stem for path in CONF.glob("*.yaml")} - {"custom", "hf"})
"""Of the two others a person's code, or a folder, knows."""
_SHAPES: dict[Trait | None, tuple[int, ...]] = {Trait.reads_images: (3, 32, 32), Trait.reads_tokens: (16,), None: (5,)}
"""None: rows of numbers."""
_METHODS = (Trait.channel_groups, Trait.pipeline_parts, Trait.tensor_parallel_plan)


def _built(config: Any, reads: Trait | None) -> nn.Module:
    """Without weights."""
    module, _, name = config._target_.rpartition(".")
    with torch.device("meta"):
        model: nn.Module = getattr(importlib.import_module(module), name)(
            config, input_shape=_SHAPES[reads], num_classes=7
        )
    return model


def _readable(config: Any) -> list[Trait | None]:
    """The inputs of which logits come."""
    found = []
    for reads, shape in _SHAPES.items():
        dtype = torch.int64 if reads is Trait.reads_tokens else torch.float32
        try:
            _built(config, reads).eval()(torch.empty(2, *shape, dtype=dtype, device="meta"))
        except (ConfigError, RuntimeError):
            continue
        found.append(reads)
    return found


def _seen(config: Any) -> set[Trait]:
    """What the module shows."""
    readable = _readable(config)
    model = _built(config, readable[0])
    layers = [*blocks(model)]
    shown = {
        Trait.blocks: layers,
        Trait.block_matrices: [each for layer in layers for each in layer.modules() if isinstance(each, nn.Linear)],
        Trait.convolutions: [each for each in model.modules() if isinstance(each, _ConvNd)],
        Trait.batch_norm: [each for each in model.modules() if isinstance(each, _BatchNorm)],
        **{trait: hasattr(model, trait.value) for trait in _METHODS},
    }
    alone = readable if len(readable) == 1 else []
    return {each for each in alone if each} | {trait for trait, is_there in shown.items() if is_there}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", OURS)
def test_a_model_declares_what_it_is(name: str) -> None:
    config: Any = composed([f"model={name}"]).model
    assert config.traits is not None, f"give {type(config).__name__} its `traits` (config/schema/model.py)"
    seen = _seen(config)
    wrong = {
        "lacks": sorted(each.value for each in seen - config.traits),
        "has too much": sorted(each.value for each in config.traits - seen),
    }
    assert not any(wrong.values()), f"{type(config).__name__}.traits: {wrong}"


@pytest.mark.few(4)
@pytest.mark.parametrize("name", OURS)
def test_a_model_has_as_many_blocks_as_it_says(name: str) -> None:
    """A new one with blocks has a property `num_blocks`."""
    config: Any = composed([f"model={name}"]).model
    found = len([*blocks(_built(config, _readable(config)[0]))]) or None
    assert config.num_blocks == found, f"{type(config).__name__}.num_blocks"


def test_each_kind_but_two_is_looked_at() -> None:
    kinds = {type(composed([f"model={name}"]).model) for name in OURS}
    assert {name for name, kind in VARIANTS["model"].items() if kind not in kinds} == {"custom", "hf"}
