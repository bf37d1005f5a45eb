"""Evaluation: loss and accuracy over the held-out samples, shared among the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from hpc_trainer.config.schema.precision import PrecisionConfig
from hpc_trainer.datasets.protocol import MapDataset
from hpc_trainer.errors import DataError
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.data.device_batches import copies_to
from hpc_trainer.training.data.loader import IGNORED, eval_indices, shares_of
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.precision.formats import autocast
from hpc_trainer.training.rng import random_state_kept, seed_everything


@torch.no_grad()
@random_state_kept()
def evaluate(
    model: nn.Module, dataset: MapDataset, *, group: RankGroup, batch_size: int, precision: PrecisionConfig,
    should_stop: Callable[[], bool] = lambda: False, num_shares: int | None = None, seed: int = 0, step: int = 0,
    mesh: Mesh | None = None,
) -> dict[str, float] | None:  # fmt: skip
    """`eval_loss` (mean cross entropy, nats) and `eval_accuracy` (share of right predictions, 0 to 1); None if stopped.

    Means over all targets but those that are -100.

    Collective: every rank evaluates its shares; their sums are added up in float64, in the order of shares. Dropout is
    off, and what a model or data set draws all the same comes from (seed, share, step): training goes on as if nobody
    had looked, and so does a resumed run that need not look again.

    Args:
        should_stop: asked after each batch, equally often on all ranks; True on all of them ends the evaluation.
        num_shares: a multiple of the data-parallel ranks; the same bits for each number of them. None: one a rank.
        seed: `config.seed`.
        step: optimizer steps done.
        mesh: of the run; None: all ranks are data-parallel ones.

    Raises DataError: no target counts.
    """
    rank, num_ranks = (group.rank, group.world_size) if mesh is None else (mesh.data_rank, mesh.num_data_ranks)
    num_shares = num_shares or num_ranks
    modes = [(module, module.training) for module in model.modules()]  # a frozen part stays as its owner set it
    model.eval()
    kind = kind_of(group.device)
    wide = torch.float64 if kind.has_float64 else torch.float32  # of a batch; sums of them are wide on any device
    place = group.device if kind.has_float64 else torch.device("cpu")
    sums = torch.zeros(num_shares, 3, dtype=torch.float64, device=place)
    starts = range(0, len(eval_indices(len(dataset), 0, num_shares)), batch_size)  # the first share is the longest
    is_stopped = False
    copy = copies_to(group.device)
    needs_all = any(is_fully_sharded(module) for module in model.modules())
    for share, start in itertools.product(shares_of(rank, num_ranks, num_shares), starts):
        if start == 0:
            seed_everything(seed, f"{share} evaluates at {step}")
        part = eval_indices(len(dataset), share, num_shares)[start : start + batch_size]
        if part or needs_all:  # a forward pass of FSDP is collective: ranks without samples repeat one
            inputs, targets = copy(dataset.__getitems__(part or range(1)))
            targets = targets.flatten()
            with autocast(precision, group.device.type):
                logits = model(inputs)
                if part and logits is not None:  # of a pipeline the last stage alone has them
                    sums[share] += _sums(logits.flatten(0, -2), targets, wide).to(place).double()
            kind.launch()
        is_stopped = should_stop()
        if is_stopped:
            break
    for module, mode in modes:
        module.training = mode
    if is_stopped:
        return None
    if mesh is not None and not mesh.is_first_of_model:
        sums.zero_()  # ranks that hold one model together have all the same sums
    # Other ranks have zeros in this rank's rows: adding them changes no bit.
    loss_sum, num_right, count = map(sum, zip(*group.sum(sums).tolist(), strict=True))
    if not count:
        raise DataError(f"every target of the evaluation set is {IGNORED}, which counts nothing: there is no mean.")
    return {"eval_loss": loss_sum / count, "eval_accuracy": num_right / count}


def _sums(logits: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of a batch: the cross entropies, the right predictions, and the targets that count, each added up; [3]."""
    loss = functional.cross_entropy(logits, targets, reduction="sum")
    right, counted = logits.argmax(-1) == targets, targets != IGNORED
    return torch.stack((loss.to(dtype), right.sum().to(dtype), counted.sum().to(dtype)))
