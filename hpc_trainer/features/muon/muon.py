"""Muon for the hidden matrices of a model and AdamW for the rest, as one optimizer (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_trainer.config.mesh import MeshShape
from hpc_trainer.config.schema.optim import MuonConfig
from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.muon.whole_matrices import WholeMatrices, num_flops, share_work
from hpc_trainer.models.parts import blocks, match_weights
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.runtime.tensors import is_sharded, local_tensor
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.optim.build import Group, OwnStep, Recipe, decay_groups, decaying, fastest
from hpc_trainer.training.parallel.mesh import Mesh

try:
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
except ImportError:  # no Muon in this torch, or another one: tests/unit/features/muon/test_sharded_ranks.py checks
    _adjust_lr = _zeropower_via_newtonschulz = None  # type: ignore[assignment]


class ShardedMuon(OwnStep, torch.optim.Muon):
    """torch.optim.Muon on DTensors: each rank steps its own shards, and no rank holds all matrices.

    Momentum, weight decay and the update are elementwise, so a shard's update is that shard of the whole update.
    Newton-Schulz needs whole matrices: each is gathered on one rank in bf16, the format in which torch's Muon computes,
    and made orthogonal there by torch's own function (`whole_matrices`). Factors that depend on a matrix's shape use
    the whole shape. So the gradients of one rank give the weights of one rank, to the bit.

    Args:
        weights: as torch.optim.Muon, one group.
        ranks: ranks that hold one copy of the weights (`Mesh.copy_group`); None: this rank alone.

    Raises:
        ConfigError: this torch keeps its Newton-Schulz elsewhere.
    """

    def __init__(self, weights: Any, *, ranks: dist.ProcessGroup | None, **values: Any) -> None:
        if _zeropower_via_newtonschulz is None:
            raise ConfigError(
                "optim=muon on sharded weights (parallel=fsdp, hsdp, tp) takes Newton-Schulz from torch.optim._muon, "
                f"which torch 2.9 to 2.13 have, but torch {torch.__version__} does not. Use parallel=ddp, or "
                "optim=adamw."
            )
        super().__init__(weights, **values)
        (group,) = self.param_groups
        self._number = {weight: index for index, weight in enumerate(group["params"])}
        self.matrices = WholeMatrices(group["params"], [num_flops(weight.shape) for weight in group["params"]], ranks)

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Step the weights. Collective among the ranks that hold a copy: two all-to-alls.

        `MuonWithAdamw` handles a bad step.
        """
        (group,) = self.param_groups
        weights = [weight for weight in group["params"] if weight.grad is not None]
        orthogonal = partial(
            _zeropower_via_newtonschulz,
            ns_coefficients=group["ns_coefficients"], ns_steps=group["ns_steps"], eps=group["eps"],
        )  # fmt: skip
        updates = self.matrices.map(
            [self._number[weight] for weight in weights], self._updates(group, weights), orthogonal
        )
        for weight, update in zip(weights, updates, strict=True):
            part = local_tensor(weight)
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], weight.shape))

    def _updates(self, group: dict[str, Any], weights: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield this rank's shard of each matrix that is to be made orthogonal, and update the momenta."""
        for weight in weights:
            assert weight.grad is not None
            state, gradient = self.state[weight], local_tensor(weight.grad)
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            momentum = local_tensor(state["momentum_buffer"])
            momentum.lerp_(gradient, 1 - group["momentum"])
            yield gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


class MuonWithAdamw(OwnStep):
    """torch.optim.Muon and torch.optim.AdamW over the groups of one optimizer, with one state_dict for both.

    The first groups are Muon's. The inner optimizers hold the same group dicts and the same state, so they see each
    change of a group and each loaded state. The learning rate is Muon's; AdamW's is a fixed multiple of it.

    On CUDA, `found_inf` says that a step must change nothing: a number on the device, as torch's fused optimizers take
    it (`_step_supports_amp_scaling`). torch's Muon does not know it, so its matrices are restored. That costs a copy of
    them during a step. Nothing waits for the device.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer, *, adamw_lr_ratio: float) -> None:
        self.muon, self.adamw, self.adamw_lr_ratio = muon, adamw, adamw_lr_ratio
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._step_supports_amp_scaling = all(group["fused"] for group in adamw.param_groups)
        self._share()

    def _share(self) -> None:
        num_muon = len(self.muon.param_groups)
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:num_muon], self.param_groups[num_muon:]
        self.muon.state = self.adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Share groups and state again: they are new objects after load_state_dict."""
        super().__setstate__(state)
        self._share()

    def rates(self, lr: float) -> list[float]:
        """Return the learning rate of each group: `lr` for Muon's matrices, its fixed multiple for AdamW's weights."""
        return [lr] * len(self.muon.param_groups) + [lr * self.adamw_lr_ratio] * len(self.adamw.param_groups)

    def update(self, bad: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Step both optimizers; arguments as in `OwnStep.update`."""
        if bad is None:
            self.muon.step()
            self.adamw.step()
            return
        self._muon_unless(bad.bool(), scale)
        self.adamw.grad_scale, self.adamw.found_inf = scale, bad  # type: ignore[attr-defined]
        try:
            self.adamw.step()
        finally:
            del self.adamw.grad_scale, self.adamw.found_inf  # type: ignore[attr-defined]

    def _muon_unless(self, bad: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Step Muon, and restore its weights if `bad` is true.

        Args:
            bad: a bool on the device.
            scale: factor by which the gradients were multiplied; None: by none.
        """
        weights = [weight for group in self.muon.param_groups for weight in group["params"] if weight.grad is not None]
        before = [local_tensor(weight).clone() for weight in weights]
        for weight in weights:
            assert weight.grad is not None
            gradient, momentum = local_tensor(weight.grad), self.state[weight].get("momentum_buffer")
            if scale is not None:
                gradient.div_(scale)
            still = torch.zeros_like(gradient) if momentum is None else local_tensor(momentum)
            torch.where(bad, still, gradient, out=gradient)  # a momentum averaged with itself stays
        self.muon.step()
        for weight, was in zip(weights, before, strict=True):
            part = local_tensor(weight)
            torch.where(bad, was, part, out=part)


def muon_recipe(config: MuonConfig, hidden: list[nn.Parameter], rest: list[Group], mesh: Mesh | None) -> Recipe:
    """Return the recipe of Muon over the matrices `hidden` and AdamW over the groups `rest`.

    With `mesh`, making the optimizer and each step are collective. With ZeRO-1 each rank has whole matrices and steps
    those alone. If weights are sharded, each rank gathers its share of the matrices (`sharded`).

    Args:
        mesh: mesh that the weights are sharded on; None: they are not sharded.
    """
    kind = _kind_of_muon(mesh)
    first, second = config.betas
    adamw_lr = config.lr if config.adamw_lr is None else config.adamw_lr
    speed = fastest([*hidden, *(weight for group in rest for weight in group["params"])])

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        of_muon = [group for group in groups if "ns_steps" in group]
        muon = kind(
            of_muon, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, ns_steps=config.ns_steps,
            adjust_lr_fn=config.adjust_lr.value,
        )  # fmt: skip
        of_adamw = groups[len(of_muon) :]
        adamw = torch.optim.AdamW(of_adamw, lr=adamw_lr, betas=(first, second), eps=config.eps, **speed)
        return MuonWithAdamw(muon, adamw, adamw_lr_ratio=adamw_lr / config.lr)

    return Recipe([{"params": hidden, "weight_decay": config.weight_decay, "ns_steps": config.ns_steps}, *rest], make)


def _kind_of_muon(mesh: Mesh | None) -> Callable[..., torch.optim.Optimizer]:
    if mesh is None:
        return torch.optim.Muon

    return partial(ShardedMuon, ranks=mesh.copy_group())


def hidden_and_others(config: MuonConfig, model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the weights of a whole model (`split_weights`).

    Raises:
        ConfigError: as `split_weights`, or if Muon or AdamW would have no weight.
    """
    hidden, others = split_weights(model, config.adamw_weights)
    if not hidden:
        raise ConfigError(
            f"optim=muon is for hidden matrices, and {type(model).__name__} has none: weights with two dimensions that "
            "are neither embeddings nor the output layer, nor of a norm. Use optim=adamw."
        )
    if not others:
        raise ConfigError(
            f"optim=muon gives embeddings, norms and biases to AdamW, and {type(model).__name__} has none. Name some "
            "weights in optim.adamw_weights, or use optim=custom optim._target_=torch.optim.Muon."
        )
    return hidden, others


def split_weights(model: nn.Module, names: list[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (hidden matrices, all other weights) of `model` that require gradients, in the model's order.

    Embeddings are the weights of nn.Embedding; the output layer is the last nn.Linear outside blocks. A weight that
    does not decay is not a hidden matrix, whatever its shape: gains and biases (`decaying`).

    Raises:
        ConfigError: a pattern of `names` fits no weight.
    """
    in_blocks = {id(module) for block in blocks(model) for module in block.modules()}
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in in_blocks]
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    apart = {id(module.weight) for module in [*embeddings, *heads[-1:]]}
    for fits in match_weights(model, names, "optim.adamw_weights").values():
        apart |= {id(weight) for weight in fits}
    decay_of = decaying(model)
    hidden = [weight for weight, decays in decay_of.items() if weight.ndim == 2 and decays and id(weight) not in apart]
    chosen = {id(weight) for weight in hidden}
    return hidden, [weight for weight in decay_of if id(weight) not in chosen]


def bytes_of_step(held: RankMemory, config: TrainConfig, shape: MeshShape) -> int:
    """Return the bytes of a step: a copy of the weights, for a skipped step; messages; the largest Newton-Schulz."""
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
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        others = {weight: decay_of[weight] for name, weight in trained.items() if name not in self._hidden}
        return muon_recipe(
            config,
            hidden=[weight for name, weight in trained.items() if name in self._hidden],
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
