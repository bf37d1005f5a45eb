"""Estimate of the GPU memory of a step, made without a GPU: the step runs on tensors that have shapes but no content.

    python -m hpc_trainer.features.memory.estimate < questions.jsonl    a line of JSON for each (runtime/own_process.py)

A fake tensor allocates nothing, so an estimate takes a few seconds for a model of any size. Weights, gradients,
optimizer state, averaged weights, the batch, and the peak of a forward and a backward pass are counted. With a large
vocabulary this peak is in the backward pass of the loss. The CUDA context, workspaces of kernels, and memory that the
allocator cannot use are not counted. The step is eager: tensors that the compiler would fuse away are counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_trainer.config.load import from_plain
from hpc_trainer.config.mesh import has_buckets, holds_gradients, mesh_shape
from hpc_trainer.config.schema.parallel import Dtype, Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.models.parts import blocks
from hpc_trainer.runtime.fake_tensors import build_fake, fake_tensors, reads_values
from hpc_trainer.runtime.own_process import answer_each
from hpc_trainer.runtime.rank_memory import RankMemory, Shares
from hpc_trainer.runtime.tensors import num_bytes
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.ability import Building, abilities
from hpc_trainer.training.build import build_dataset, build_loss, build_model, build_task, make_optimizer
from hpc_trainer.training.data.batches import StandIn, map_tensors, of_size, tensors_of, without_content
from hpc_trainer.training.data.order import BatchSizes
from hpc_trainer.training.data.protocol import MapDataset
from hpc_trainer.training.parallel.fully_sharded import bytes_added_up, bytes_gathered, gathered_dtype
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.step import autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """Bytes of one micro-batch on one rank, besides weights, buffers and the batch.

    `kept`: alive when the forward pass has ended. `peak`: the most at a time, without complete gradients. `growing`:
    the most at a time, with the gradients that are complete by then.
    """

    kept: int
    peak: int
    growing: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes of tensors made and freed within it.

    Args:
        known: tensors that existed before; they do not count.
        shares: how much of each new tensor belongs to this rank.
    """

    def __init__(self, counted: Iterable[torch.Tensor] = (), shares: Shares | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shares = shares or Shares()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self.now = self.besides = 0
        """Bytes alive, and the bytes that `growing` counts in addition."""
        self.peak = self.growing = 0
        for tensor in counted:
            self._add(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the tensors that it makes."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, 1)
        self.peak = max(self.peak, self.now)
        self.growing = max(self.growing, self.now + self.besides)
        return result

    def _add(self, tensor: torch.Tensor, counts: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = counts * storage.nbytes() // self.shares.share_of_activations
        self._storages[key] = weakref.ref(storage, lambda _: self._drop(key))
        self._sizes[key] = size
        self.now += size

    def _drop(self, key: int) -> None:
        del self._storages[key]
        self.now -= self._sizes.pop(key)


def measure(
    config: TrainConfig, loss: nn.Module, batch: Any, shares: Shares | None = None, num_parts: int = 1
) -> PassBytes:
    """Measure a forward and a backward pass of one rank, with weights as FSDP would compute with them.

    Afterwards each weight that got a gradient has one without content.

    Args:
        shares: how tensor parallelism divides activations.
        num_parts: number of FSDP shards, of which a rank keeps one.
    """
    with as_gathered(config, loss, batch) as cast:
        live = LiveBytes([*loss.parameters(), *loss.buffers(), *tensors_of(cast)], shares)
        with _gradients_taken(config, loss, live, num_parts) as complete, live:
            with autocast(config.precision, "cpu"):
                value = loss(cast)
            kept = live.now
            value.backward()
            del value
        for weight in complete:
            weight.grad = torch.empty_like(weight)
    return PassBytes(kept=kept, peak=live.peak, growing=live.growing)


@contextlib.contextmanager
def as_gathered(config: TrainConfig, loss: nn.Module, batch: Any) -> Iterator[Any]:
    """Hold weights in the format in which FSDP computes, and yield the batch in that format.

    Afterwards weights and gradients have the weights' own format again.
    """
    dtype = gathered_dtype(config.parallel)
    if dtype is None:
        yield batch
        return
    weights = [weight for weight in loss.parameters() if weight.is_floating_point()]
    held = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.data.to(dtype)
    try:
        yield map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    finally:
        for weight, data in zip(weights, held, strict=True):
            gradient, weight.grad = weight.grad, None
            weight.data = data
            weight.grad = None if gradient is None else gradient.to(data.dtype)


@contextlib.contextmanager
def _gradients_taken(
    config: TrainConfig, loss: nn.Module, live: LiveBytes, num_parts: int
) -> Iterator[list[nn.Parameter]]:
    """Take each gradient away when it is complete, and count it in `live.besides` instead.

    Yields the weights whose gradients are complete. FSDP's gradients stay whole until the last one of their block is
    complete.
    """
    trained = [weight for weight in loss.parameters() if weight.requires_grad]
    group_of = _messages_of(loss) if config.parallel.strategy is Strategy.fsdp else {}
    missing: dict[tuple[int, ...], set[int]] = {group: set(group) for group in group_of.values()}
    whole: dict[tuple[int, ...], int] = {}
    complete: list[nn.Parameter] = []

    def take(weight: torch.Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        weight.grad = None
        complete.append(weight)
        size = live.shares.num_bytes([weight])
        group = group_of.get(id(weight), (id(weight),))
        whole[group] = whole.get(group, 0) + size
        live.besides += size
        left = missing.get(group, set())
        left.discard(id(weight))
        if not left and num_parts > 1:  # in the shards' format, whatever that of the whole was
            part = whole[group] // weight.itemsize * config.precision.format.weight_bytes // num_parts
            live.besides += part - whole[group]

    handles = [weight.register_post_accumulate_grad_hook(take) for weight in trained]  # type: ignore[no-untyped-call]
    try:
        yield complete
    finally:
        for handle in handles:
            handle.remove()


def _messages_of(loss: nn.Module) -> dict[int, tuple[int, ...]]:
    """Map each weight's id to the ids in its FSDP message: the weights of its block, or all outside blocks."""
    messages = {
        id(weight): tuple(map(id, block.parameters())) for block in blocks(loss) for weight in block.parameters()
    }
    rest = tuple(id(weight) for weight in loss.parameters() if id(weight) not in messages)
    return messages | dict.fromkeys(rest, rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank in bytes.

    `checkpoint` is the size of a whole checkpoint. `micro_batch_size` is the size that the estimate is for.
    """

    micro_batch_size: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    gathered: int
    """Weights that FSDP holds whole at a time, in param_dtype: the two largest blocks and the weights outside blocks;
    all weights without reshard_after_forward."""
    checkpoint: int
    update: int = 0
    """Bytes that the optimizer's step allocates in addition (Muon's matrices; copies that undo a bad step; moments that
    optim.offload brings from host memory).
    Only what exceeds activations and gathered weights counts, as these are freed by then."""
    communication: int = 0
    """Buffers that ranks keep for communication: PowerSGD's errors, compressed gradients, DiLoCo's weights and
    momenta."""
    evaluation: int = 0
    """Memory of an evaluation batch, as far as it exceeds gradients, activations and update, which are freed by then.
    It is unknown for a pipeline (0)."""
    host: int = 0
    """Optimizer state in host memory (optim.offload)."""
    num_evaluated_parts: int = 1
    """Number of ranks that share the samples of an evaluation."""
    note: str | None = None
    """Note that says which figure is a guess, and why."""


def estimate(config: TrainConfig, dataset: MapDataset | None = None) -> MemoryEstimate:
    """Estimate the memory of one micro-batch and one update without allocating it.

    If the micro-batch size is still to be found, the estimate is for two samples. The largest pipeline stage counts.

    Args:
        config: a validated configuration.
        dataset: its training samples; None: they are built.

    Raises:
        HpcTrainerError: the model or the data set cannot be built.
        Exception: any error that the user's own code raises.
    """
    shape = mesh_shape(config.parallel, config.hardware.world_size)
    task = build_task(config)
    dataset = dataset or build_dataset(config, "train", task, abilities(config))
    samples = dataset.__getitems__(range(1))  # on real tensors: a data set may read their values
    firsts = range(0, shape.world_size, shape.world_size // shape.pp)  # the first rank of each stage
    estimates = [_on_rank(_building(config, task, dataset, samples, Mesh(shape=shape, rank=rank))) for rank in firsts]
    seen: set[str] = set()
    checkpoint = 0
    for rank_estimate, sizes in estimates:
        new = sum(size for name, size in sizes.items() if name not in seen)
        checkpoint += int(rank_estimate.checkpoint * (new / max(1, sum(sizes.values()))))
        seen |= sizes.keys()
    largest = max((rank_estimate for rank_estimate, _ in estimates), key=_total)
    return dataclasses.replace(largest, checkpoint=checkpoint)


def _total(memory: MemoryEstimate) -> int:
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.average, memory.gathered)
    return sum(parts) + memory.activations + memory.update


def _on_rank(building: Building) -> tuple[MemoryEstimate, dict[str, int]]:
    """Return (estimate of one rank, bytes of its model's tensors by name)."""
    config, mesh = building.config, building.mesh
    micro = config.train.given_micro_batch_size or 2  # batch norm refuses a single sample
    real = of_size(building.dataset, building.task, building.samples, micro)
    with fake_tensors():
        trial: nn.Module
        batch = without_content(real)
        loss, decays = _build_loss(building)
        optimizer = make_optimizer(building, loss.model, decays)
        trial = loss
        for ability in building.abilities:
            trial, batch = ability.trial(trial, batch, building)
        passes = measure(config, trial, batch, building.shares, mesh.shape.dp_shard)
        made, guess = _update(config, optimizer)
    held = _held(building, loss.model, optimizer, passes, num_bytes(tensors_of(batch)), made, guess)
    for ability in building.abilities:
        ability.memory(held, building)
    there = held.trained // held.num_parts + held.optimizer_here + held.brought
    is_put_back = held.is_put_back and not held.is_skipped_by_scaler
    return MemoryEstimate(
        micro_batch_size=micro,
        communication=held.communication,
        host=held.host,
        weights=held.weights // held.num_parts + held.buffers,
        gradients=held.gradients,
        optimizer=held.optimizer_here,
        average=held.average,
        activations=held.activations,
        gathered=held.gathered,
        update=max(0, held.made + held.brought + there * is_put_back - held.activations - held.gathered),
        checkpoint=held.checkpoint,
        num_evaluated_parts=held.num_evaluated_parts,
        note=held.note,
    ), {name: tensor.nbytes for name, tensor in loss.model.state_dict().items()}


def _build_loss(building: Building) -> tuple[VotingLoss, Collection[bool]]:
    return build_loss(building, build_fake(partial(build_model, building.config, building.dataset)))


def _building(config: TrainConfig, task: Task, dataset: MapDataset, samples: Any, mesh: Mesh) -> Building:
    return Building(
        config=config, device=torch.device("cpu"), task=task, dataset=dataset, samples=samples, mesh=mesh,
        abilities=abilities(config),
    )  # fmt: skip


def _held(
    building: Building, model: nn.Module, optimizer: torch.optim.Optimizer, passes: PassBytes, batch: int, made: int,
    guess: str | None,
) -> RankMemory:  # fmt: skip
    """Return the memory of one rank before features change it.

    Args:
        passes: bytes of a forward and a backward pass.
        batch: bytes of the batch.
        made: bytes that an optimizer step allocates, for the whole model.
        guess: why the optimizer's moments are a guess; None if they are counted.
    """
    config, shape, shares = building.config, building.mesh.shape, building.shares
    train, parallel = config.train, config.parallel
    weights, buffers = shares.num_bytes(model.parameters()), num_bytes(model.buffers())
    trained = shares.num_bytes(weight for weight in model.parameters() if weight.requires_grad)
    sizes = sorted((shares.num_bytes(block.parameters()) for block in blocks(model)), reverse=True)
    of_all = _bytes_of_moments(model, optimizer, is_guess=guess is not None)
    saved = _saved_bytes(model)
    whole = sum(sizes[:2]) + weights - sum(sizes) if parallel.reshard_after_forward else weights
    return RankMemory(
        model=model,
        optimizer=optimizer,
        shares=shares,
        num_parts=shape.dp_shard,
        note=guess,
        blocks=sizes,
        weights=weights,
        buffers=buffers,
        trained=trained,
        moments=sum(size // shares.share_of(weight) for weight, size in of_all.items()),
        all_moments=sum(of_all.values()),
        moment_parts=shape.dp_shard,
        # FSDP keeps gradients whole while it accumulates them.
        gradients=trained // shape.dp_shard if train.grad_accum_steps == 1 else bytes_added_up(trained, config),
        has_gradients=holds_gradients(config, train.grad_accum_steps),
        kept=passes.kept,
        peak=passes.peak,
        growing=passes.growing,
        batch=batch,
        gathered=bytes_gathered(whole, config) if parallel.strategy is Strategy.fsdp else 0,
        made=made // shape.dp_shard,
        is_skipped_by_scaler=config.precision.compute_dtype is Dtype.fp16,
        saved=saved,
        checkpoint=saved + buffers * (shape.world_size // shape.pp) + sum(of_all.values()),
        num_evaluated_parts=shape.num_data_ranks,
    )


def _saved_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights in the state_dict, which leaves out the base weights of adapters."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return num_bytes(weight for weight in model.parameters() if id(weight) in saved)


def with_evaluation(config: TrainConfig, memory: MemoryEstimate) -> MemoryEstimate:
    """Return `memory` with that of an evaluation batch added.

    Raises: as `estimate`.
    """
    shape = mesh_shape(config.parallel, config.hardware.world_size)
    if shape.pp > 1:
        return memory
    task = build_task(config)
    dataset = build_dataset(config, "eval", task, abilities(config))
    samples = dataset.__getitems__(range(1))
    building = _building(config, task, dataset, samples, Mesh(shape=shape, rank=0))
    building.eval_set = dataset
    with fake_tensors():
        loss, _ = _build_loss(building)
    sizes = BatchSizes.of(memory.micro_batch_size, config.train.grad_accum_steps or 1)
    for ability in building.abilities:
        sizes = ability.sizes(sizes, loss, building)
    size = min(sizes.eval_batch_size, -(-len(dataset) // memory.num_evaluated_parts))
    real = of_size(dataset, task, samples, size)
    with fake_tensors():
        batch, model = without_content(real), loss.model.eval()
        with as_gathered(config, model, batch) as cast:
            counted = [*model.parameters(), *model.buffers(), *tensors_of(cast)]
            live, formats = LiveBytes(counted, building.shares), autocast(config.precision, "cpu")
            # The user's task may read a value after its forward pass, as num_targets does; the peak is then known.
            with contextlib.suppress(DataDependentOutputException), live, torch.no_grad(), formats:
                task.sums(model, cast, num_samples=size, dtype=torch.float64, metrics={})
    gone = memory.activations + memory.update + (0 if has_buckets(config) else memory.gradients)
    return dataclasses.replace(memory, evaluation=max(0, live.peak + num_bytes(tensors_of(batch)) - gone))


def _update(config: TrainConfig, optimizer: torch.optim.Optimizer) -> tuple[int, str | None]:
    """Run one optimizer step, which makes the optimizer's state, and count the bytes of the next step.

    Returns:
        (bytes that the next step allocates, for the whole model; why there is no state, or None). There is no state if
        the first step reads the values of tensors.
    """
    try:
        optimizer.step()
    except DataDependentOutputException:
        return 0, f"optimizer is a guess (two moments): {type(optimizer).__name__} reads tensors in its first step"
    if config.hardware.device_type == "cuda":
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # torch's choice on a GPU: temporaries of all weights at a time
    inner = getattr(optimizer, "optim", optimizer)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    there = [*weights, *(weight.grad for weight in weights), *tree_leaves(list(inner.state.values()))]
    counted = [tensor for tensor in there if isinstance(tensor, torch.Tensor)]
    with contextlib.suppress(DataDependentOutputException), LiveBytes(counted) as live:
        optimizer.step()
        return live.peak, None
    return 0, None


def _bytes_of_moments(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_guess: bool) -> dict[torch.Tensor, int]:
    """Return the bytes of each weight's optimizer state, unsharded; those of two moments if `is_guess`."""
    if is_guess:
        return {weight: 2 * num_bytes([weight]) for weight in model.parameters() if weight.requires_grad}
    return {
        weight: num_bytes(value for value in state.values() if isinstance(value, torch.Tensor))
        for weight, state in optimizer.state.items()
    }


def main() -> None:
    """Answer {"config": .., "samples": .., "has_evaluation": ..} with an estimate, or {"error": ..}, a line each."""
    import torch._dynamo  # noqa: F401  (fake tensors import it late: once for all questions, not in each fork)

    answer_each(_answer)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one question of `main`.

    `samples` is a `StandIn` for the training samples; without it they are built.
    """
    config = from_plain(asked["config"])
    mesh = Mesh(shape=mesh_shape(config.parallel, config.hardware.world_size), rank=0)
    for ability in abilities(config):
        ability.begin(mesh, None)
    samples = asked.get("samples")
    try:
        memory = estimate(config, StandIn.from_plain(samples) if samples else None)
    except Exception as error:
        if not reads_values(error):
            raise
        return {
            "error": "the model or the task reads the value of a tensor, and tensors of an estimate have no values: "
            f"{error}"
        }
    return asdict(with_evaluation(config, memory) if asked.get("has_evaluation") else memory)


if __name__ == "__main__":
    main()
