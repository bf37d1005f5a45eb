"""Forms in which DDP sends gradients: unchanged, as bf16 or fp16, or as two thin matrices each (PowerSGD).

The stop vote is among the gradients (parallel.VotingLoss) and arrives in each form. In bf16 and fp16 a flag divided by
the number of ranks is not zero, for up to 16 million ranks. Infinity (a flag times a loss scale above 65504) is more
than zero too. PowerSGD sends vectors and scalars whole.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed exports it, but not to type checkers

from hpc_trainer.config.schema.parallel import ParallelConfig
from hpc_trainer.features.gradient_compression import CommHook
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.rng import arrays_to_tensors, tensors_to_arrays
from hpc_trainer.training.state import TrainState

# Added to the length of a column before the column is divided by it: a zero column would become NaN, and stay so.
_EPSILON = 1e-8


def add_comm_hook(module: nn.Module, parallel: ParallelConfig, *, seed: int) -> dict[str, Any]:
    """Give DDP the hook of `parallel.comm_hook`; return the hook's state by name, for the checkpoint.

    Args:
        module: under DistributedDataParallel, before its first step; any module if there is no hook.
        seed: seed of PowerSGD's first matrices, the same on all ranks.
    """
    if parallel.comm_hook is CommHook.none:
        return {}
    register: Any = module.register_comm_hook
    if parallel.comm_hook is not CommHook.powersgd:
        register(None, {CommHook.bf16: _bf16, CommHook.fp16: _fp16}[parallel.comm_hook])
        return {}
    state = PowerSgd(
        rank=parallel.powersgd_rank, start_step=parallel.powersgd_start_step,
        has_feedback=parallel.powersgd_error_feedback, seed=seed, device=next(module.parameters()).device,
    )  # fmt: skip
    register(state, _powersgd)
    return {"powersgd": state}


# Under our own names: DDP refuses torch's bf16 hook by its name where there is no NCCL, and gloo can do it.
def _bf16(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(group, bucket)


def _fp16(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.fp16_compress_hook(group, bucket)


def _powersgd(state: "PowerSgd", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


class PowerSgd:
    """torch's PowerSGD (Vogels et al. 2019, arXiv:1905.13727) with its state in the checkpoint, each rank's own.

    Unlike in torch's hook (2.13), the errors of gradients that are sent whole (vectors, small matrices, the stop vote)
    are dropped. In torch's hook such an error is each rank's distance from the mean: it grows from step to step, and
    would make an old vote count again. A step whose gradients are not finite does not change errors and matrices:
    otherwise all later ones would not be finite either.

    On a GPU torch's hook waits for the device, once for each bucket.

    Args:
        rank: columns of the matrices, ≥ 1.
        start_step: number of first steps that send whole gradients, ≥ 2.
        has_feedback: True to add what was not sent to the next gradient.
        seed: 0 to 2**32 - 1.
        device: device of the gradients.
    """

    differs_by_rank: ClassVar[bool] = True

    def __init__(self, *, rank: int, start_step: int, has_feedback: bool, seed: int, device: torch.device) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._inner: Any = PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step,
            use_error_feedback=has_feedback, warm_start=True, orthogonalization_epsilon=_EPSILON, random_seed=seed,
        )  # fmt: skip
        self._device = device

    @property
    def errors(self) -> dict[int, torch.Tensor]:
        """Gradients that this rank has not sent yet, by the number of the bucket: one value for each element in it."""
        return self._inner.error_dict  # type: ignore[no-any-return]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the mean of this bucket over all ranks, or its low-rank approximation. Collective."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        inner, index = self._inner, bucket.index()
        if inner.iter < inner.start_powerSGD_iter:
            return powerSGD_hook(inner, bucket)
        error, q = inner.error_dict.get(index), inner.q_memory_dict.get(index)
        q = None if q is None else q.clone()  # it is made orthogonal in place
        seen = _Bucket(bucket, inner.matrix_approximation_rank, inner.min_compression_rate)

        def settle(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            reduced = future.value()
            is_good = torch.isfinite(reduced).all()
            self._keep(inner.q_memory_dict[index], q, is_good)
            if inner.use_error_feedback:
                fresh = inner.error_dict[index]
                for begin, end in seen.sent_whole():
                    fresh[begin:end] = 0
                self._keep(fresh, torch.zeros_like(fresh) if error is None else error, is_good)
            return reduced

        future = powerSGD_hook(inner, seen).then(settle)
        if not bucket.buffer().is_cuda:
            # The hook sends three messages, the later two from threads of gloo: with a second bucket under way their
            # order would differ from rank to rank. NCCL's futures call back at once, in the order of the calls.
            future.wait()
        return future

    def _keep(self, fresh: torch.Tensor, before: torch.Tensor | None, is_good: torch.Tensor) -> None:
        """Restore `before` in `fresh` unless `is_good` is true; nothing waits for the device."""
        if before is None:  # the first matrix: torch's own has seen the bad gradient
            draws = torch.Generator().manual_seed(fresh.numel())
            before = torch.randn(fresh.shape, generator=draws).to(fresh)
        if before.is_cuda:
            before.record_stream(torch.cuda.current_stream(before.device))
        fresh.copy_(torch.where(is_good, fresh, before))

    def state_dict(self) -> dict[str, Any]:
        """Return the step, errors and matrices by bucket, and the state of the generator of first matrices."""
        inner = self._inner
        return {
            "step": inner.iter,
            "rng": arrays_to_tensors(inner.rng.get_state(legacy=False)),
            "errors": dict(inner.error_dict),
            "q": dict(inner.q_memory_dict),
            "p_sizes": {index: p.numel() for index, p in inner.p_memory_dict.items()},  # computed anew in each step
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises KeyError or ValueError if it is something else."""
        inner = self._inner
        inner.iter = state["step"]
        inner.rng.set_state(tensors_to_arrays(state["rng"]))
        inner.error_dict = {index: error.to(self._device, copy=True) for index, error in state["errors"].items()}
        inner.q_memory_dict = {index: matrix.to(self._device, copy=True) for index, matrix in state["q"].items()}
        inner.p_memory_dict = {
            index: inner.q_memory_dict[index].new_empty(size) for index, size in state["p_sizes"].items()
        }


