"""Profile of a window of steps: figures from time spans, and advice that follows from them. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hpc_trainer.config.gpu_types import find_gpu_type
from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.config.schema.train import Recompute, TrainConfig

STEP, DATA_WAIT, OPTIMIZER = "ProfilerStep", "data_wait", "Optimizer.step"
# Kinds of work by patterns for the names of kernels and operators; the first match counts.
_KINDS = {
    "communication": r"nccl|rccl|gloo|c10d|all_?reduce|all_?gather|reduce_scatter",
    "copies": r"memcpy (htod|dtoh)|copy.*(htod|dtoh)",
    "layout": r"nchw_?to_?nhwc|nhwc_?to_?nchw",
    "attention": r"flash|fmha|attention",
    "convolutions": r"conv|wgrad|dgrad|fprop|implicit",
    "products": r"gemm|cublas|cutlass|xmma|nvjet|aten::(addmm|mm|bmm|baddbmm|matmul|linear)|mkldnn_linear",
    "optimizer": r"multi_tensor|fused_?(adam|sgd)|foreach",
    "pointwise": r"elementwise|vectorized|reduce|norm|softmax|triton|aten::(add|mul|div|sub|copy|sum|gelu|relu)",
}
_MANY_GAPS = 5
_AMPERE = 8
# Shares of a step from which a piece of advice is worth a line.
_WAIT, _IDLE, _BETWEEN, _HEAVY, _POINTWISE, _OPTIMIZER, _COMMUNICATION, _COPIES = (
    0.05, 0.2, 0.1, 0.3, 0.3, 0.2, 0.15, 0.05,
)  # fmt: skip
_ROOMY = 0.5


@dataclass(frozen=True, slots=True)
class Span:
    """Interval from `start` to `end`, microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFigures:
    """Figures of a window of `num_steps` steps from `first_step` on, which took `wall_s` in all.

    Shares are of that time, 0 to 1. `idle_share`: on a GPU, no kernel ran; on a CPU, the main thread was in no operator
    and waited for no batch. `between_share`: outside steps, as for logging and saves. `usual_between_share`: the same
    without the longest wait between two steps, which may be the only save in this window. `longest_between`: the
    seconds of that wait, and the step after it. `work`: kind -> share of the time that the device (on a CPU the main
    thread) spent on it. `gaps`: the longest idle spans, as (milliseconds, what the main thread did).
    """

    device: str
    first_step: int
    num_steps: int
    wall_s: float
    data_wait_share: float
    idle_share: float
    between_share: float
    num_kernels: int
    work: dict[str, float] = field(default_factory=dict)
    optimizer_share: float = 0.0
    gaps: list[tuple[float, str]] = field(default_factory=list)
    peak_memory_share: float | None = None
    usual_between_share: float = 0.0
    longest_between: tuple[float, int] = (0.0, 0)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.wall_s / self.num_steps

    @property
    def has_outlier(self) -> bool:
        """True if one long wait, as for a save in this window, makes up the time between steps."""
        return self.usual_between_share < _BETWEEN <= self.between_share

    @property
    def usual_idle_share(self) -> float:
        """`idle_share` without the time of a long wait (`has_outlier`)."""
        added = self.between_share - self.usual_between_share if self.has_outlier else 0.0
        return max(0.0, self.idle_share - added)


def kind_of(name: str) -> str:
    """Return the kind of work of a kernel or an operator, by its name; `other` if none fits."""
    kinds = (kind for kind, pattern in _KINDS.items() if re.search(pattern, name, flags=re.IGNORECASE))
    return next(kinds, "other")


def merged(spans: Iterable[Span], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the union of spans, in order, cut to begin .. end."""
    union: list[tuple[float, float]] = []
    for start, stop in sorted((max(begin, span.start), min(end, span.end)) for span in spans):
        if stop <= start:
            continue
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], stop)
        else:
            union.append((start, stop))
    return union


def find_gaps(spans: Sequence[Span], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the gaps between begin and end that no span covers, in order."""
    union = merged(spans, begin, end)
    starts = [begin, *(stop for _, stop in union)]
    stops = [*(start for start, _ in union), end]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if stop > start]


