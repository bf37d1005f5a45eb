"""Rules about requested but unused resources: GPUs, cores, memory, hours, very short jobs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.operate.advice.facts import IDLE_GPU, Facts, RankUse
from hpc_trainer.operate.advice.of_data import cpus_key
from hpc_trainer.operate.advice.rule import Change, Finding, Gain, Rule
from hpc_trainer.runtime.pace import nearest_rank

_SAMPLES = 5
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


def _known(facts: Facts) -> list[RankUse]:
    return [rank for rank in facts.ranks if rank.samples >= _SAMPLES]


def _idle_among(ranks: Sequence[RankUse]) -> list[RankUse]:
    """Return the ranks that do nothing while others work."""
    if any(rank.utilisation is not None for rank in ranks):
        return [rank for rank in ranks if rank.utilisation is not None and rank.utilisation < IDLE_GPU]
    busiest = max((rank.cpus for rank in ranks if rank.cpus is not None), default=0.0)
    return [rank for rank in ranks if rank.cpus is not None and rank.cpus < min(_IDLE_CPU, _IDLE_SHARE * busiest)]


def _idle_ranks(facts: Facts) -> Iterator[Finding]:
    hardware, measured = facts.config.hardware, _known(facts)
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
    measured, now = _known(facts), facts.config.hardware.cpus_per_rank
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
    do = "Run them side by side in one job: in it, the same submit with cluster=local local.max_parallel=N"
    gain = Gain(share=1 - 1 / count, of="jobs", is_bound=False)
    seen = f"{count} runs of {statistics.median(facts.needs_s):.0f} s, each a job of its own"
    yield Finding(seen, [Change({}, gain, do)])


RULES = (
    Rule(
        name="idle-ranks",
        when="a program or own loop with a GPU that is < 1 % at work, or a rank < 5 % of a core, while others work",
        why="a rank that trains is never that idle over a whole attempt; those of the shared loop all train",
        find=_idle_ranks,
    ),
    Rule(
        name="idle-cpus",
        when="on Slurm, a rank has ≥ 4 times the cores that were busy 95 % of the time, ≥ 2 more than 1.5 times",
        why="more than what a GPU's node has for it, 14 (DGX H100), or without GPUs; a busy moment does not slow a run",
        find=_idle_cpus,
    ),
    Rule(
        name="host-memory",
        when="on Slurm, a complete run asked for ≥ 4 times its peak, and ≥ 8 GB more than 1.5 times the peak and 1 GB",
        why="more than what a GPU's node has for it, 256 GB (DGX H100), or without GPUs; file caches count, too",
        find=_host_memory,
    ),
    Rule(
        name="time-limit-long",
        when="on Slurm, ≥ 4 times what 95 % of the complete runs like it needed, and ≥ 60 min more than 1.5 times",
        why="backfill starts what fits into a gap (Slurm's sched/backfill); 1.5 times covers a slower node",
        find=_long_limit,
    ),
    Rule(
        name="short-runs",
        when="on Slurm, ≥ 10 complete runs like it, of < 2 min in the median",
        why="Slurm starts jobs in rounds of some tens of seconds (bf_interval 30 s), and each waits in the queue",
        find=_short_runs,
    ),
)