class _Bucket:
    """Bucket as torch's hook takes it, which asks each gradient for its rows.

    Gradients are viewed in their order of memory: scalars as vectors of one element, convolutions in channels_last as
    matrices with their columns in another order, which does not change their rank.
    """

    def __init__(self, bucket: GradBucket, rank: int, least_gain: float) -> None:
        self._bucket, self._rank, self._least_gain = bucket, rank, least_gain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients as views of the buffer."""
        buffer = self._bucket.buffer()
        parts = []
        for gradient in self._bucket.gradients():
            begin = int(gradient.storage_offset() - buffer.storage_offset())
            flat = buffer[begin : begin + gradient.numel()]
            parts.append(flat.view(gradient.shape[0], -1) if gradient.ndim > 1 else flat)
        return parts

    def sent_whole(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) in the buffer of each gradient that is not worth two matrices, by torch's rule."""
        buffer = self._bucket.buffer()
        for gradient in self.gradients():
            rows, columns = gradient.shape[0], gradient.numel() // max(1, gradient.shape[0])
            rank = min(rows, columns, self._rank)
            if (rows + columns) * rank * self._least_gain >= rows * columns:
                begin = int(gradient.storage_offset() - buffer.storage_offset())
                yield begin, begin + gradient.numel()


class GradientCompressionAbility(Ability):
    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        state.more |= add_comm_hook(module, self.config.parallel, seed=self.config.seed)

    def memory(self, held: RankMemory, building: Building) -> None:
        parallel = self.config.parallel
        if parallel.comm_hook is not CommHook.powersgd:
            held.communication += held.trained // 2  # all buckets may be in flight at once
        elif parallel.powersgd_error_feedback:
            held.communication += held.trained  # not counted: the two thin matrices
            held.checkpoint += held.trained * building.mesh.shape.world_size


ABILITY = GradientCompressionAbility