def figures_of(
    *, device: str, first_step: int, steps: Sequence[Span], waits: Sequence[Span], optimizer: Sequence[Span],
    work: Sequence[Span], host: Sequence[Span], own_us: Iterable[tuple[str, float]],
    inside_s: Sequence[float], peak_memory_share: float | None = None,
) -> ProfileFigures:  # fmt: skip
    """Return the figures of a window from its spans.

    Args:
        device: `cpu` or `cuda`.
        first_step: first step of the window, counted from 1.
        steps: a span for each step of the window, in order, each with what came before it since the last.
        waits: spans in which the main thread waits for batches.
        optimizer: spans in which the main thread is in the optimizer's step.
        work: what keeps the device busy: kernels and copies, or outermost operators of the main thread.
        host: outermost operators of the main thread.
        own_us: name and microseconds of each kernel, or of each operator without those inside it.
        inside_s: seconds of each step without what came before it.
        peak_memory_share: share of the GPU's memory.
    """
    begin, end = min(step.start for step in steps), max(step.end for step in steps)
    wall = end - begin
    waited = _length(merged(waits, begin, end))
    busy = [*work, *waits] if device == "cpu" else work
    gaps = find_gaps(busy, begin, end)
    shares: dict[str, float] = {}
    for name, microseconds in own_us:
        kind = kind_of(name)
        shares[kind] = shares.get(kind, 0.0) + microseconds / wall
    longest = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:_MANY_GAPS]
    whole_s = [(step.end - step.start) / 1e6 for step in steps]
    between_s = [max(0.0, whole - inside) for whole, inside in zip(whole_s, inside_s, strict=False)]
    longest_wait = max(zip(between_s, range(first_step, first_step + len(steps)), strict=False), default=(0.0, 0))
    usual_s = wall / 1e6 - longest_wait[0]
    return ProfileFigures(
        device=device,
        first_step=first_step,
        num_steps=len(steps),
        wall_s=wall / 1e6,
        data_wait_share=waited / wall,
        idle_share=_length(gaps) / wall,
        between_share=max(0.0, 1 - sum(inside_s) * 1e6 / wall),
        usual_between_share=(sum(between_s) - longest_wait[0]) / usual_s if usual_s > 0 else 0.0,
        longest_between=longest_wait,
        num_kernels=len(work),
        work=dict(sorted(shares.items(), key=lambda share: -share[1])),
        optimizer_share=_length(merged(optimizer, begin, end)) / wall,
        gaps=[((stop - start) / 1e3, _at(start, stop, host, waits)) for start, stop in longest],
        peak_memory_share=peak_memory_share,
    )


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)


def _at(start: float, stop: float, host: Sequence[Span], waits: Sequence[Span]) -> str:
    """Return the main thread's activity from start to stop: the operator or wait that covers most, else Python."""
    best, covered = "", 0.0
    for span in [*host, *waits]:
        overlap = min(stop, span.end) - max(start, span.start)
        if overlap > covered:
            best, covered = span.name, overlap
    if covered > 0.5 * (stop - start):
        return "waiting for a batch" if best == DATA_WAIT else best
    before = max((span for span in host if span.end <= start), key=lambda span: span.end, default=None)
    return f"Python, after {before.name}" if before is not None else "Python"


