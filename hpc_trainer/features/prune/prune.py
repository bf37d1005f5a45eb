"""Pruning in a run: zeros after each update, and more of them after the steps of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from hpc_trainer.features.prune import PruneMethod, end_step, final_sparsity, is_due, share_done
from hpc_trainer.features.prune.choose import (
    Masks,
    NamedGroup,
    choose,
    groups_to_prune,
    pruned,
    weights_to_prune,
    whole,
)
from hpc_trainer.models.channels import shrink, tensors_of
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState

_SCORE_BYTES = 4


class PruneAbility(Ability):
    _names: Sequence[str]
    _left: Sequence[str] = ()
    _groups: Sequence[NamedGroup] = ()
    _masks: Masks
    _group: RankGroup
    _state: TrainState
    _others: Sequence[Ability]

    def see_whole(self, model: nn.Module, building: Building) -> None:
        prune = self.config.prune
        if prune.method is PruneMethod.channels:
            self._groups = [(group, [*tensors_of(model, group)]) for group in groups_to_prune(model, prune)]
            self._names = [name for _, names in self._groups for name in names]
        else:
            self._names, self._left = weights_to_prune(model, prune)

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        if building.run is None:
            return
        here = dict(state.model.named_parameters())
        self._masks = state.more["prune"] = Masks({name: here[name] for name in self._names})
        self._state, self._group, self._others = state, building.run.group, building.abilities

    def restored(self) -> None:
        """Mask the averages of the weights too, and report weights that stay whole, once all is built."""
        for ability in self._others:
            self._masks.also_mask(ability.stand_ins())
        if self._left and self._group.is_rank_zero:
            left = ", ".join(self._left)
            print(f"prune: {left} stay whole, as prune.m={self.config.prune.m} does not divide their inputs.")

    def before_clip(self) -> None:
        self._masks.apply_to_gradients()

    def after_update(self) -> None:
        self._masks.apply()

    def after_step(self, step: int) -> None:
        if is_due(self.config, step):
            self._choose(step)

    def check(self, step: int) -> None:
        """Prune once before the first step, and again if the run went back to that step."""
        if step == 0 and is_due(self.config, 0) and self._masks.share == 0:
            self._choose(0)

    def logged(self, step: int, values: dict[str, float]) -> None:
        values["sparsity"] = self._masks.sparsity

    def held(self) -> Mapping[str, Iterable[torch.Tensor]]:
        return {"weights": self._masks.tensors()}

    def memory(self, held: RankMemory, building: Building) -> None:
        """Count a byte for each element beside the weights, and four more while they are compared."""
        here = dict(held.model.named_parameters())
        count = sum(here[name].numel() for name in self._names)
        held.buffers += count // held.num_parts
        held.checkpoint += count
        if not self._groups:
            held.made = max(held.made, _SCORE_BYTES * count // held.num_parts)

    def deployed(self, model: nn.Module) -> nn.Module:
        """Return the model without the pruned channels; zeros of other methods keep their memory."""
        return shrink(model) if self.config.prune.method is PruneMethod.channels else model

    def compressed(self, model: nn.Module) -> nn.Module:
        return pruned(model, self.config.prune)

    def _choose(self, step: int) -> None:
        """Choose the elements that are zero from now on, including all that are zero already. Collective."""
        masks = self._masks
        masks.share = max(masks.share, share_done(self.config, step) * final_sparsity(self.config.prune))
        choose(masks, self.config.prune, self._groups, self._group)
        if step == end_step(self.config):
            self._tell(step)

    def _tell(self, step: int) -> None:
        """Report the pruned share of each layer. Collective."""
        masks = self._masks
        shares = {name: (int(whole(mask).sum()), mask.numel()) for name, mask in masks.pruned.items()}
        if not self._group.is_rank_zero:
            return
        num_pruned, total = (sum(counts) for counts in zip(*shares.values(), strict=True))
        print(
            f"step {step}: pruned {num_pruned:,} of {total:,} elements in {len(shares)} tensors, sparsity "
            f"{masks.sparsity:.4g} ({self.config.prune.method.name})")  # fmt: skip
        for name, (zeros, count) in shares.items():
            print(f"  {name}: {zeros:,} of {count:,} ({zeros / count:.1%})")


ABILITY = PruneAbility
