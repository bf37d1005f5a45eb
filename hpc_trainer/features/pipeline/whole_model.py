"""The whole model of which ranks hold stages, for checkpoints (training/checkpoint/model_parts.py).

Each stage builds the whole model before it drops the rest, so every rank knows all names and their forms.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.checkpoint.shards import Box, Shard
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, DTYPES, pack_sharded, unpack

Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Whole:
    """Description of the whole model of which a module is one stage.

    Args:
        forms: number format and shape by name, for each entry of the whole model's state_dict, in its order.
        trained: names of the weights that the optimizer has, in their order.
        buffers: names of the buffers among `forms`.
        owned: names that this stage writes; weights in two stages are written by the first one.
        is_writer: this rank is the first of its stage: it writes what the stage's ranks hold alike.
    """

    forms: Mapping[str, Form]
    trained: tuple[str, ...]
    buffers: frozenset[str]
    owned: frozenset[str] = frozenset()
    is_writer: bool = True

    @classmethod
    def of(cls, model: nn.Module) -> Whole:
        """Describe a whole model, before a stage is cut out of it."""
        state = model.state_dict()
        return cls(
            forms={name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()},
            trained=tuple(name for name, weight in model.named_parameters() if weight.requires_grad),
            buffers=frozenset(name for name, _ in model.named_buffers() if name in state),
        )

    @property
    def has_buffers(self) -> bool:
        """True if the whole model has buffers, as in `WholeModel`."""
        return bool(self.buffers)

    def state(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole model's state_dict, as `WholeModel.state` does."""
        return {name: _shard(held.get(name), form, self, name) for name, form in self.forms.items()}

    def optimizer_state(
        self,
        state: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Sequence[str]],
        names: Sequence[str],
        owned: Collection[str],
    ) -> tuple[dict[str, Any], list[list[str]]]:
        """Return the whole optimizer's state and groups, as `WholeModel.optimizer_state` does."""
        mine = {name: pack_sharded(values) for name, values in state.items()}
        described = {
            name: {
                "structure": structure,
                "whole": {leaf: [DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for leaf, tensor in tensors.items()},
                "cut": {leaf: [DTYPE_NAMES[shard.dtype], list(shard.shape)] for leaf, shard in shards.items()},
            }
            for name, (tensors, shards, structure) in mine.items()
        }
        group = _all_ranks()
        all_told = group.gather({"state": described, "groups": [list(each) for each in groups]})
        listed = [{name for each in all_told for name in each["groups"][index]} for index in range(len(groups))]
        ordered = [[name for name in names if name in each] for each in listed]
        merged: dict[str, Any] = {}
        for name in itertools.chain(*ordered):  # in the order of one rank
            teller = next((rank for rank, each in enumerate(all_told) if name in each["state"]), None)
            if teller is None:  # no state yet
                continue
            entry = all_told[teller]["state"][name]
            tensors, shards, _ = mine.get(name, ({}, {}, None))
            whole = {
                leaf: _form_shard(form, tensors.get(leaf) if group.rank == teller else None)
                for leaf, form in entry["whole"].items()
            }
            cut = {
                leaf: shards[leaf] if leaf in shards and name in owned else _form_shard(form, None)
                for leaf, form in entry["cut"].items()
            }
            merged[name] = unpack(whole, entry["structure"], cut)
        return merged, ordered


def _shard(here: torch.Tensor | None, form: Form, whole: Whole, name: str) -> Any:
    is_owner = here is not None and name in whole.owned
    if is_owner and is_sharded(here):
        return here
    dtype, shape = form
    return Shard(shape, dtype, Box.whole(shape), here if is_owner and whole.is_writer else None)


def _form_shard(form: Sequence[Any], local: torch.Tensor | None) -> Shard:
    dtype, shape = DTYPES[form[0]], tuple(form[1])
    return Shard(shape, dtype, Box.whole(shape), local)


def _all_ranks() -> RankGroup:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    backend = torch.distributed.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return RankGroup(rank=rank, world_size=world_size, device=device)
