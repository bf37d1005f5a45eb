"""Evaluation: the task's metrics over the held-out samples, which the ranks divide among them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.own import eval_name
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.data.loader import copies_to, eval_indices, shares_of
from hpc_trainer.training.data.protocol import MapDataset
from hpc_trainer.training.parallel.fully_sharded import is_fully_sharded
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.parallel.share import ask
from hpc_trainer.training.rng import random_state_kept, seed_everything
from hpc_trainer.training.step import autocast


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


# Metrics of torchmetrics over ranks: each rank updates its own metrics, and computes from the states of all ranks.
#
# torchmetrics itself gathers over all ranks of the process group: ranks that hold one model together would count
# twice, and a rank without samples could wait for ever. So it gets states that this module gathered.

Meters = Mapping[str, Any]


def meters_on(device: torch.device, task: Task) -> Meters:
    """Return new metrics of `task` on `device`, by name."""
    return {name: metric.to(device) for name, metric in task.metrics().items()}


def computed(meters: Mapping[int, Meters], group: RankGroup, *, counts: bool) -> dict[str, float]:
    """Return the values of metrics over all shares of the samples, by the names that an evaluation logs. Collective.

    Args:
        meters: share -> its metrics; the shares of all ranks are merged in their order.
        counts: False on a rank whose samples another rank has too.

    Raises:
        ConfigError: a metric's value is not one number, or its states cannot be merged.
    """
    names = list(next(iter(meters.values())))
    values = {}
    for name in names:
        mine = {share: metrics[name] for share, metrics in meters.items()}
        first = next(iter(mine.values()))
        if group.world_size > 1 or len(mine) > 1:
            states = _gathered(name, mine if counts else {}, group)
            for index, part in enumerate(_parts(first)):
                part.dist_sync_fn, part.distributed_available_fn = _replay([state[index] for state in states]), _yes
        with warnings.catch_warnings():  # torchmetrics warns on a rank without samples
            warnings.filterwarnings("ignore", message=".*called before the ``update`` method")
            value = first.compute()
        values[eval_name(name)] = _number(name, value)
    return values


def _gathered(name: str, mine: Mapping[int, Any], group: RankGroup) -> list[list[list[torch.Tensor]]]:
    """Return the state tensors of each part of a metric, for each share in order. Collective."""
    states = {share: [_recorded(part) for part in _parts(metric)] for share, metric in mine.items()}
    layouts = group.gather([[share, [len(tensors) for tensors in parts]] for share, parts in states.items()])
    everything = group.gather_tensors(list(itertools.chain(*itertools.chain(*states.values()))))
    by_share = {}
    for layout, tensors in zip(layouts, everything, strict=True):
        left = iter(tensors)
        for share, lengths in layout:
            by_share[share] = [list(itertools.islice(left, length)) for length in lengths]
    if len({tuple(map(len, parts)) for parts in by_share.values()}) > 1:
        raise ConfigError(
            f"the metric {name!r} keeps a list of another length on each rank, which cannot be combined. Use a metric "
            "whose states are added up or concatenated (dist_reduce_fx of torchmetrics)."
        )
    return [by_share[share] for share in sorted(by_share)]


def _parts(metric: Any) -> Iterator[Any]:
    """Yield the metric, and the metrics that it contains."""
    return (part for part in metric.modules() if callable(getattr(part, "sync", None)))


def _recorded(part: Any) -> list[torch.Tensor]:
    """Return the tensors that a metric would send to other ranks, in the metric's order."""
    tensors: list[torch.Tensor] = []

    def record(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        tensors.append(tensor)
        return [tensor]

    part.sync(dist_sync_fn=record, distributed_available=_yes)
    part.unsync()
    return tensors


def _replay(states: Sequence[Sequence[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Return a replacement for torchmetrics' gather function that returns the tensors of all shares, call by call."""
    left = zip(*states, strict=True)

    def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        return [part.to(tensor.device) for part in next(left)]

    return gather


def _yes() -> bool:
    return True


def _number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value)
    kind = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ConfigError(
        f"the metric {name!r} computes {kind}; the loop logs one number. Choose an average, or one metric for each "
        "number."
    )