def summary_lines(figures: ProfileFigures, config: TrainConfig, rank: int = 0) -> Iterator[str]:
    """Yield the figures of this rank as text, then the advice."""
    what = "the GPU" if figures.device != "cpu" else "the main thread"
    last = figures.first_step + figures.num_steps - 1
    ranks = config.hardware.world_size
    yield f"steps {figures.first_step} to {last}, {1e3 * figures.step_s:.4g} ms each, on rank {rank} of {ranks}"
    yield f"waiting for data: {figures.data_wait_share:.1%} of the time"
    yield f"{what} idle: {figures.idle_share:.1%}; {figures.num_kernels / figures.num_steps:.0f} " + (
        "kernels and copies a step" if figures.device != "cpu" else "operators a step"
    )
    between = f"{figures.between_share:.1%}"
    if figures.has_outlier:
        seconds, step = figures.longest_between
        between += f", mostly {seconds:.3g} s before step {step}; {figures.usual_between_share:.1%} without that"
    yield f"between steps (logging, saves): {between}; optimizer: {figures.optimizer_share:.1%}"
    yield "work: " + (", ".join(f"{kind} {share:.1%}" for kind, share in figures.work.items()) or "none seen")
    if figures.peak_memory_share is not None:
        yield f"peak of the GPU's memory: {figures.peak_memory_share:.0%}"
    for milliseconds, activity in figures.gaps:
        yield f"idle {milliseconds:.3g} ms: {activity}"
    hints = list(advice(figures, config))
    yield from (f"advice: {hint}" for hint in hints)
    if not hints:
        yield "advice: none; nothing stands out"


def advice(figures: ProfileFigures, config: TrainConfig) -> Iterator[str]:
    """Yield the changes to make, each with the key of the configuration and the figure that led to it.

    Changes for data come first, then those for time between steps, the device, communication and the optimizer.
    """
    yield from _data_advice(figures, config)
    if figures.usual_between_share >= _BETWEEN:
        yield (
            f"{figures.usual_between_share:.0%} of the time is between steps: log and save less often, as "
            f"monitor.log_every_steps={10 * config.monitor.log_every_steps} (now {config.monitor.log_every_steps}) and "
            f"checkpoint.every_steps={10 * config.checkpoint.every_steps} (now {config.checkpoint.every_steps})."
        )
    if figures.device == "cpu":
        yield from _cpu_advice(figures, config)
    else:
        yield from _gpu_advice(figures, config)
    share = figures.work.get("communication", 0.0)
    if share >= _COMMUNICATION and config.hardware.world_size > 1:
        yield (
            f"ranks communicate for {share:.0%} of the time: do more work between two exchanges, with a larger "
            f"train.global_batch_size with train.grad_accum_steps={2 * (config.train.grad_accum_steps or 1)} (now "
            f"{config.train.grad_accum_steps or 1}), or use fewer ranks."
        )
    if figures.optimizer_share >= _OPTIMIZER:
        yield (
            f"the optimizer takes {figures.optimizer_share:.0%} of the time: fewer updates of larger batches, "
            f"train.global_batch_size={2 * config.train.global_batch_size} (now {config.train.global_batch_size})."
        )


def _data_advice(figures: ProfileFigures, config: TrainConfig) -> Iterator[str]:
    if figures.data_wait_share < _WAIT:
        return
    now, cores = config.data.num_workers, config.hardware.cpus_per_rank
    waits = f"a step waits {1e3 * figures.data_wait_share * figures.step_s:.3g} ms for its batch, "
    waits += f"{figures.data_wait_share:.0%} of the time: "
    if now == 0 and cores == 1:  # a loader process would wait for the core that trains
        yield f"{waits}data.num_workers=1 {_cpus_key(config)}=2 (now 0, and the rank has 1 core)."
        return
    wanted = 2 if now == 0 else 2 * now
    if wanted < cores or now == 0:
        yield f"{waits}data.num_workers={wanted} (now {now}; the rank has {cores} core(s))."
    else:
        yield (
            f"{waits}data.num_workers={now} use all of the rank's {cores} core(s). Give it more "
            f"({_cpus_key(config)}={2 * cores}), or prepare samples once, before the training."
        )


def _cpus_key(config: TrainConfig) -> str:
    return f"hardware.{'cpus_per_gpu' if config.hardware.gpus_per_node else 'cpus_per_task'}"


