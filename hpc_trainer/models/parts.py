"""Parts of a model: weights by name patterns, blocks that features process one by one, and parts for a pipeline.

Parts for pipeline parallelism are the pieces of the forward pass, which run one after the other.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from hpc_trainer.config.name_patterns import unfit
from hpc_trainer.errors import ConfigError

# Selection of weights by name patterns with * and ?, as in keys of the configuration.


def match_weights(model: nn.Module, patterns: Iterable[str], key: str) -> dict[str, list[nn.Parameter]]:
    """Return for each pattern the weights of a whole model that it matches; a tied weight matches by any of its names.

    Args:
        model: the whole model.
        patterns: name patterns.
        key: the configuration key of the patterns, for messages.

    Raises:
        ConfigError: a pattern matches no weight.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    matched = {}
    for pattern in patterns:
        for problem in unfit(key, [pattern], weights, f"weight of {type(model).__name__}"):
            raise ConfigError(problem)
        matched[pattern] = [*dict.fromkeys(weight for name, weight in weights.items() if fnmatchcase(name, pattern))]
    return matched


# Blocks of a model: the modules that FSDP, recomputation, compilation and others process one by one.


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a module, such as the layers of a transformer or ResNet.

    A block is an outermost item of an nn.ModuleList or nn.Sequential that has modules in it. A sequence of plain
    layers (an MLP) has no blocks.
    """
    for child in module.children():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        is_block = is_list and not isinstance(child, (nn.ModuleList, nn.Sequential))
        if is_block and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)


def check_has_blocks(model: nn.Module, what: str, use: str) -> None:
    """Check that a whole model has blocks; a stage of it may have none.

    Args:
        model: the whole model.
        what: the beginning of the message: what would be done to blocks.
        use: what to use instead, for the message.

    Raises:
        ConfigError: the model has no blocks.
    """
    if not any(True for _ in blocks(model)):
        raise ConfigError(
            f"{what}, and {type(model).__name__} has none: layers that are modules with layers of their own, in "
            f"an nn.ModuleList or nn.Sequential. Use {use}."
        )


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
