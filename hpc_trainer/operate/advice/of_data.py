"""Rules about data: steps that wait for batches, too few cores for loading."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpc_trainer.config.load import plain_value
from hpc_trainer.operate.advice.facts import Facts, Pace
from hpc_trainer.operate.advice.rule import LEAST_LOST_S, Change, Finding, Gain, Rule
from hpc_trainer.record.telemetry import mean_of

_WAIT = 0.2  # of a step
_BUSY = 0.9  # of the cores
_NO_WAIT, _TOO_MANY = 0.02, 4
_MOST_WORKERS = 16
_SPARE = 1.2  # with a loader that is only just fast enough, a step waits now and then


def _waits(facts: Facts) -> Pace | None:
    """Return the pace of a training that waits for data, else None."""
    pace = facts.pace
    if pace is None or not facts.is_shared_loop or pace.wait_share < _WAIT or pace.wait_s < LEAST_LOST_S:
        return None
    return pace


def _seen(pace: Pace) -> str:
    waited, step = 1e3 * pace.wait_s / pace.steps, 1e3 * pace.step_s
    return f"a step waits {waited:.3g} of {step:.3g} ms for its batch ({pace.wait_share:.0%})"


def is_cpu_bound(facts: Facts) -> bool | None:
    """Return True if a rank keeps at least 90 % of its cores busy; None if it is not known."""
    shares = [rank.cpus / rank.cpus_allowed for rank in facts.ranks if rank.cpus is not None and rank.cpus_allowed]
    return None if not shares else max(shares) >= _BUSY


def cpus_key(facts: Facts) -> str:
    """Return the key that sets the number of cores of a rank."""
    hardware = facts.config.hardware
    is_a_gpu = hardware.gpus_per_node and hardware.cpus_per_task is None
    return "hardware.cpus_per_gpu" if is_a_gpu else "hardware.cpus_per_task"


def _with_workers(pace: Pace, now: int, wanted: int) -> Gain:
    """Return the gain of `wanted` loader processes instead of `now`; they share the work of a batch evenly."""
    computed_s = pace.step_s * (1 - pace.wait_share)
    batch_s = _batch_s(pace, now)
    return Gain(share=max(0.0, 1 - max(computed_s, batch_s / wanted) / pace.step_s))


def _batch_s(pace: Pace, now: int) -> float:
    """Return one process's seconds for a batch: `now` processes load one batch per step; if 0, the rank loads it."""
    return now * pace.step_s if now else pace.wait_share * pace.step_s


def _too_few_workers(facts: Facts) -> Iterator[Finding]:
    pace = _waits(facts)
    if pace is None or (is_cpu_bound(facts) and facts.config.data.num_workers):
        return
    now, cores = facts.config.data.num_workers, facts.config.hardware.cpus_per_rank
    computed_s = max(1e-6, pace.step_s * (1 - pace.wait_share))
    wanted = min(_MOST_WORKERS, max(now + 1, math.ceil(_SPARE * _batch_s(pace, now) / computed_s)))
    # Loaders that wait for a disk do not need a core each.
    room = wanted if is_cpu_bound(facts) is False else max(1, cores)
    changes = []
    if min(wanted, room) > now:
        within = min(wanted, room)
        changes.append(Change({"data.num_workers": within}, _with_workers(pace, now, within)))
    if wanted > cores:
        more = {cpus_key(facts): wanted, "data.num_workers": wanted}
        changes.append(Change(more, _with_workers(pace, now, wanted)))
        if changes[0].gain.share < 0.8 * changes[-1].gain.share:  # more cores gain much more
            changes.reverse()
    yield Finding(_seen(pace), changes)


def _too_few_cpus(facts: Facts) -> Iterator[Finding]:
    pace = _waits(facts)
    now, cores = facts.config.data.num_workers, facts.config.hardware.cpus_per_rank
    if pace is None or not now or not is_cpu_bound(facts):
        return
    computed_s = max(1e-6, pace.step_s * (1 - pace.wait_share))
    batch_s = min(now, cores) * pace.step_s  # at most one process per core works at a time
    wanted = min(_MOST_WORKERS, max(cores + 1, math.ceil(_SPARE * batch_s / computed_s)))
    gain = Gain(share=max(0.0, 1 - max(computed_s, batch_s / wanted) / pace.step_s))
    values = {cpus_key(facts): wanted, "data.num_workers": wanted}
    busy = mean_of([rank.cpus for rank in facts.ranks]) or 0.0
    yield Finding(f"{_seen(pace)}, and {busy:.2g} of its {cores} core(s) are busy", [Change(values, gain)])


def _pictures_from_files(facts: Facts) -> Iterator[Finding]:
    pace, data = _waits(facts), facts.config.data
    if pace is None or data.name != "image_folder":
        return
    values = plain_value(data)
    size = values["resize"] or round(values["image_size"] * 256 / 224)
    do = f"hpc-trainer data prepare images {values['path']} --to SHARDS --size {size}, then data=image_shards"
    yield Finding(
        f"{_seen(pace)}, and each picture is a file of its own", [Change({}, Gain(share=pace.wait_share), do)]
    )


def _not_staged(facts: Facts) -> Iterator[Finding]:
    pace, data = _waits(facts), facts.config.data
    if pace is None or data.name != "image_shards" or plain_value(data)["stage_dir"] or is_cpu_bound(facts):
        return
    change = Change({"data.stage_dir": "$TMPDIR"}, Gain(share=pace.wait_share))
    yield Finding(f"{_seen(pace)}, and shards are read where they lie", [change])


def _idle_workers(facts: Facts) -> Iterator[Finding]:
    pace, now = facts.pace, facts.config.data.num_workers
    busy = [rank.most_cpus for rank in facts.ranks if rank.most_cpus is not None]
    if pace is None or pace.seconds < LEAST_LOST_S or not busy or pace.wait_share >= _NO_WAIT:
        return
    right = max(1, math.ceil(_SPARE * max(busy)))  # counts the rank's own work as loading
    if now < _TOO_MANY * right:
        return
    seen = f"{now} loader processes, and the rank with all of them keeps {max(busy):.2g} core(s) busy at the most"
    gain = Gain(share=1 - right / now, of="loader processes and their memory", is_bound=False)
    yield Finding(seen, [Change({"data.num_workers": right}, gain)])


_WHY_WAIT = "less than a fifth comes and goes with the load of a node, and is worth 1.25x at the most"
RULES = (
    Rule(
        name="data-workers",
        when="a step waits for its batch ≥ 20 % of its time, ≥ 1 s in all, and cores are free",
        why=_WHY_WAIT,
        find=_too_few_workers,
    ),
    Rule(
        name="data-cpus",
        when="the same with loader processes, and ≥ 90 % of the rank's cores are busy",
        why="another process would wait for a core",
        find=_too_few_cpus,
    ),
    Rule(
        name="data-shards",
        when="the same with data=image_folder",
        why=_WHY_WAIT,
        find=_pictures_from_files,
    ),
    Rule(
        name="data-staging",
        when="the same with data=image_shards, no data.stage_dir and < 90 % of the cores busy",
        why="cores that are free wait for the file system",
        find=_not_staged,
    ),
    Rule(
        name="idle-workers",
        when="≥ 4 times the loader processes that the busy cores would keep busy, and a step waits < 2 % of its time",
        why="each process has memory of its own, and is started again in each attempt",
        find=_idle_workers,
    ),
)
