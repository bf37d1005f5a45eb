"""Adapters of peft in a model of any kind: inserted once the model has its first weights, and trained alone."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.name_patterns import fits_any, unfit
from hpc_trainer.config.packages import optional
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.lora import LoraConfig
from hpc_trainer.models.parts import blocks, match_weights
from hpc_trainer.training.ability import Ability, Building

_CONV1D = "Conv1D"
"""transformers' own linear layer, whose weight is [in, out]; GPT-2 has it."""


def put_in(model: nn.Module, config: LoraConfig) -> list[str]:
    """Put adapters beside the layers that `config` names, in place; return the names of the layers.

    The adapters and the weights that `also` names require gradients. The first matrix of an adapter begins at random,
    drawn on the CPU, the second one at 0: so the model's outputs do not change.

    Raises:
        ConfigError: there is no such layer, or peft has no adapter for its kind.
    """
    names = [*_chosen(model, config)]
    besides = [
        weight for weights in match_weights(model, config.also, "train.lora.also").values() for weight in weights
    ]
    peft = optional("peft", "train.lora")
    adapters = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, bias="none",
        target_modules="|".join(map(re.escape, names)),
    )  # fmt: skip
    try:
        with warnings.catch_warnings():  # peft sees itself how a layer's weight lies, and says so
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            peft.inject_adapter_in_model(adapters, model)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"train.lora.targets={config.targets}: peft cannot adapt these layers: {error}") from error
    for weight in besides:
        weight.requires_grad_(True)
    return names


def _chosen(model: nn.Module, config: LoraConfig) -> Iterator[str]:
    """Yield names of layers, in the model's order. Raises ConfigError if a pattern fits none, or there is none."""
    layers = {
        name: module for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    for problem in unfit("train.lora.targets", config.targets, layers, f"layer of {type(model).__name__}"):
        raise ConfigError(problem)
    inside = {id(layer) for block in blocks(model) for layer in block.modules()}
    names = [
        name
        for name, layer in layers.items()
        if (
            fits_any(name, config.targets)
            if config.targets
            else id(layer) in inside and (isinstance(layer, nn.Linear) or type(layer).__name__ == _CONV1D)
        )
    ]
    if not names:
        raise ConfigError(
            f"train.lora adapts the linear layers of blocks, and {type(model).__name__} has none. Name layers: "
            f"train.lora.targets={[*layers][-1:]}."
        )
    yield from names


def leave_out_base(model: nn.Module) -> None:
    """Limit the state dicts of `model` and its copies, saved and loaded, to trained weights and buffers."""
    base = frozenset(
        name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad
    )

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in base:
            state.pop(prefix + name, None)

    def miss_none(module: nn.Module, keys: Any) -> None:
        # `model` by itself, and as the `module` inside its averaged weights.
        keys.missing_keys[:] = [key for key in keys.missing_keys if key.removeprefix("module.") not in base]

    model.register_state_dict_post_hook(leave_out)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(miss_none)  # type: ignore[no-untyped-call]


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the product of each adapter's matrices to the weight of its layer, and remove the adapters, in place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in [*model.named_modules()]:
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, layer.get_base_layer())


BASE = "lora_base"
"""Name of the digest of the base weights among the checkpoint's facts."""


class LoraAbility(Ability):
    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Put adapters into the model, and record the digest of rank 0's base. Collective in a run."""
        run = building.run
        if run is not None:
            digest = run.group.broadcast(digest_of(model) if run.is_rank_zero else None)
            run.describe(**{BASE: digest, "libraries.peft": importlib.metadata.version("peft")})
        put_in(model, self.config.train.lora)
        leave_out_base(model)

    def fit_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put adapters into `model`, which has its base, and return its weights with those of the checkpoint."""
        put_in(model, self.config.train.lora)
        return {**model.state_dict(), **weights}

    def deployed(self, model: nn.Module) -> nn.Module:
        """Merge the adapters into the layers beside them, and remove the adapters."""
        merge(model)
        return model


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 over the names and bytes of all weights, which are on the CPU. A GB takes about a second."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


ABILITY = LoraAbility
