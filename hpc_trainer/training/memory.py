"""What a step needs of a GPU's memory, found without one: the step runs on tensors that have shapes and no content.

    python -m hpc_trainer.training.memory < frozen-configurations.jsonl    a line of JSON for each line

torch's FakeTensorMode allocates nothing, so a model of any size takes a second or some. Counted are weights, gradients,
optimizer state, averaged weights, the batch, and what a forward and a backward pass hold at their peak, which with a
large vocabulary is in the backward pass of the loss; not the CUDA context, workspaces of kernels, and what the
allocator cannot use. The step is the eager one: what the compiler fuses away is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from hpc_trainer.config.load import from_plain
from hpc_trainer.config.mesh import mesh_shape
from hpc_trainer.config.schema.parallel import CommHook, Strategy, Sync
from hpc_trainer.config.schema.precision import Dtype
from hpc_trainer.config.schema.train import Recompute, TrainConfig
from hpc_trainer.datasets.protocol import MapDataset
from hpc_trainer.training.ability import Building, abilities
from hpc_trainer.training.build import build_dataset, build_model
from hpc_trainer.training.fit_batch import LEAST_EVALUATED
from hpc_trainer.training.live_memory import LiveBytes, PassBytes, measure_pass
from hpc_trainer.training.memory_shares import Shares, find_shares
from hpc_trainer.training.muon import MuonWithAdamw, num_flops
from hpc_trainer.training.optim.build import build_optimizer, is_put_back
from hpc_trainer.training.optim.trial import try_without_ranks
from hpc_trainer.training.optim_place import PIECE
from hpc_trainer.training.parallel.fully_sharded import blocks, gathered_dtype, share_of_fp32
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.precision.formats import autocast
from hpc_trainer.training.rollback import build_guard
from hpc_trainer.training.rounds import has_buckets, holds_gradients
from hpc_trainer.training.tensor_bytes import num_bytes
from hpc_trainer.training.whole_matrices import share_work

_AUTO_NOTE = "train.micro_batch_size=auto: the figures are of two samples, and the run takes as many as fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank; `checkpoint` is that of a whole checkpoint. `micro_batch_size`: what it was found for."""

    micro_batch_size: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    gathered: int
    """FSDP: weights that are whole at a time, those of the two largest blocks and all that belong to none; or all of
    them, without reshard_after_forward. In param_dtype."""
    checkpoint: int
    update: int = 0
    """What the optimizer's step makes besides (Muon's matrices; copies by which optim=custom puts a bad step back), as
    far as that is more than activations and gathered weights, which are gone by then."""
    communication: int = 0
    """What ranks keep for what they send: PowerSGD's errors, compressed gradients, DiLoCo's weights and momenta."""
    evaluation: int = 0
    """What a batch of an evaluation needs, as far as that is more than gradients, activations and update, which are
    gone by then. Of a pipeline it is not known."""
    host: int = 0
    """Of optimizer state that is in host memory (optim.offload)."""
    note: str | None = None
    """What is a guess, and why."""