def _cpu_advice(figures: ProfileFigures, config: TrainConfig) -> Iterator[str]:
    if figures.usual_idle_share >= _IDLE:
        yield (
            f"the main thread is in no operator for {figures.usual_idle_share:.0%} of the time: that time is Python's, "
            f"so let each call do more. {_larger(config)}" + ("" if config.train.compile else " Or train.compile=true.")
        )
    cores = config.hardware.cpus_per_rank
    heavy = _heavy(figures)
    if cores == 1 and heavy >= _HEAVY:
        yield (
            f"products and convolutions take {heavy:.0%} of the time on one core: hardware.cpus_per_task=4, or a GPU."
        )


def _gpu_advice(figures: ProfileFigures, config: TrainConfig) -> Iterator[str]:
    train, dtype = config.train, config.precision.compute_dtype
    idle = figures.usual_idle_share - figures.data_wait_share
    if idle >= _IDLE:
        per_step = figures.num_kernels / figures.num_steps
        how = "a graph of them all: train.compile=true." if not train.compile else _larger(config)
        yield f"the GPU is idle for {idle:.0%} of the time beside data, between {per_step:.0f} kernels a step: {how}"
    heavy, gpu = _heavy(figures), find_gpu_type(config.hardware.gpu_type)
    if dtype in (Dtype.fp32, Dtype.tf32) and heavy >= _HEAVY:
        is_old = gpu is not None and gpu.capability < _AMPERE
        yield (
            f"products and convolutions take {heavy:.0%} of the time in {dtype.value}: precision="
            f"{'fp16' if is_old else 'bf16'} (now {dtype.value})."
        )
    is_open = Trait.convolutions in (config.model.traits or ()) and not train.channels_last
    share = figures.work.get("convolutions", 0.0) + figures.work.get("layout", 0.0)
    if is_open and share >= _HEAVY and config.precision.format.autocast is not None:
        layout = figures.work.get("layout", 0.0)
        yield f"convolutions take {share:.0%} of the time, {layout:.1%} to reorder images: train.channels_last=true."
    pointwise = figures.work.get("pointwise", 0.0)
    if pointwise >= _POINTWISE and not train.compile and idle < _IDLE:
        yield f"element by element work takes {pointwise:.0%} of the time: fuse it, train.compile=true."
    if figures.work.get("copies", 0.0) >= _COPIES:
        yield (
            f"copies between host and GPU take {figures.work['copies']:.0%} of the time: log less often "
            f"(monitor.log_every_steps={10 * config.monitor.log_every_steps}), and let loader processes make batches "
            f"(data.num_workers={max(2, config.data.num_workers)})."
        )
    if figures.peak_memory_share is not None and figures.peak_memory_share < _ROOMY:
        has_room = f"the peak of the GPU's memory is {figures.peak_memory_share:.0%}: "
        if train.recompute is not Recompute.none:
            yield f"{has_room}train.recompute=none (now {train.recompute.value}) computes nothing twice."
        elif (train.grad_accum_steps or 1) > 1:
            yield has_room + _larger(config)


def _heavy(figures: ProfileFigures) -> float:
    return sum(figures.work.get(kind, 0.0) for kind in ("products", "convolutions", "attention"))


def _larger(config: TrainConfig) -> str:
    """Return advice for a larger micro-batch: the same global batch in fewer pieces, else more samples."""
    accum, micro = config.train.grad_accum_steps or 1, config.train.micro_batch_size or 1
    if accum > 1:
        factor = 2 if accum % 2 == 0 else accum
        return (
            f"train.micro_batch_size={micro * factor} (now {micro}) with train.grad_accum_steps={accum // factor} "
            f"(now {accum}) is the same batch in fewer pieces."
        )
    return f"train.global_batch_size={2 * config.train.global_batch_size} (now {config.train.global_batch_size})."
