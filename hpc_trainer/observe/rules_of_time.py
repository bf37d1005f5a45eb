"""Rules about time without training: waits for data, saves, evaluations, metrics records, starts, repeated steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpc_trainer.config.load import plain_value
from hpc_trainer.config.schema.output import SaveEvery
from hpc_trainer.config.schema.train import CompileScope
from hpc_trainer.config.table.choice import holds, is_there
from hpc_trainer.observe.facts import LEAST_LOST_S, Change, Facts, Finding, Gain, Pace, Rule, worked_s
from hpc_trainer.observe.telemetry import mean_of
from hpc_trainer.record.ledger import STARTS
from hpc_trainer.record.measured import is_on_each_rank, reduced_bytes
from hpc_trainer.record.states import TIMEOUT, RunState
from hpc_trainer.runtime.pace import best_interval, mean_time_between_interruptions
from hpc_trainer.slurm.shape import longest_limit

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
    yield Finding(f"{_seen(pace)}, and shards are read from the shared folder", [change])


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


_SAVES, _LEAST_SAVES = 0.1, 10
_LEFT_OF_SYNCHRONOUS = 0.1
_EVALUATIONS, _RIGHT_FOR_EVALUATIONS = 0.3, 0.05
_REDONE = 0.1
_STARTS, _RIGHT_FOR_STARTS = 0.1, 0.05
_COMPILE, _SLOWER_WITHOUT = 0.3, 1.5
_SENT = 0.2  # of a step
_LINE_S, _LINE_EVERY_S, _LEAST_CORE = 0.3e-3, 0.05, 0.02


def _step_s(facts: Facts) -> float | None:
    return facts.pace.step_s if facts.pace else None


def _num_steps_done(facts: Facts) -> int:
    """Return the run's step, at least 1; repeated steps count once."""
    return max(1, facts.run.step)


def _between_s(facts: Facts) -> float:
    return mean_time_between_interruptions(max(0, len(facts.run.attempts) - 1), worked_s(facts.run))


def _saves_wait(facts: Facts) -> Iterator[Finding]:
    lost_s = facts.spent_on("save_stall")
    if facts.config.checkpoint.asynchronous or not facts.is_shared_loop or lost_s < LEAST_LOST_S:
        return
    if (share := lost_s / facts.trained_s) >= _SAVES:
        gain = Gain(share=share * (1 - _LEFT_OF_SYNCHRONOUS), is_bound=False)
        yield Finding(_stood_still(facts, share), [Change({"checkpoint.asynchronous": True}, gain)])


def _stood_still(facts: Facts, share: float) -> str:
    seen = f"training stopped for its checkpoints {share:.0%} of the time ({facts.spent_on('save_stall'):.3g} s)"
    figures, held = facts.measured, facts.memory
    if figures is None or not held.get("weights") or not is_on_each_rank(facts.config):
        return seen
    num_bytes = held["weights"] + held.get("optimizer", 0.0) + held.get("average", 0.0)
    write_s = figures.write_s(num_bytes, 1)
    if write_s is None:
        return seen
    return f"{seen}; {num_bytes / 1e6:.3g} MB take {write_s:.3g} s to write here ({figures.source})"


def _saves_often(facts: Facts) -> Iterator[Finding]:
    checkpoint, step_s, lost_s = facts.config.checkpoint, _step_s(facts), facts.spent_on("save_stall")
    if step_s is None or checkpoint.every is SaveEvery.auto or lost_s < LEAST_LOST_S:
        return
    share, now = lost_s / facts.trained_s, checkpoint.every_steps
    num_saves = _num_steps_done(facts) // now
    if num_saves < _LEAST_SAVES:  # saves at stops and at the end wait for the disk, whatever the interval
        return
    stall_s = lost_s / (num_saves + len(facts.run.attempts))
    right = round(best_interval(stall_s, _between_s(facts)) / step_s)
    if share < _SAVES or right < 2 * now:
        return
    gain = Gain(share=share * (1 - now / right), is_bound=False)
    seen = f"{_stood_still(facts, share)}, with one every {now} steps"
    yield Finding(
        seen,
        [Change({"checkpoint.every": SaveEvery.auto}, gain), Change({"checkpoint.every_steps": right}, gain)],
    )


