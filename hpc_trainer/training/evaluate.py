"""Evaluation: the task's metrics over the held-out samples, which the ranks divide among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.meters import computed, meters_on
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.loader import copies_to, eval_indices, shares_of
from hpc_trainer.training.data.protocol import MapDataset
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.parallel.share import ask
from hpc_trainer.training.precision import autocast
from hpc_trainer.training.rng import random_state_kept, seed_everything


@torch.no_grad()
@random_state_kept()
def evaluate(
    model: nn.Module, dataset: MapDataset, *, task: Task, group: RankGroup, batch_size: int,
    precision: PrecisionConfig, should_stop: Callable[[], bool] = lambda: False, num_shares: int | None = None,
    seed: int = 0, step: int = 0, mesh: Mesh | None = None,
) -> dict[str, float] | None:  # fmt: skip
    """Return the metrics of `task` over all samples, `eval_loss` and more; None if stopped.

    Collective: every rank evaluates its shares; their sums are added up in float64, in the order of shares. Dropout is
    off. Random numbers that a model or data set draws here come from (seed, share, step). So training continues as
    without the evaluation, and so does a resumed run that need not repeat it.

    Args:
        should_stop: called after each batch, equally often on all ranks; True on all of them ends the evaluation.
        num_shares: a multiple of the number of data-parallel ranks; the result has the same bits for any of them.
            None: one share per rank.
        seed: `config.seed`.
        step: optimizer steps done.
        mesh: the mesh of the run; None: all ranks are data-parallel.

    Raises:
        DataError: no target counts.
    """
    is_first = mesh is None or mesh.is_first_of_model
    rank, num_ranks = (group.rank, group.world_size) if mesh is None else (mesh.data_rank, mesh.num_data_ranks)
    num_shares = num_shares or num_ranks
    modes = [(module, module.training) for module in model.modules()]  # a frozen part keeps the mode that the user set
    model.eval()
    kind = kind_of(group.device)
    wide = torch.float64 if kind.has_float64 else torch.float32  # for a batch; totals are float64 on any device
    place = group.device if kind.has_float64 else torch.device("cpu")
    shares = shares_of(rank, num_ranks, num_shares)
    metrics = {share: meters_on(group.device, task) for share in shares}
    num_sums, sums = task.num_sums, torch.zeros(0, device=place)
    if num_sums is not None:
        sums = torch.zeros(num_shares, num_sums, dtype=torch.float64, device=place)
    starts = range(0, len(eval_indices(len(dataset), 0, num_shares)), batch_size)  # the first share is the longest
    is_stopped = False
    copy = copies_to(group.device)
    # FSDP's forward pass is collective, and the first pass may determine the sums: ranks without samples repeat one.
    needs_all = num_sums is None or any(is_fully_sharded(module) for module in model.modules())
    for share, start in itertools.product(shares, starts):
        if start == 0:
            seed_everything(seed, f"{share} evaluates at {step}")
        part = eval_indices(len(dataset), share, num_shares)[start : start + batch_size]
        if part or needs_all:
            batch = copy(dataset.__getitems__(part or range(1)))
            with autocast(precision, group.device.type):
                batch_sums = ask(
                    model,
                    partial(task.sums, num_samples=len(part), dtype=wide, metrics=metrics[share] if part else {}),
                    batch,
                )
            if batch_sums is not None and not len(sums):
                sums = torch.zeros(num_shares, len(batch_sums), dtype=torch.float64, device=place)
            if part and batch_sums is not None:
                sums[share] += batch_sums.to(place).double()
            kind.launch()
        is_stopped = should_stop()
        if is_stopped:
            break
    for module, mode in modes:
        module.training = mode
    if is_stopped:
        return None
    if not is_first:
        sums.zero_()  # ranks that hold one model together all have the same sums
    # Other ranks have zeros in this rank's rows: adding them changes no bit.
    totals = [sum(column) for column in zip(*group.sum(sums).tolist(), strict=True)]
    return task.figures(totals) | computed(metrics, group, counts=is_first)
