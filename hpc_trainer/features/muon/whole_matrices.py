"""Sharded matrices, each gathered on one rank, worked on there, and sent back in shards.

Newton-Schulz needs a whole matrix, and FSDP2 and tensor parallelism leave no rank with one. Each matrix is gathered on
one of the ranks that hold a copy together (dp_shard × tp). All ranks have as equal work as whole matrices allow. For
matrices with P elements on n ranks (n well below the number of matrices), in 16 bits, a step costs:

                        collectives    bytes a rank receives    works on           has whole at a time
    this way            2              4 P (n - 1) / n²         P / n elements     one matrix
    all on all ranks    1              2 P (n - 1) / n          P elements         all that are in the message

From two ranks on, this way sends no more bytes, and the work is divided. Both collectives are all-to-alls of all
matrices together, however many there are. Their sizes are known before, so nothing waits for a device. With more ranks
the largest share is more than P / n: for a 12-layer GPT's 48 matrices 1.8 times that on 64 ranks, 3.6 times on 128.
Copies (HSDP's dp_replicate) do the same work beside each other, and send each other nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.checkpoint.trees import Box, local_box

Work = Callable[[torch.Tensor], torch.Tensor]


def share_work(work: Sequence[float], num_ranks: int) -> list[int]:
    """Return the rank of each piece of work (any unit): largest first, to the least loaded rank (Graham 1969)."""
    loads, ranks = [0.0] * num_ranks, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda place: -work[place]):
        ranks[index] = min(range(num_ranks), key=loads.__getitem__)
        loads[ranks[index]] += work[index]
    return ranks


@dataclass(frozen=True, slots=True)
class _Message:
    """Shards of matrices one after the other, by rank and then by matrix.

    `places`: the shards of each matrix, as (first element in the message, box in the matrix). `sizes`: elements by
    rank.
    """

    places: dict[int, list[tuple[int, Box]]]
    sizes: list[int]

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(sum(self.sizes), dtype=torch.bfloat16, device=device)

    def parts(self, index: int, values: torch.Tensor) -> list[tuple[torch.Tensor, tuple[slice, ...]]]:
        """Return each shard [rows, columns] of a matrix as a view of `values` [sum(sizes)], with its place."""
        return [
            (
                values[first : first + box.numel].view(box.lengths),
                tuple(slice(start, start + size) for start, size in zip(box.offsets, box.lengths, strict=True)),
            )
            for first, box in self.places.get(index, [])
        ]


@dataclass(frozen=True, slots=True)
class _Route:
    """Messages that this rank sends and receives.

    Shards are sent in `out` and received in `together`; results are sent in `back` and received in `home`.
    """

    out: _Message
    together: _Message
    back: _Message
    home: _Message


class WholeMatrices:
    """Division of `weights` among the ranks of `group`, which hold a shard or a copy. Collective in `group`.

    Args:
        weights: matrices, DTensors.
        work: amount of work of each matrix, in any unit.
        group: the ranks that hold one copy of all matrices; None: this rank alone.
    """

    def __init__(self, weights: Sequence[torch.Tensor], work: Sequence[float], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._shapes = [tuple(weight.shape) for weight in weights]
        self.ranks = share_work(work, self._num_ranks)
        """The rank in the group that gathers each matrix."""
        self._boxes = self._all_boxes(weights)
        self._routes: dict[tuple[int, ...], _Route] = {}

    def map(self, chosen: Sequence[int], parts: Iterable[torch.Tensor], work: Work) -> list[torch.Tensor]:
        """Apply `work` to each `chosen` matrix, and return this rank's shards of the results. Collective in the group.

        Args:
            chosen: ascending indices of the weights; the same on all ranks. Nothing is sent if there is none.
            parts: this rank's shard of each. A shard may be overwritten when the next one is asked for.
            work: takes the whole matrix in bf16, which it may overwrite, and returns one of that shape; the result is
                sent in bf16 too.
        """
        if not chosen:
            return []
        route = self._routes.get(tuple(chosen))
        if route is None:
            route = self._routes[tuple(chosen)] = self._route(chosen)
        sent: torch.Tensor | None = None
        for index, part in zip(chosen, parts, strict=True):
            sent = route.out.empty(part.device) if sent is None else sent
            for place, _ in route.out.parts(index, sent):
                place.copy_(part)
        assert sent is not None
        got = self._exchange(sent, route.out, route.together)
        del sent
        done = route.back.empty(got.device)
        for index in chosen:
            if self.ranks[index] == self._rank:
                self._work_on(index, route, got, done, work)
        del got
        home = self._exchange(done, route.back, route.home)
        return [self._part_of(index, route, home) for index in chosen]

    def _part_of(self, index: int, route: _Route, home: torch.Tensor) -> torch.Tensor:
        for part, _ in route.home.parts(index, home):
            return part
        return home.new_empty(self._boxes[index][self._rank].lengths)  # with few rows, some ranks have none

    def _work_on(self, index: int, route: _Route, got: torch.Tensor, done: torch.Tensor, work: Work) -> None:
        whole = got.new_empty(self._shapes[index])
        for part, where in route.together.parts(index, got):
            whole[where] = part
        result = work(whole)
        for part, where in route.back.parts(index, done):
            part.copy_(result[where])

    def _exchange(self, values: torch.Tensor, sent: _Message, heard: _Message) -> torch.Tensor:
        if self._group is None:
            return values
        received = heard.empty(values.device)
        dist.all_to_all_single(received, values, heard.sizes, sent.sizes, group=self._group)
        return received

    def _all_boxes(self, weights: Sequence[torch.Tensor]) -> list[list[Box]]:
        """Return for each matrix the box that each rank holds."""
        mine = [local_box(weight) if is_sharded(weight) else Box.whole(weight.shape) for weight in weights]
        if self._group is None or not mine:  # a stage may have none
            return [[box] for box in mine]
        numbers = torch.tensor([[*box.offsets, *box.lengths] for box in mine], device=weights[0].device)
        gathered = [torch.empty_like(numbers) for _ in range(self._num_ranks)]
        dist.all_gather(gathered, numbers, group=self._group)
        by_rank = [[Box(tuple(row[:2]), tuple(row[2:])) for row in table.tolist()] for table in gathered]
        return [list(boxes) for boxes in zip(*by_rank, strict=True)]

    def _route(self, chosen: Sequence[int]) -> _Route:
        mine = [index for index in chosen if self.ranks[index] == self._rank]
        senders = {index: self._senders(index) for index in chosen}
        return _Route(
            out=self._message(
                (self.ranks[index], index, box)
                for index in chosen
                for rank, box in senders[index]
                if rank == self._rank
            ),
            together=self._message((rank, index, box) for index in mine for rank, box in senders[index]),
            back=self._message((rank, index, box) for index in mine for rank, box in enumerate(self._boxes[index])),
            home=self._message((self.ranks[index], index, self._boxes[index][self._rank]) for index in chosen),
        )

    def _senders(self, index: int) -> list[tuple[int, Box]]:
        """Return (rank, box that it sends) for a matrix: one rank for each box, the receiver if it has the box."""
        first: dict[Box, int] = {}
        for rank in (self.ranks[index], *range(self._num_ranks)):
            first.setdefault(self._boxes[index][rank], rank)
        return [(rank, box) for box, rank in first.items()]

    def _message(self, parts: Iterable[tuple[int, int, Box]]) -> _Message:
        """Return the message of (rank, matrix, box) entries; empty boxes are left out."""
        places: dict[int, list[tuple[int, Box]]] = defaultdict(list)
        sizes = [0] * self._num_ranks
        first = 0
        for rank, index, box in sorted(part for part in parts if part[2].numel):
            places[index].append((first, box))
            first += box.numel
            sizes[rank] += box.numel
        return _Message(dict(places), sizes)


def num_flops(shape: torch.Size) -> float:
    """Return the operations of one Newton-Schulz iteration on a matrix.

    The matrix is laid so that it has no more rows than columns. Three products: rows × columns × rows, rows × rows ×
    rows, rows × rows × columns.
    """
    rows, columns = sorted(shape)
    return 2.0 * rows * rows * (2 * columns + rows)
