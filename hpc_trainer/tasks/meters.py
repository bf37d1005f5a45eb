"""Metrics of torchmetrics over ranks: each rank updates its own metrics, and computes from the states of all ranks.

torchmetrics itself gathers over all ranks of the process group: ranks that hold one model together would count
twice, and a rank without samples could wait for ever. So it gets states that this module gathered.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hpc_trainer.errors import ConfigError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.own import eval_name
from hpc_trainer.tasks.protocol import Task

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
        mine = {share: each[name] for share, each in meters.items()}
        first = next(iter(mine.values()))
        if group.world_size > 1 or len(mine) > 1:
            states = _gathered(name, mine if counts else {}, group)
            for index, part in enumerate(_parts(first)):
                part.dist_sync_fn, part.distributed_available_fn = _replay([each[index] for each in states]), _yes
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
            f"the metric {name!r} keeps a list of another length on each rank, which cannot be put together. Use a "
            "metric whose states are added up or concatenated (dist_reduce_fx of torchmetrics)."
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
        return [each.to(tensor.device) for each in next(left)]

    return gather


def _yes() -> bool:
    return True


def _number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value)
    kind = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ConfigError(
        f"the metric {name!r} computes {kind}; the loop logs one number. Choose an average of it, or one metric each."
    )
