"""`train.micro_batch_size=auto`: the largest micro-batch that every rank's memory holds.

Sizes are tried on the bare model, before DDP, FSDP or the compiler see it, so a trial contains no collective: no rank
waits for one whose memory ends in the middle of a backward pass. After each trial all ranks share their verdicts, and a
size counts if it fits on all of them. A trial is a forward and a backward pass. The optimizer's state, which does not
exist yet, is added from an estimate that a separate process makes on fake tensors. A trial leaves no trace: gradients,
buffers and random states are restored, and the run has the same bits as one that was given the size.

A size is searched for once and recorded in the run's journal. Later attempts take it from there, unless the global
batch size, the number of ranks or the kind of device has changed. If that size ran out of memory after all, a smaller
one is searched for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch
from torch import nn

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.mesh import divisors, holds_gradients
from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, TooLargeError
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.states import OUT_OF_MEMORY
from hpc_trainer.runtime.devices import device_name, is_out_of_memory, profile_bytes
from hpc_trainer.runtime.own_process import OwnProcess
from hpc_trainer.runtime.rank_memory import RankMemory
from hpc_trainer.runtime.tensors import num_bytes
from hpc_trainer.training.ability import Ability, Building, overridden
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.data.batches import StandIn, map_tensors, of_size, tensors_of
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import LEAST_EVALUATED, BatchOrder, BatchSizes
from hpc_trainer.training.data.protocol import MapDataset
from hpc_trainer.training.parallel.share import VotingLoss
from hpc_trainer.training.rng import random_state_kept
from hpc_trainer.training.step import autocast

if TYPE_CHECKING:
    from hpc_trainer.features.memory.estimate import MemoryEstimate


class MemoryProbe(Protocol):
    """Readings of the memory of a rank's device, in bytes. No method is collective."""

    counts: bool
    """True if the device counts a pass itself."""

    def limit(self) -> int:
        """Return the most bytes that this rank may hold."""

    def held(self) -> int:
        """Return the bytes that this rank holds now."""

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """Return the peak of `run` in bytes, less the bytes that are held now.

        Args:
            run: a forward and a backward pass.
            kept: estimates the same peak without memory, for devices that do not count themselves.

        Raises:
            Exception: any error that `run` raises.
        """

    def clear(self) -> None:
        """Release memory that nothing holds any more."""


class CudaMemory:
    """Counts of torch's caching allocator: the segments that it has reserved, fragments included."""

    counts = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def limit(self) -> int:
        """Return the free bytes and those of this rank; other processes and the CUDA context are left out.

        It is not more than the process's share of a GPU that runs of a pool share (`pool.per_gpu`).
        """
        free, total = torch.cuda.mem_get_info(self._device)
        share = torch.cuda.get_per_process_memory_fraction(self._device)
        return min(free + self.held(), int(share * total))

    def held(self) -> int:
        """Return the bytes that the allocator has reserved."""
        return torch.cuda.memory_reserved(self._device)

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """Return the rise of the allocator's own peak; waits for the device."""
        del kept
        before = self.held()
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - before)

    def clear(self) -> None:
        """Release unused memory and reset the peak; waits for the device."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


class HostMemory:
    """Memory of a rank on the CPU: no device counts a pass, so fake tensors do; the limit is the profile's.

    Args:
        hardware: profile whose memory for one rank is the limit. Without it, the machine's free memory is shared among
            its ranks.
    """

    counts = False

    def __init__(self, hardware: HardwareConfig) -> None:
        self._hardware = hardware

    def limit(self) -> int:
        """Return the profile's memory for a rank; without one, the bytes held and a rank's share of the free memory."""
        given = profile_bytes(self._hardware)
        if given is not None:
            return given
        return self.held() + psutil.virtual_memory().available // self._hardware.ranks_per_node

    def held(self) -> int:
        """Return the resident set of this process, torch's libraries included."""
        return int(psutil.Process().memory_info().rss)

    def measure(self, run: Callable[[], None], kept: Callable[[], int]) -> int:
        """Count the bytes of `run` before it runs, because the kernel would kill a process that takes too much."""
        size = kept()
        if self.held() + size <= self.limit():
            run()
        return size

    def clear(self) -> None:
        """Collect reference cycles."""
        gc.collect()