def _redone(facts: Facts) -> Iterator[Finding]:
    checkpoint, step_s, lost_s = facts.config.checkpoint, _step_s(facts), facts.spent_on("redone")
    interruptions = len(facts.run.attempts) - 1
    if step_s is None or not interruptions or lost_s < LEAST_LOST_S or lost_s / facts.trained_s < _REDONE:
        return
    share, now = lost_s / facts.trained_s, checkpoint.every_steps
    num_saves = _num_steps_done(facts) // now + interruptions + 1
    stall_s = max(1e-3, facts.spent_on("save_stall") / num_saves)
    # The mean time between interruptions of this run itself, not an estimate for other runs.
    right = max(1, round(best_interval(stall_s, facts.wall_s / interruptions) / step_s))
    if right > now / 2:
        return
    gain = Gain(share=share * (1 - right / now), is_bound=False)
    seen = (
        f"{share:.0%} of the training was steps that were done again ({lost_s:.3g} s in {interruptions + 1} attempts), "
        f"with a checkpoint every {now} steps"
    )
    yield Finding(seen, [Change({"checkpoint.every_steps": right}, gain)])


def _evaluations(facts: Facts) -> Iterator[Finding]:
    lost_s, now = facts.spent_on("evaluation"), facts.config.train.eval_every_steps
    if not now or not facts.is_shared_loop or lost_s < LEAST_LOST_S:
        return
    share, done = lost_s / facts.trained_s, _num_steps_done(facts)
    if share < _EVALUATIONS or now >= facts.config.train.num_steps:  # the one at the end remains
        return
    factor = math.ceil(share / (1 - share) * (1 - _RIGHT_FOR_EVALUATIONS) / _RIGHT_FOR_EVALUATIONS)
    right = min(now * factor, facts.config.train.num_steps)
    count, wanted = max(1, done // now), max(1, done // right)
    gain = Gain(share=share * (1 - wanted / count), is_bound=False)
    seen = f"evaluations took {share:.0%} of the time ({lost_s:.3g} s), with one every {now} steps"
    yield Finding(seen, [Change({"train.eval_every_steps": right}, gain)])


def _log_lines(facts: Facts) -> Iterator[Finding]:
    pace, now = facts.pace, facts.config.monitor.log_every_steps
    if pace is None or not facts.is_shared_loop or now >= 10 or pace.seconds < LEAST_LOST_S:
        return
    every_s = pace.seconds / pace.lines
    # On a shared CPU both a metrics record and a step take longer.
    is_cpu = facts.config.hardware.device_type == "cpu"
    core = (mean_of([rank.cpus for rank in facts.ranks]) or 1.0) if is_cpu else 1.0
    core = min(1.0, max(_LEAST_CORE, core))
    if every_s * core >= _LINE_EVERY_S:
        return
    right = _round_up(math.ceil(1.0 / pace.step_s))
    gain = Gain(share=min(0.5, _LINE_S / core / every_s) * (1 - now / right), is_bound=False)
    seen = f"a line of metrics every {1e3 * every_s:.3g} ms, each of which waits for the loss"
    yield Finding(seen, [Change({"monitor.log_every_steps": right}, gain)])


def _round_up(count: int) -> int:
    """Round `count` up to 1, 2 or 5 times a power of ten."""
    size = int(10 ** (len(str(count)) - 1))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= count)


def _compile(facts: Facts) -> Iterator[Finding]:
    train, lost_s = facts.config.train, facts.spent_on("compile")
    if not train.compile or lost_s < 5 * LEAST_LOST_S or lost_s / facts.wall_s < _COMPILE or not facts.is_complete:
        return
    changes = []
    if train.compile_scope is CompileScope.model and (blocks := facts.config.model.num_blocks or 0) > 1:
        gain = Gain(share=lost_s / facts.wall_s * (1 - 1 / blocks))
        changes.append(Change({"train.compile_scope": CompileScope.blocks}, gain))
    # A safe estimate: without compilation, steps take 1.5 times as long.
    saved_s = lost_s - (_SLOWER_WITHOUT - 1) * facts.spent_on("step")
    changes.append(Change({"train.compile": False}, Gain(share=max(0.0, saved_s / facts.wall_s), is_bound=False)))
    yield Finding(f"compilation took {lost_s / facts.wall_s:.0%} of the whole run ({lost_s:.0f} s)", changes)


