"""Rules about GPUs that could compute faster, and about requested resources that are not used."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from hpc_trainer.config.gpu_types import find_gpu_type
from hpc_trainer.config.mesh import divisors, num_parts
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.config.schema.train import CompileMode, Recompute
from hpc_trainer.observe.facts import IDLE_GPU, LEAST_LOST_S, Change, Facts, Finding, Gain, RankUse, Rule
from hpc_trainer.observe.rules_of_time import cpus_key
from hpc_trainer.observe.telemetry import HARMFUL, mean_of
from hpc_trainer.runtime.pace import nearest_rank

_ROOMY, _FULL = 0.5, 0.85  # of the GPU's memory
_KEPT_BY_FULL = 0.4  # of the activations: config/rules/memory.py
_TIME_OF_FULL = 4 / 3
_LITTLE_WORK, _LITTLE_WAIT = 0.5, 0.1
_THROTTLED = 0.3  # of the samples
_LITTLE, _MUCH = 0.95, 0.6  # of the highest clock
_AT_LIMIT = "at its power limit"
_SAMPLES = 5
_AMPERE = 8
_CAPPED = ("power_cap",)


def _memory(facts: Facts) -> tuple[float, float, float] | None:
    """Return the bytes of activations, of all else at the peak, and of a GPU's limit; None if not measured."""
    memory = facts.memory
    if facts.config.hardware.device_type != "cuda" or not {"activations", "peak", "limit"} <= memory.keys():
        return None
    activations, peak, limit = memory["activations"], memory["peak"], memory["limit"]
    return (activations, max(0.0, peak - activations), limit) if activations > 0 and limit > 0 else None


def _utilisation(facts: Facts) -> float | None:
    """Return the mean utilisation of GPUs that are not idle; another rule reports idle GPUs."""
    shares = [rank.utilisation for rank in facts.ranks if rank.utilisation is not None and rank.samples >= _SAMPLES]
    return mean_of([share for share in shares if share >= IDLE_GPU] or shares)


def _recompute(facts: Facts) -> Iterator[Finding]:
    memory, train = _memory(facts), facts.config.train
    if memory is None or train.recompute is Recompute.none:
        return
    activations, others, limit = memory
    wanted = others + activations / _KEPT_BY_FULL
    if wanted > _FULL * limit:
        return
    now, then = (others + activations) / limit, wanted / limit
    gain = Gain(share=1 - 1 / _TIME_OF_FULL, is_bound=train.recompute is not Recompute.full)
    seen = f"activations are computed twice, and {now:.0%} of the memory is used; without it {then:.0%} would be"
    yield Finding(seen, [Change({"train.recompute": Recompute.none}, gain)])