def probe_of(device: torch.device, hardware: HardwareConfig) -> MemoryProbe:
    """Return the probe of a rank's device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory(hardware)


_LEAST_COUNTED = 2  # batch norm refuses a single sample
_MOST_REFUSED = 3
_ESTIMATE_S = 120.0
"""Seconds after which the estimate of a step is given up."""
_FITS, _TOO_LARGE = "fits", "too large"


def find_sizes(loss: VotingLoss, building: Building) -> BatchSizes:
    """Return the sizes that this run found earlier, or search for them now. Collective.

    Args:
        loss: bare model and loss on the device; its blocks recompute if they are to.

    Raises:
        TooLargeError: not even the smallest micro-batch fits on some rank.
        ConfigError: the model's forward pass is collective by itself.
    """
    run, config = building.run, building.config
    assert run is not None
    _check_trial_is_possible(loss)
    place = {
        "global_batch_size": config.train.global_batch_size,
        "world_size": run.world_size,
        "devices": sorted(set(run.group.gather(device_name(run.device)))),
    }
    recorded = run.group.broadcast(_recorded(run, place) if run.is_rank_zero else None)
    sizes_before = recorded.get("found")
    sizes = _sizes(sizes_before) if sizes_before else _find(loss, building, place, recorded.get("below"))
    run.describe(fit={"micro_batch_size": sizes.micro_batch_size, "grad_accum_steps": sizes.grad_accum_steps})
    return sizes


def _check_trial_is_possible(loss: nn.Module) -> None:
    for name, module in loss.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"train.micro_batch_size=auto tries sizes on each rank by itself, and {name} (SyncBatchNorm) waits for "
                "the other ranks in its forward pass. Use a number."
            )


def _recorded(run: RunContext, place: dict[str, Any]) -> dict[str, Any]:
    """Return on rank 0 {"found": ..}, or {"below": size} if that size ran out of memory later, or {}."""
    journal = Journal(run.paths)
    here = [fit for fit in journal.fits() if all(fit[1].get(key) == value for key, value in place.items())]
    if not here:
        return {}
    attempt, sizes = here[-1]
    ended = [record.cause for record in journal.read() if record.attempt >= attempt]
    return {"below": sizes["micro_batch_size"]} if OUT_OF_MEMORY in ended else {"found": sizes}


def _sizes(recorded: dict[str, Any]) -> BatchSizes:
    return BatchSizes(**{field.name: int(recorded[field.name]) for field in dataclasses.fields(BatchSizes)})


def _find(loss: VotingLoss, building: Building, place: dict[str, Any], below: int | None) -> BatchSizes:
    """Search for the sizes and record them. Collective."""
    run, config = building.run, building.config
    assert run is not None
    share = config.train.global_batch_size // run.world_size
    choice = divisors(share)
    if below is not None:
        choice = [size for size in choice if size < below] or choice[:1]
    trials = Trials(
        config=config, run=run, loss=loss, dataset=building.dataset, probe=probe_of(run.device, config.hardware),
        prepare=overridden(building.abilities, "inputs"),
    )  # fmt: skip
    with contextlib.closing(trials), trials.unseen():
        micro = largest(choice, trials.fits)
        # Batch norm refuses a single sample. Any other error of a small batch is an error of all sizes.
        for least in choice[: _MOST_REFUSED - 1]:
            if micro is None and least in trials.refusals:
                micro = largest(choice[choice.index(least) + 1 :], trials.fits)
        if micro is None:
            raise trials.failure()
        wished = max(LEAST_EVALUATED, micro)
        evaluated = wished if trials.fits(wished, is_evaluation=True) else micro
    sizes = BatchSizes(micro_batch_size=micro, grad_accum_steps=share // micro, eval_batch_size=evaluated)
    if run.is_rank_zero:
        Journal(run.paths).fit(run.attempt, {**place, **dataclasses.asdict(sizes)})
        print(
            f"train.micro_batch_size=auto: {micro} of the {share} samples of a rank fit ({trials.figures(micro)}); "
            f"grad_accum_steps={sizes.grad_accum_steps}. Tried: {', '.join(map(str, sorted(trials.needs)))}."
        )
    return sizes


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of `sizes` (ascending) that fits, by doubling and then bisecting; None if none fits.

    If a size fits, all smaller sizes are taken to fit too.
    """
    good, bad, at = -1, len(sizes), 0
    while bad - good > 1:
        if fits(sizes[at]):
            good = at
        else:
            bad = at
        if bad < len(sizes):
            at = (good + bad) // 2
        else:
            at = min(max(good + 1, bisect_left(sizes, 2 * sizes[good])), len(sizes) - 1)
    return sizes[good] if good >= 0 else None