def _starts(facts: Facts) -> Iterator[Finding]:
    """Yield advice for a run that its time limit ended at least twice."""
    ended = sum(attempt.cause == TIMEOUT or attempt.state is RunState.TIMEOUT for attempt in facts.run.attempts)
    lost_s = facts.spent_on(*(kind.value for kind in STARTS))
    if ended < 2 or not facts.wall_s or (share := lost_s / facts.wall_s) < _STARTS:
        return
    now = facts.config.hardware.time_limit_min
    start_s = lost_s / len(facts.run.attempts)
    right = max(2 * now, math.ceil(start_s / _RIGHT_FOR_STARTS / 60))
    bound = longest_limit(facts.run.spec.shape, facts.ask_limits()) if facts.is_on_slurm else None
    right = right if bound is None else min(right, bound[0])
    hours, left = facts.run.spec.gpu_hours / now, facts.gpu_hours_left
    if left is not None and hours:
        right = min(right, math.floor(left / hours + 1e-9))  # 9.2 - 9 is a little less than 0.2
    if right <= now:
        return
    gain = Gain(share=share * (1 - now / right), is_bound=False)
    seen = f"the time limit of {now} min ended {ended} attempts, and starts took {share:.0%} of the time"
    yield Finding(seen, [Change({"hardware.time_limit_min": right}, gain)])


def _all_reduce(facts: Facts) -> Iterator[Finding]:
    """Yield advice for a run whose gradients take long to send, by the link that was measured."""
    config, figures, step_s, held = facts.config, facts.measured, _step_s(facts), facts.memory.get("gradients")
    link = None if figures is None else figures.link_on(config.hardware.num_nodes)
    ranks = facts.run.spec.shape.world_size
    if figures is None or link is None or step_s is None or not held or ranks == 1 or not is_on_each_rank(config):
        return
    num_bytes = reduced_bytes(config, held / config.precision.format.weight_bytes)
    if num_bytes is None or not is_there("parallel.comm_hook") or holds(config, "parallel.comm_hook=bf16"):
        return
    share = min(1.0, link.seconds(num_bytes, ranks) / step_s)
    if share < _SENT or share * step_s * _num_steps_done(facts) < LEAST_LOST_S:
        return
    seen = (
        f"the all-reduce of {num_bytes / 1e6:.3g} MB of gradients takes {share:.0%} of a step of "
        f"{1e3 * step_s:.3g} ms, less what computation hides: {link.bus_bytes_per_s / 1e6:.4g} MB/s among "
        f"{link.ranks} ranks ({figures.source})"
    )
    bf16 = type(getattr(config.parallel, "comm_hook"))("bf16")  # noqa: B009  (a feature's key)
    yield Finding(seen, [Change({"parallel.comm_hook": bf16}, Gain(share=share / 2))])


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
    Rule(
        name="saves-wait",
        when="checkpoint.asynchronous=false, and training stops for saves ≥ 10 % of its time, ≥ 1 s",
        why="a save beside training stalls it at most a tenth as long (docs/benchmarks/checkpoints.md)",
        find=_saves_wait,
    ),
    Rule(
        name="saves-often",
        when="training stops for ≥ 10 saves ≥ 10 % of its time, ≥ 1 s, at less than half the best interval",
        why="Daly (2006): the interval that loses the least to saves and to work done twice",
        find=_saves_often,
    ),
    Rule(
        name="saves-seldom",
        when="steps that were done again are ≥ 10 % of the training time, ≥ 1 s, at more than twice the best interval",
        why="Daly (2006), with the time between interruptions that this run had",
        find=_redone,
    ),
    Rule(
        name="evaluations",
        when="evaluations are ≥ 30 % of the training time, ≥ 1 s; the suggested value leaves 5 %",
        why="evaluations train nothing, and a curve is as clear with a tenth of the points",
        find=_evaluations,
    ),
    Rule(
        name="log-lines",
        when="fewer than 10 steps between two lines of metrics, and less than 50 ms",
        why="a line takes about 0.3 ms of a core, and waits for the device; the suggested value is a line per second",
        find=_log_lines,
    ),
    Rule(
        name="compile-time",
        when="train.compile, and compilation is ≥ 30 % of a complete run, ≥ 5 s",
        why="the gain counts with steps that take 1.5 times as long uncompiled",
        find=_compile,
    ),
    Rule(
        name="time-limit-short",
        when="the time limit ended ≥ 2 attempts, and starts are ≥ 10 % of the time; the suggested value leaves 5 %",
        why="each attempt pays for a start",
        find=_starts,
    ),
    Rule(
        name="all-reduce",
        when="ddp, and an all-reduce of the gradients takes ≥ 20 % of a step by `hardware check --run`, ≥ 1 s in all",
        why="bf16 sends half the bytes; the last bits differ; a smaller share is hidden, or worth 1.1x at the most",
        find=_all_reduce,
    ),
)