def _micro_batch(facts: Facts) -> Iterator[Finding]:
    memory, config = _memory(facts), facts.config
    micro, accum = config.train.given_micro_batch_size, config.train.grad_accum_steps or 1
    if memory is None or micro is None or accum == 1:
        return
    activations, others, limit = memory
    if (others + activations) / limit > _ROOMY:
        return
    share = config.train.global_batch_size // num_parts(config.train, config.hardware, config.parallel)
    fits = [size for size in divisors(share) if others + activations * size / micro <= _FULL * limit]
    utilisation = _utilisation(facts)
    if utilisation is None:
        return
    changes = []
    for size in sorted(fits, reverse=True):
        values = {"train.micro_batch_size": size, "train.grad_accum_steps": share // size}
        # The GPU's idle time between passes is proportional to their number; a size that is not larger gains nothing.
        changes.append(Change(values, Gain(share=(1 - utilisation) * (1 - micro / size))))
    used = (others + activations) / limit
    yield Finding(
        f"{used:.0%} of the GPU's memory is used, and a step takes {accum} passes of {micro} samples", changes
    )


def _precision(facts: Facts) -> Iterator[Finding]:
    dtype, hardware = facts.config.precision.compute_dtype, facts.config.hardware
    if dtype not in (Dtype.fp32, Dtype.tf32) or hardware.device_type != "cuda" or not facts.is_shared_loop:
        return
    name = hardware.gpu_type or next((rank.device for rank in facts.ranks if rank.device), None)
    gpu, utilisation = find_gpu_type(name), _utilisation(facts)
    if gpu is None or gpu.capability < _AMPERE or (utilisation is not None and utilisation < _LITTLE_WORK):
        return
    if facts.pace is None or facts.pace.seconds < LEAST_LOST_S:
        return
    # Matrix products gain more, by their peak rates; memory-bound operations move half the bytes.
    change = Change({"precision.compute_dtype": Dtype.bf16}, Gain(share=0.5))
    yield Finding(f"computes in {dtype.value} on {name}, which has bf16", [change])


def _host_bound(facts: Facts) -> Iterator[Finding]:
    utilisation, pace, train = _utilisation(facts), facts.pace, facts.config.train
    if utilisation is None or pace is None or not facts.is_shared_loop:
        return
    if utilisation > _LITTLE_WORK or pace.wait_share > _LITTLE_WAIT:
        return
    gain = Gain(share=1 - max(utilisation, 0.01))
    if not train.compile:
        graphs = {"train.compile": True, "train.compile_mode": CompileMode.reduce_overhead}
        changes = [Change(graphs, gain), Change({"train.compile": True}, gain)]
    else:
        changes = [Change({"train.compile_mode": CompileMode.reduce_overhead}, gain)]
    seen = (
        f"the GPU is busy {utilisation:.0%} of the time, waits for data {pace.wait_share:.0%}: the host does the rest"
    )
    yield Finding(seen, changes)


def _straggler(facts: Facts) -> Iterator[Finding]:
    slow = facts.stragglers[0] if facts.stragglers else None
    if slow is None or facts.pace is None:
        return
    gain = Gain(share=min(1.0, max(0.0, slow.own_s - slow.others_s) / facts.pace.step_s))
    yield Finding(
        slow.in_words(), [_without_node(facts, slow.node, gain, f"look at {slow.node}: what else runs there?")]
    )


def _without_node(facts: Facts, node: str, gain: Gain, otherwise: str) -> Change:
    """Return a change that excludes a node on Slurm; elsewhere, or if it is excluded already, the text `otherwise`."""
    excluded = facts.config.hardware.exclude
    if not facts.is_on_slurm or node in (excluded or "").split(","):
        return Change({}, gain, otherwise)
    return Change({"hardware.exclude": f"{excluded},{node}" if excluded else node}, gain)


def _held_back(facts: Facts) -> Iterator[Finding]:
    ranks = [rank for rank in facts.ranks if rank.samples >= _SAMPLES and rank.clock_share is not None]
    for reasons, what, most in (
        (HARMFUL, "held back by heat or its power supply", _LITTLE),
        (_CAPPED, _AT_LIMIT, _MUCH),
    ):
        worst = max(ranks, key=lambda rank: _share(rank, reasons), default=None)
        if worst is None or worst.clock_share is None or worst.clock_share > most:
            continue
        if (share := _share(worst, reasons)) < _THROTTLED:
            continue
        limit = f" of {worst.power_limit_w:.0f} W" if reasons is _CAPPED and worst.power_limit_w else ""
        seen = (
            f"the GPU of {worst.name} on {worst.node} is {what}{limit} {share:.0%} of the time, and its clock at "
            f"{worst.clock_share:.0%} of its highest"
        )
        gain = Gain(share=1 - worst.clock_share)
        otherwise = f"ask the site about the {'power limit' if reasons is _CAPPED else 'cooling'} of {worst.node}"
        yield Finding(seen, [_without_node(facts, worst.node, gain, otherwise)])


def _share(rank: RankUse, reasons: tuple[str, ...]) -> float:
    return max((rank.throttle.get(word, 0.0) for word in reasons), default=0.0)


_IDLE_CPU, _IDLE_SHARE = 0.05, 0.2  # of a core; of the busiest rank
_CPU_MARGIN, _CPU_FACTOR, _LEAST_CPUS = 1.5, 4, 2
_MEMORY_MARGIN, _MEMORY_FACTOR, _LEAST_GB = 1.5, 4, 8.0
_TIME_MARGIN, _TIME_FACTOR, _LEAST_MIN = 1.5, 4, 60
_SHORT_S, _MANY = 120.0, 10
# A GPU's share of its node: 112 cores and 2 TB for eight GPUs (DGX H100). Up to this, a request blocks no other job.
_CPUS_OF_GPU, _GB_OF_GPU = 14, 256.0
_LIMITS_MIN = (5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 1080, 1440, 2160, 2880, 4320, 5760, 8640)


def _is_slurm(facts: Facts) -> bool:
    return facts.config.cluster.executor is Executor.slurm


def _measured_ranks(facts: Facts) -> list[RankUse]:
    return [rank for rank in facts.ranks if rank.samples >= _SAMPLES]


def _idle_among(ranks: Sequence[RankUse]) -> list[RankUse]:
    """Return the ranks that do nothing while others work."""
    if any(rank.utilisation is not None for rank in ranks):
        return [rank for rank in ranks if rank.utilisation is not None and rank.utilisation < IDLE_GPU]
    busiest = max((rank.cpus for rank in ranks if rank.cpus is not None), default=0.0)
    return [rank for rank in ranks if rank.cpus is not None and rank.cpus < min(_IDLE_CPU, _IDLE_SHARE * busiest)]


def _idle_ranks(facts: Facts) -> Iterator[Finding]:
    hardware, measured = facts.config.hardware, _measured_ranks(facts)
    idle = _idle_among(measured)
    asked = max(hardware.num_nodes * hardware.gpus_per_node, facts.run.spec.shape.world_size)
    if facts.is_shared_loop or len(measured) < max(2, asked) or not idle or len(idle) == len(measured):
        return
    used, gpus = len(measured) - len(idle), hardware.gpus_per_node
    what = "GPUs" if gpus else "ranks"
    changes = []
    for count in range(used, len(measured)):  # the nearest count that divides the batch
        values = {**_of_ranks(facts, count), **_batch_of(facts, count, len(measured))}
        if values:
            share = 1 - count / len(measured)
            changes.append(Change(values, Gain(share=share, of=what, is_bound=False)))
    names = ", ".join(rank.name for rank in idle[:8])
    yield Finding(f"asked for {len(measured)} {what}, used {used}: nothing was done by {names}", changes)


def _of_ranks(facts: Facts, count: int) -> dict[str, int]:
    """Return the keys that request `count` ranks; {} if `count` is not a whole number of nodes."""
    hardware = facts.config.hardware
    if hardware.num_nodes > 1:
        return {} if count % hardware.ranks_per_node else {"hardware.num_nodes": count // hardware.ranks_per_node}
    keys = ["gpus_per_node"] if hardware.gpus_per_node else []
    keys += ["tasks_per_node"] if hardware.tasks_per_node is not None or not keys else []
    return {f"hardware.{key}": count for key in keys}


def _batch_of(facts: Facts, count: int, before: int) -> dict[str, int]:
    """Return keys that keep the global batch on `count` ranks, with more samples per rank; {} if no key is needed."""
    train = facts.config.train
    micro = train.given_micro_batch_size
    if facts.run.spec.is_program or micro is None or train.logical_ranks is not None:
        return {}
    return {"train.micro_batch_size": micro * before // count}


def _idle_cpus(facts: Facts) -> Iterator[Finding]:
    measured, now = _measured_ranks(facts), facts.config.hardware.cpus_per_rank
    used = [rank.most_cpus for rank in measured if rank.most_cpus is not None]
    if not used or not _is_slurm(facts):
        return
    key = cpus_key(facts)
    if key == "hardware.cpus_per_gpu" and now <= _CPUS_OF_GPU:
        return
    busy = max(used)
    right = max(1, math.ceil(_CPU_MARGIN * busy), min(facts.config.data.num_workers, now))
    if now < _CPU_FACTOR * max(busy, 0.5) or now - right < _LEAST_CPUS:
        return
    gain = Gain(share=1 - right / now, of="CPUs", is_bound=False)
    yield Finding(f"asked for {now} cores a rank, {busy:.1f} were busy at the most", [Change({key: right}, gain)])


def _host_memory(facts: Facts) -> Iterator[Finding]:
    hardware, asked = facts.config.hardware, facts.run.spec.shape
    rss = [rank.most_rss for rank in facts.ranks if rank.most_rss is not None]
    if not rss or not facts.is_complete or not _is_slurm(facts):
        return
    a_rank = max(rss) / 1e9
    parts = {
        "mem_gb_per_node": (asked.mem_gb_per_node, a_rank * hardware.ranks_per_node),
        "mem_gb_per_gpu": (asked.mem_gb_per_gpu, a_rank),
        "mem_gb_per_cpu": (asked.mem_gb_per_cpu, a_rank / hardware.cpus_per_rank),
    }
    most_of_gpu = {
        "mem_gb_per_node": _GB_OF_GPU * hardware.gpus_per_node,
        "mem_gb_per_gpu": _GB_OF_GPU,
        "mem_gb_per_cpu": _GB_OF_GPU / _CPUS_OF_GPU,
    }
    for key, (now, peak) in parts.items():
        if now is None or (hardware.gpus_per_node and now <= most_of_gpu[key]):
            continue
        right = float(math.ceil(_MEMORY_MARGIN * peak + 1))
        if now < _MEMORY_FACTOR * peak or now - right < _LEAST_GB:
            continue
        gain = Gain(share=1 - right / now, of="host memory", is_bound=False)
        yield Finding(
            f"asked for {now:g} GB ({key}), {peak:.3g} were used at the most",
            [Change({f"hardware.{key}": right}, gain)],
        )


def _long_limit(facts: Facts) -> Iterator[Finding]:
    now = facts.config.hardware.time_limit_min
    need_s = nearest_rank(facts.needs_s, 0.95)
    if need_s is None or not facts.is_complete or not _is_slurm(facts):
        return
    need_min = (need_s + facts.run.spec.shape.signal_lead_s) / 60
    right = _limit(_TIME_MARGIN * need_min, _LIMITS_MIN)
    if now < _TIME_FACTOR * need_min or now - right < _LEAST_MIN:
        return
    count = len(facts.needs_s)
    of = f"95 % of {count} like runs needed" if count > 1 else "it needed"
    gain = Gain(share=1 - right / now, of="time limit (it starts sooner: backfill)", is_bound=False)
    seen = f"the time limit is {now} min, {of} {need_s / 60:.2g} min"
    yield Finding(seen, [Change({"hardware.time_limit_min": right}, gain)])


def _limit(wanted_min: float, limits: Sequence[int]) -> int:
    return next((limit for limit in limits if limit >= wanted_min), math.ceil(wanted_min))


def _short_runs(facts: Facts) -> Iterator[Finding]:
    count = len(facts.needs_s)
    if count < _MANY or not _is_slurm(facts) or statistics.median(facts.needs_s) >= _SHORT_S:
        return
    do = "Run them side by side in one job, by the same submit with cluster=local local.max_parallel=N inside it"
    gain = Gain(share=1 - 1 / count, of="jobs", is_bound=False)
    seen = f"{count} runs of {statistics.median(facts.needs_s):.0f} s, each a job of its own"
    yield Finding(seen, [Change({}, gain, do)])


RULES = (
    Rule(
        name="recompute",
        when="train.recompute, and without it ≤ 85 % of the GPU's memory would be used",
        why="full keeps 40 % of the activations and takes a third more time",
        find=_recompute,
    ),
    Rule(
        name="micro-batch",
        when="gradients are accumulated, the GPU idles, its memory is used ≤ 50 %; the suggested value uses ≤ 85 %",
        why="activations grow with the micro-batch, all else stays; gaps between passes go with their number",
        find=_micro_batch,
    ),
    Rule(
        name="precision",
        when="fp32 or tf32 on a GPU with bf16 (Ampere and later) that is ≥ 50 % busy",
        why="half the bytes; products gain more, by the peaks of the datasheets",
        find=_precision,
    ),
    Rule(
        name="host-bound",
        when="the GPU is ≤ 50 % busy, and a step waits for data ≤ 10 % of its time",
        why="the rest is time of the host: Python and launches of kernels",
        find=_host_bound,
    ),
    Rule(
        name="straggler",
        when="a rank's own work takes ≥ monitor.straggler_factor (1.3) times as long as the others' when last measured",
        why="docs/decisions/0048-stragglers.md; the gain is the difference, as a share of the step",
        find=_straggler,
    ),
    Rule(
        name="held-back",
        when="≥ 30 % of the samples name heat or power supply, clock ≤ 95 % of its highest; the power limit: ≤ 60 %",
        why="a GPU that works hard is at its power limit, and then often well below its highest clock",
        find=_held_back,
    ),
    Rule(
        name="idle-ranks",
        when="a program or own loop has a GPU < 1 % busy, or a rank that uses < 5 % of a core, while others work",
        why="a rank that trains is never that idle over a whole attempt; those of the shared loop all train",
        find=_idle_ranks,
    ),
    Rule(
        name="idle-cpus",
        when="on Slurm, a rank has ≥ 4 times the cores that were busy 95 % of the time, and 1.5 times these + 2",
        why="only above a GPU's share of a node (14 cores, DGX H100) or without GPUs; a short peak does not slow a run",
        find=_idle_cpus,
    ),
    Rule(
        name="host-memory",
        when="on Slurm, a complete run asked for ≥ 4 times its peak, and ≥ 8 GB more than 1.5 times the peak and 1 GB",
        why="only above a GPU's share of a node (256 GB, DGX H100) or without GPUs; file caches count too",
        find=_host_memory,
    ),
    Rule(
        name="time-limit-long",
        when="on Slurm, the limit is ≥ 4 times what 95 % of similar runs needed, and ≥ 1.5 times that + 60 min",
        why="backfill starts what fits into a gap (Slurm's sched/backfill); 1.5 times covers a slower node",
        find=_long_limit,
    ),
    Rule(
        name="short-runs",
        when="on Slurm, ≥ 10 similar runs are complete, with a median of < 2 min",
        why="Slurm starts jobs in rounds of some tens of seconds (bf_interval 30 s), and each waits in the queue",
        find=_short_runs,
    ),
)