@dataclass(slots=True, kw_only=True)
class Trials:
    """Trial passes of one size after the other, and the verdicts of all ranks.

    `needs`: size -> bytes that this rank needs with it, everything included, for the sizes that were measured.
    `refusals`: size -> what some rank's pass raised, other than running out of memory.
    """

    config: TrainConfig
    run: RunContext
    loss: VotingLoss
    dataset: MapDataset
    probe: MemoryProbe
    prepare: Sequence[Callable[[torch.Tensor], torch.Tensor]] = ()
    needs: dict[int, int] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    _sample: Any = None
    _state: int = 0
    _update: int = 0
    _is_countable: bool = True
    _estimates: dict[int, MemoryEstimate | None] = field(default_factory=dict)
    _estimator: OwnProcess = field(default_factory=lambda: OwnProcess("hpc_trainer.features.memory.estimate"))
    _least_too_large: int | None = None

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Prepare for trials, and restore afterwards what passes change: random states and buffers."""
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.loss.buffers()]
        with random_state_kept():
            (self._state, self._update), self._sample = self._bytes_besides(), self._one_sample()
            try:
                yield
            finally:
                for buffer, before in buffers:
                    buffer.detach().copy_(before)

    def fits(self, size: int, *, is_evaluation: bool = False) -> bool:
        """Return True if this size fits on all ranks. Collective: every rank calls it, however its own trial went."""
        self.run.beat()
        if not self.probe.counts and not is_evaluation:
            self._estimate(size)  # here because it is collective
        verdict = self._try(size, is_evaluation)
        verdicts = self.run.group.gather(verdict)
        if _TOO_LARGE in verdicts and not is_evaluation:
            self._least_too_large = min(size, self._least_too_large or size)
        others = sorted({verdict for verdict in verdicts if verdict not in (_FITS, _TOO_LARGE)})
        if others:
            self.refusals[size] = others[0]
            if self.run.is_rank_zero:
                print(f"train.micro_batch_size=auto: {size} samples cannot be used: {others[0]}")
        return all(verdict == _FITS for verdict in verdicts)

    def failure(self) -> Exception:
        """Return the error that says why no size could be used."""
        if self._least_too_large is None:
            return ConfigError(f"train.micro_batch_size=auto found no size that the model takes: {self.refusals}")
        size = self._least_too_large
        memory = {"need": self.needs.get(size), "limit": self.probe.limit(), "micro_batch_size": size}
        return TooLargeError(
            f"train.micro_batch_size=auto: not even {size} sample(s) fit on each rank ({self.figures(size)}).", memory
        )

    def figures(self, size: int) -> str:
        """Return text such as `12.1 of 79.2 GB on this rank, 10% to be left free`."""
        need = f"{self.needs[size] / 1e9:.3g}" if size in self.needs else "more than the"
        margin = self.config.train.memory_margin
        return f"{need} of {self.probe.limit() / 1e9:.3g} GB on this rank, {margin:.0%} to be left free"

    def _try(self, size: int, is_evaluation: bool) -> str:
        """Return the verdict of this rank alone. Not collective."""
        self.probe.clear()
        held = self.probe.held()
        try:
            run = (lambda: self._forward(size)) if is_evaluation else (lambda: self._pass(size))
            passing = self.probe.measure(run, lambda: self._kept(size, is_evaluation))
            need = held + self._state + (passing if is_evaluation else max(passing, self._update))
            if not is_evaluation:
                self.needs[size] = need
            return _FITS if need <= self.probe.limit() * (1 - self.config.train.memory_margin) else _TOO_LARGE
        except Exception as error:
            verdict = _TOO_LARGE if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the pass
            return verdict
        finally:
            for weight in self.loss.parameters():
                weight.grad = None
            self.probe.clear()

    def _accum(self, size: int) -> int:
        """Return the number of forward passes in a step with this size."""
        return max(1, self.config.train.global_batch_size // self.run.world_size // size)

    def _pass(self, size: int) -> None:
        if holds_gradients(self.config, self._accum(size)):  # later passes start with the earlier ones' gradients
            for weight in self.loss.parameters():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        batch = self._batch(size)
        with autocast(self.config.precision, self.run.device.type):
            loss = self.loss(batch)
        loss.backward()

    def _forward(self, size: int) -> None:
        modes = [(module, module.training) for module in self.loss.modules()]
        self.loss.eval()
        try:
            with torch.no_grad(), autocast(self.config.precision, self.run.device.type):
                self.loss(self._batch(size))
        finally:
            for module, mode in modes:
                module.training = mode

    def _kept(self, size: int, is_evaluation: bool) -> int:
        """Return an estimate of a pass's peak, gradients and batch included, for a device that does not count."""
        if is_evaluation:
            return size * num_bytes(tensors_of(self._batch(1)))
        trained = [weight for weight in self.loss.parameters() if weight.requires_grad]
        estimate = self._estimate(size)
        if estimate is not None:
            return estimate.activations + max(estimate.gradients, num_bytes(trained))  # trials are not sharded
        from hpc_trainer.features.memory.estimate import measure

        batch = self._batch(size)
        return measure(self.config, self.loss, batch).peak + num_bytes(tensors_of(batch)) + num_bytes(trained)

    def _batch(self, size: int) -> Any:
        assert self._sample is not None
        if not self.loss.task.takes_pairs:
            real = of_size(self.dataset, self.loss.task, self._sample, size)
            return map_tensors(real, lambda value: value.to(self.run.device))
        inputs, targets = (
            tensor.to(self.run.device).repeat(size, *[1] * (tensor.ndim - 1)) for tensor in self._sample
        )  # fmt: skip
        for prepare in self.prepare:
            inputs = prepare(inputs)
        return inputs, targets

    def _one_sample(self) -> Any:
        """Return one sample as the loader would yield it, with augmentation if the run uses any."""
        train, run = self.config.train, self.run
        if getattr(self.dataset, "stream", None) is not None:
            return self.dataset.__getitems__(range(1))
        order = BatchOrder(len(self.dataset), train.global_batch_size, self.config.seed)
        layout = {"rank": run.rank, "world_size": run.world_size, "num_workers": 0}
        accum = train.global_batch_size // run.world_size
        with train_batches(
            self.dataset, order, first_step=0, num_steps=1, micro_batch_size=1, grad_accum_steps=accum, **layout
        ) as batches:
            return next(batches)

    def _bytes_besides(self) -> tuple[int, int]:
        """Return (bytes that training holds and trials do not, least bytes that an update needs in addition).

        Training holds the optimizer's state, the averaged weights, and FSDP's shards in place of whole weights.
        """
        weights, buffers = num_bytes(self.loss.model.parameters()), num_bytes(self.loss.model.buffers())
        estimate = self._estimate(_LEAST_COUNTED)
        if estimate is not None:
            held = estimate.optimizer + estimate.average + estimate.gathered + estimate.weights - weights - buffers
            return held, estimate.gradients + estimate.activations + estimate.update if estimate.update else 0
        averaged = 0 if self.config.train.ema_decay is None else weights + buffers
        return 2 * weights + averaged, 0

    def close(self) -> None:
        """End the process that estimates."""
        self._estimator.close()

    def _estimate(self, size: int) -> MemoryEstimate | None:
        """Return rank 0's estimate of a step on all ranks; None if the model does not run on fake tensors.

        The first call for a size is collective; later ones return the same estimate.
        """
        if size not in self._estimates:
            answer = self._asked(size) if self.run.is_rank_zero and self._is_countable else {"error": ""}
            self._estimates[size] = self._heard(size, self.run.group.broadcast(answer))
        return self._estimates[size]

    @random_state_kept()
    def _asked(self, size: int) -> dict[str, Any]:
        """Return the estimate of a separate process: the user's code never meets a fake tensor in a rank."""
        train = dataclasses.replace(self.config.train, micro_batch_size=size, grad_accum_steps=self._accum(size))
        try:
            samples = StandIn.of(self.dataset, self.loss.task, size).to_plain()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        config = to_plain(dataclasses.replace(self.config, train=train))
        return self._estimator.ask({"config": config, "samples": samples}, _ESTIMATE_S)

    def _heard(self, size: int, answer: dict[str, Any]) -> MemoryEstimate | None:
        if "error" not in answer:
            from hpc_trainer.features.memory.estimate import (
                MemoryEstimate,
            )  # late: it imports the loop, and fake tensors

            return MemoryEstimate(**answer)
        if size == _LEAST_COUNTED:
            self._is_countable = False
            if self.run.is_rank_zero:
                print(f"train.micro_batch_size=auto: two moments a weight are assumed ({answer['error']}).")
        return None


_NOTE = "the figures are of two samples, and the run takes as many as fit"


class AutoBatchAbility(Ability):
    def sizes(self, sizes: BatchSizes, loss: VotingLoss, building: Building) -> BatchSizes:
        """Return the batch sizes that the search found. Collective.

        An estimate has no memory to try: its evaluation batch is as large as the micro-batch.
        """
        if building.run is None:
            return dataclasses.replace(sizes, eval_batch_size=sizes.micro_batch_size)
        return find_sizes(loss, building)

    def memory(self, held: RankMemory, building: Building) -> None:
        held.note = held.note or f"train.micro_batch_size=auto: {_NOTE}"


ABILITY = AutoBatchAbility
