"""Muon in place of the optimizers that the core knows."""

from __future__ import annotations

import torch
from torch import nn

from hpc_trainer.config.mesh import MeshShape
from hpc_trainer.config.schema.optim import MuonConfig
from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.muon.muon import MuonWithAdamw, hidden_and_others, muon_recipe
from hpc_trainer.features.muon.whole_matrices import num_flops, share_work
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import Recipe, decay_groups, decaying


def bytes_of_step(held: RankMemory, config: TrainConfig, shape: MeshShape) -> int:
    """Return the bytes of a step: weights as they were, for a skipped step; messages; the largest Newton-Schulz."""
    assert isinstance(held.optimizer, MuonWithAdamw)
    hidden: list[torch.Tensor] = [weight for group in held.optimizer.muon.param_groups for weight in group["params"]]
    here = held.shares.num_bytes(hidden) // (shape.world_size if config.parallel.zero1 else shape.dp_shard)
    num_ranks = shape.dp_shard * shape.tp
    may_skip = config.train.max_skipped_steps is not None or config.precision.compute_dtype is Dtype.fp16
    narrow = torch.bfloat16.itemsize
    # Two of these exist at a time: shards that are sent, matrices received, results that are sent back.
    dealt = [0] * num_ranks
    for rank, weight in zip(share_work([num_flops(weight.shape) for weight in hidden], num_ranks), hidden, strict=True):
        dealt[rank] += weight.numel()
    most = max(dealt)
    messages = narrow * (most + max(here // torch.float32.itemsize, most)) if num_ranks > 1 else 0
    # The matrix, the iterate and the next one; two products of rows by rows.
    products: int = max((3 * weight.numel() + 2 * min(weight.shape) ** 2 for weight in hidden), default=0)
    return here * may_skip + messages + narrow * products


class MuonAbility(Ability):
    _hidden: frozenset[str]
    """Names of the matrices that Muon updates, in the whole model."""
    _decays: frozenset[bool]
    """Decay flags that occur among all other weights: each stage has a group for each flag, empty or not."""

    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Split the weights on the whole model: only there is the last linear layer the output layer."""
        config = self._config
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(f"optim=muon needs torch 2.9 or newer, and this is {torch.__version__}. Use optim=adamw.")
        hidden, others = hidden_and_others(config, model)
        names, decay_of = {id(weight): name for name, weight in model.named_parameters()}, decaying(model)
        self._hidden = frozenset(names[id(weight)] for weight in hidden)
        self._decays = frozenset(decay_of[weight] for weight in others)

    def optimizer(self, recipe: Recipe, model: nn.Module, building: Building) -> Recipe:
        """Return the recipe of Muon and AdamW.

        Collective if weights are sharded, also for a stage that has no hidden matrix.
        """
        config, decay_of = self._config, decaying(model)
        found = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        others = {weight: decay_of[weight] for name, weight in found.items() if name not in self._hidden}
        return muon_recipe(
            config,
            hidden=[weight for name, weight in found.items() if name in self._hidden],
            rest=decay_groups(others, config.weight_decay, self._decays),
            mesh=building.mesh if any(map(is_sharded, model.parameters())) else None,
        )

    def memory(self, held: RankMemory, building: Building) -> None:
        held.made = bytes_of_step(held, self.config, building.mesh.shape)

    @property
    def _config(self) -> MuonConfig:
        assert isinstance(self.config.optim, MuonConfig)
        return self.config.optim


ABILITY = MuonAbility
