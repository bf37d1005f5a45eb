"""Parts of a model for pipeline parallelism: the pieces of its forward pass, which run one after the other.

A model declares them in a method `pipeline_parts() -> list[Part]`; an `nn.Sequential` needs none: its items are the
parts. `forward(inputs)` must be the same as all parts in order: the first takes `inputs`, and each next one takes the
output of the part before:

    class Tower(nn.Module):
        def __init__(self, input_shape, num_classes):
            super().__init__()
            self.stem, self.norm = nn.Linear(input_shape[0], 64), nn.LayerNorm(64)
            self.head = nn.Linear(64, num_classes)
            self.blocks = nn.ModuleList(Block(64) for _ in range(8))

        def pipeline_parts(self):
            return [Part("stem"), *(Part(f"blocks.{index}") for index in range(8)), Part("classify", ("norm", "head"))]

        def classify(self, hidden):
            return self.head(self.norm(hidden))

Parts are names, not functions, so that a copy of the model runs its own modules. One tensor of floating-point numbers
goes from part to part; its first dimension is the batch. A part must not change its input in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hpc_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a model's forward pass.

    Args:
        name: a module of the model, such as `blocks.3`, or a method of it that takes one tensor and returns one.
        uses: names of modules, parameters and buffers of the model that a method needs; () means the module itself.
            Two parts may use the same one: it is then in both stages, and its gradients are added up.
    """

    name: str
    uses: tuple[str, ...] = ()

    def of(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the module or method of `model` that this part runs. Raises AttributeError if there is none."""
        member: Callable[[Tensor], Tensor] = operator.attrgetter(self.name)(model)
        return member

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the modules, parameters and buffers that the part needs."""
        return self.uses or (self.name,)


def parts_of(model: nn.Module) -> Sequence[Part]:
    """Return the parts of `model`, in the order in which they run.

    Raises:
        ConfigError: the model does not declare parts, or declares names that it does not have.
    """
    kind = type(model).__name__
    method = getattr(model, "pipeline_parts", None)
    if method is None and not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"parallel.pipeline_parallel cuts a model into stages, and {kind} does not say how. Use model=gpt, "
            "vit_tiny or resnet18, an nn.Sequential, or write a method pipeline_parts() (hpc_trainer/models/parts.py)."
        )
    parts = [Part(name) for name, _ in model.named_children()] if method is None else list(method())
    here = {name for name, _ in model.named_modules()}
    here |= {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    for part in parts:
        unknown = [name for name in part.needs if name not in here]
        if unknown or not callable(_find(model, part.name)):
            raise ConfigError(
                f"{kind}.pipeline_parts() has {part}: {unknown or [part.name]} must be the names of modules, and the "
                f"part's that of a module or a method of {kind}."
            )
    return parts


def _find(model: nn.Module, name: str) -> object:
    try:
        return operator.attrgetter(name)(model)
    except AttributeError:
        return None