def estimate(config: TrainConfig, dataset: MapDataset | None = None) -> MemoryEstimate:
    """Runs one micro-batch and one update without memory. `config` is validated, `dataset` its training samples.

    Of `micro_batch_size=auto` it is what two samples take.

    Raises:
        HpcTrainerError: the model or the data set cannot be built; or whatever a person's own code raises.
    """
    if config.parallel.pipeline_parallel > 1:
        from hpc_trainer.training.stage_memory import largest_stage

        return largest_stage(config)
    train, world_size = config.train, config.hardware.world_size
    shape = mesh_shape(config.parallel, world_size)
    micro = train.given_micro_batch_size or 2  # batch norm takes no single sample
    dataset = dataset or build_dataset(config, "train")
    samples = dataset.__getitems__(range(1))  # really: a data set may look at its numbers
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = [torch.empty((micro, *each.shape[1:]), dtype=each.dtype) for each in samples]
        model = build_model(config, dataset)
        active, building = abilities(config), Building(config=config, device=torch.device("cpu"), dataset=dataset)
        for each in active:
            each.see_whole(model, building)
        shares = find_shares(model, shape)
        sizes = sorted((shares.num_bytes(block.parameters()) for block in blocks(model)), reverse=True)
        optimizer = build_optimizer(config.optim, model, trust=config.trust)
        loss = VotingLoss(model, label_smoothing=train.label_smoothing, chunk_size=train.loss_chunk_size)
        for each in active:
            each.on_loss(loss, building)
        found = measure(config, loss, batch, shares, shape.dp_shard)
        made, guess = update(config, optimizer)
    # Of this rank, before FSDP cuts it; and of all ranks together, as a checkpoint has it.
    weights, buffers = shares.num_bytes(model.parameters()), num_bytes(model.buffers())
    trained = shares.num_bytes(weight for weight in model.parameters() if weight.requires_grad)
    of_all = bytes_of_moments(model, optimizer, is_guess=guess is not None)
    moments = sum(size // shares.share_of(weight) for weight, size in of_all.items())
    share, narrow = shape.dp_shard, share_of_fp32(config.parallel.param_dtype)
    averaged = 0 if train.ema_decay is None else weights // share + buffers
    here, host = share_with_host(
        config, moments // (world_size if config.parallel.zero1 else share),
        sizes_here(model, shares, share), moments / max(1, trained),
    )  # fmt: skip
    sent, state = _communication(config, trained)
    gradients = _gradients(config, model, trained, share, sizes)
    kept = _activations(config, found, gradients) + num_bytes(batch)
    gathered = int(narrow * _whole_weights(config, weights, sizes))
    # Ranks that step alone save weights and moments of their own each, and rank 0's weights as everybody's.
    num_own = world_size if config.parallel.sync is not Sync.every_step else 0
    return MemoryEstimate(
        micro_batch_size=micro,
        communication=sent,
        host=host,
        weights=weights // share + buffers,
        gradients=gradients,
        optimizer=here,
        average=averaged,
        activations=kept,
        gathered=gathered,
        update=bytes_of_update(
            config, optimizer, shares, made // share, held=trained // share + here, gone=kept + gathered
        ),
        checkpoint=num_bytes(model.parameters()) * (2 if averaged else 1)
        + buffers * (world_size + bool(averaged))
        + sum(of_all.values()) * max(1, num_own)
        + weights * num_own
        + state,
        note=_AUTO_NOTE if train.is_batch_auto and guess is None else guess,
    )


def _activations(config: TrainConfig, found: PassBytes, gradients: int) -> int:
    """Bytes of a pass at its peak, beside `gradients`, what the rank's table says of those."""
    if config.optim.in_backward:  # each is there until its weight is updated; FSDP's until the block's all are
        return found.peak if config.parallel.strategy is Strategy.fsdp else max(0, found.peak - gradients)
    if holds_gradients(config, config.train.grad_accum_steps):
        return found.peak
    return max(0, found.growing - gradients)


def with_evaluation(config: TrainConfig, found: MemoryEstimate) -> MemoryEstimate:
    """`found` with what its evaluations need.

    Raises: as `estimate`.
    """
    train, world_size = config.train, config.hardware.world_size
    shape = mesh_shape(config.parallel, world_size)
    if shape.pp > 1:
        return found
    dataset = build_dataset(config, "eval")
    samples = dataset.__getitems__(range(1))
    size = found.micro_batch_size if train.is_batch_auto else max(LEAST_EVALUATED, found.micro_batch_size)
    size = min(size, -(-len(dataset) // (train.logical_ranks or shape.num_data_ranks)))
    if train.loss_chunk_size is not None:
        size = max(1, min(size, train.loss_chunk_size // samples[1].numel()))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs, targets = (torch.empty((size, *each.shape[1:]), dtype=each.dtype) for each in samples)
        model = build_model(config, dataset).eval()
        shares = find_shares(model, shape)
        with _as_gathered(config, model, [inputs]) as (cast,):
            known = [*model.parameters(), *model.buffers(), cast, targets]
            with LiveBytes(known, shares) as live, torch.no_grad(), autocast(config.precision, "cpu"):
                logits = model(cast).flatten(0, -2)
                functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    gone = found.activations + found.update + (0 if has_buckets(config) else found.gradients)
    return dataclasses.replace(found, evaluation=max(0, live.peak + num_bytes([inputs, targets]) - gone))


def _gradients(config: TrainConfig, model: nn.Module, trained: int, share: int, sizes: list[int]) -> int:
    """Bytes on a rank. `trained`: of weights, before FSDP cuts them in `share` parts; `sizes`: of blocks, falling."""
    train, parallel, world_size = config.train, config.parallel, config.hardware.world_size
    # While gradients are accumulated FSDP keeps them whole; logical ranks add them along a tree, a sum a level.
    whole = int(trained * share_of_fp32(parallel.reduce_dtype))
    gradients = whole if train.grad_accum_steps != 1 else trained // share
    if config.optim.in_backward:  # one at a time; FSDP's are whole for a block
        gradients = max(num_bytes([weight]) for weight in model.parameters() if weight.requires_grad)
        if parallel.strategy is Strategy.fsdp:
            narrow = share_of_fp32(parallel.param_dtype)
            gradients = max([gradients, *(int(narrow * size) for size in sizes[:1])])
    if train.logical_ranks:
        gradients *= 3 + int(math.log2(max(1, train.logical_ranks // world_size)))
    return gradients


def _whole_weights(config: TrainConfig, weights: int, sizes: list[int]) -> int:
    """Bytes of fp32 that FSDP has whole at a time; `sizes` of blocks, the largest first."""
    if config.parallel.strategy is not Strategy.fsdp:
        return 0
    return sum(sizes[:2]) + weights - sum(sizes) if config.parallel.reshard_after_forward else weights


def bytes_of_update(
    config: TrainConfig, optimizer: torch.optim.Optimizer, shares: Shares, made: int, *, held: int, gone: int
) -> int:
    """What the optimizer's step adds to the most that a rank holds, ≥ 0.

    Args:
        optimizer: as it is built on one rank.
        made: by a step of it, on the rank; of Muon it is reckoned here.
        held: bytes of the rank's weights that are trained, and of their moments on the device.
        gone: bytes that the forward and backward passes need beside those, and the update does not.
    """
    if isinstance(optimizer, MuonWithAdamw):
        made = _step_of_muon(config, optimizer, shares)
    return max(0, made + held * _is_put_back(config, optimizer) - gone)


def _step_of_muon(config: TrainConfig, optimizer: MuonWithAdamw, shares: Shares) -> int:
    """Bytes: weights as they were, in case the device skips the step; messages; Newton-Schulz of the largest matrix."""
    train, parallel = config.train, config.parallel
    hidden: list[torch.Tensor] = optimizer.muon.param_groups[0]["params"]
    shape = mesh_shape(parallel, config.hardware.world_size)
    held = shares.num_bytes(hidden) // (config.hardware.world_size if parallel.zero1 else shape.dp_shard)
    num_ranks = shape.dp_shard * shape.tp
    may_skip = train.max_skipped_steps is not None or config.precision.compute_dtype is Dtype.fp16
    narrow = torch.bfloat16.itemsize
    # Two at a time of: parts that are sent, matrices that came, what goes back.
    dealt = [0] * num_ranks
    for rank, each in zip(share_work([num_flops(each.shape) for each in hidden], num_ranks), hidden, strict=True):
        dealt[rank] += each.numel()
    most = max(dealt)
    messages = narrow * (most + max(held // torch.float32.itemsize, most)) if num_ranks > 1 else 0
    # The matrix, the iterate and the next one; two products of rows by rows.
    products: int = max((3 * each.numel() + 2 * min(each.shape) ** 2 for each in hidden), default=0)
    return held * may_skip + messages + narrow * products


def _communication(config: TrainConfig, trained: int) -> tuple[int, int]:
    """Bytes on a rank of what `parallel.comm_hook` and `parallel.sync` keep, and what of it is in a checkpoint."""
    parallel = config.parallel
    if parallel.sync is Sync.diloco:
        outer = trained * (2 if parallel.outer_momentum > 0 else 1)
        return outer, outer
    if parallel.comm_hook in (CommHook.bf16, CommHook.fp16):
        return trained // 2, 0  # all buckets may be on their way at a time
    if parallel.comm_hook is CommHook.powersgd and parallel.powersgd_error_feedback:
        return trained, trained * config.hardware.world_size  # but for the two thin matrices
    return 0, 0


def share_with_host(config: TrainConfig, held: int, sizes: Iterable[int], moments_per_byte: float) -> tuple[int, int]:
    """(bytes of moments on the device, and in host memory), of the `held` bytes of a rank.

    With `optim.offload` those of one piece of weights are on the device at a time.

    Args:
        sizes: bytes of the rank's parts of the weights that are trained, before ZeRO-1 gives them out.
        moments_per_byte: bytes of moments for a byte of weights, ≥ 0.
    """
    if not config.optim.offload:
        return held, 0
    sizes, host = list(sizes), held
    if config.hardware.device_type == "cuda":
        # torch pins each tensor in a block of a power of two: CachingHostAllocator, pytorch PR 171662.
        host = held * sum(1 << (size - 1).bit_length() for size in sizes if size) // max(1, sum(sizes))
    return min(held, int(max(PIECE, *sizes) * moments_per_byte)), host


def _is_put_back(config: TrainConfig, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step keeps copies of all it changes. Of SGD, AdamW and Muon, on CPUs and with ZeRO-1 none does."""
    guard = build_guard(config)
    asks_scaler = config.precision.compute_dtype is Dtype.fp16 and not guard.sees_spikes
    if config.hardware.device_type != "cuda" or not guard.is_on or asks_scaler or config.parallel.zero1:
        return False
    return is_put_back(optimizer)


def sizes_here(model: nn.Module, shares: Shares, num_parts: int) -> list[int]:
    """Bytes of this rank's parts of the weights that are trained, where FSDP cuts each into `num_parts`."""
    return [shares.num_bytes([weight]) // num_parts for weight in model.parameters() if weight.requires_grad]


def measure(
    config: TrainConfig, loss: nn.Module, batch: list[torch.Tensor], shares: Shares | None = None, num_parts: int = 1
) -> PassBytes:
    """A forward and a backward pass of one rank, weights as FSDP would compute with them. Gradients are there then.

    Args:
        num_parts: FSDP's, of which a rank keeps one.
    """
    of_blocks = None
    if config.parallel.strategy is Strategy.fsdp:
        of_blocks = [list(block.parameters()) for block in blocks(loss)]
        in_blocks = {id(weight) for group in of_blocks for weight in group}
        of_blocks.append([weight for weight in loss.parameters() if id(weight) not in in_blocks])
    with _as_gathered(config, loss, batch) as cast:
        found = measure_pass(
            loss, cast, autocast(config.precision, "cpu"), shares or Shares(1, frozenset()), of_blocks, num_parts
        )
    if config.train.recompute is Recompute.budget:
        again = int(found.kept * (1 - config.train.recompute_budget))
        return PassBytes(kept=found.kept - again, peak=found.peak - again, growing=found.growing - again)
    return found


@contextlib.contextmanager
def _as_gathered(config: TrainConfig, loss: nn.Module, batch: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Weights are what FSDP would compute with; gives the batch as it would, and gradients are fp32 again after it."""
    dtype = gathered_dtype(config.parallel)
    if dtype is None:
        yield batch
        return
    weights = [weight for weight in loss.parameters() if weight.is_floating_point()]
    held = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.data.to(dtype)
    try:
        yield [each.to(dtype) if each.is_floating_point() else each for each in batch]
    finally:
        for weight, data in zip(weights, held, strict=True):
            gradient, weight.grad = weight.grad, None
            weight.data = data
            weight.grad = None if gradient is None else gradient.to(data.dtype)


def update(config: TrainConfig, optimizer: torch.optim.Optimizer) -> tuple[int, str | None]:
    """Steps with the gradients that are there, for the state that the optimizer makes in its first one.

    Returns:
        What the next step makes besides, bytes of the whole model; and why there is no state, if it needs numbers.
    """
    try:
        optimizer.step()
    except DataDependentOutputException:
        return 0, f"optimizer is a guess (two moments): {type(optimizer).__name__} looks at numbers in its first step"
    if config.hardware.device_type == "cuda":
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # as torch chooses on a GPU: temporaries of all weights at a time
    inner = getattr(optimizer, "optim", optimizer)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    there = [*weights, *(weight.grad for weight in weights), *tree_leaves(list(inner.state.values()))]
    known = [each for each in there if isinstance(each, torch.Tensor)]
    with contextlib.suppress(DataDependentOutputException), LiveBytes(known) as live:
        optimizer.step()
        return live.peak, None
    return 0, None


def bytes_of_moments(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_guess: bool) -> dict[torch.Tensor, int]:
    """Of each weight's state after `update`, whole; of two moments, if that could not tell (`is_guess`)."""
    if is_guess:
        return {weight: 2 * num_bytes([weight]) for weight in model.parameters() if weight.requires_grad}
    return {
        weight: num_bytes(each for each in state.values() if isinstance(each, torch.Tensor))
        for weight, state in optimizer.state.items()
    }


def main() -> None:
    """Reads configurations and prints estimates, or {"error": ..}, a line each."""
    for line in sys.stdin:
        print(json.dumps(_answer(line)), flush=True)


def _answer(line: str) -> dict[str, Any]:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a person's own model may print
            config = from_plain(json.loads(line))
            try_without_ranks(config)
            return asdict(with_evaluation(config, estimate(config)))
    except Exception as error:  # a person's own code may raise anything, and the other configurations want an answer
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
