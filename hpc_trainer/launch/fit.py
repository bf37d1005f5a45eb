"""`plan --fit`: the shape on which the runs of a plan would end soonest, and why.

Slurm says when a job of each shape would start; earlier runs of the same training on the same hardware say how long a
step takes. An end is the start, the steps that are left, and for each attempt within the time limit the time to start
and to save. Slurm does not predict how long a requeued run waits: a restart is expected to wait as earlier ones did, or
as long as a job waits now.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.key import PASSED_OVER
from hpc_trainer.errors import ConfigError, HpcTrainerError, NoRoomError, RefusedError, SilentError, SlurmError
from hpc_trainer.launch.arrays import ArrayPlan
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.launch.submit import array_script_of
from hpc_trainer.record.journal import Journal, read_heartbeat
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.ledger import STARTS, Kind, Spent, read_spent
from hpc_trainer.record.reading import Faults, exists
from hpc_trainer.record.spec import RunSpec, read_specs
from hpc_trainer.record.submissions import read_submissions, rivals_of_each_run, winner_of
from hpc_trainer.runtime.pace import training_s
from hpc_trainer.slurm.commands import estimate_start, has_slurm
from hpc_trainer.slurm.jobs import parse_time
from hpc_trainer.slurm.queue import read_starts
from hpc_trainer.slurm.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured times of a training on one hardware, in seconds: medians over earlier runs."""

    step_s: float
    """Time of a step, with its waits for data, evaluations and stops for checkpoints."""
    start_s: float | None
    """Time from the allocation to the first step, with the load of a checkpoint; None if no ledger has it."""
    save_s: float | None
    """Time of a save at the end of an attempt; None if no run has saved."""
    restart_wait_s: float | None
    """Time from the end of an attempt to the start of the next one; None if no run in the partition has restarted."""
    runs: tuple[str, ...]
    """The runs that were measured, as SWEEP/RUN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Shape on which runs of the plan may start, with the run on it that needs the most time."""

    hardware: str
    shape: Shape
    num_runs: int
    run_id: str
    steps: int
    """Steps that the run has left."""
    start: float | None
    """Expected start in seconds since the epoch; None if Slurm names none (`note`)."""
    speed: Speed | None
    """None if no earlier run of this training on this hardware has been measured."""
    segments: int | None
    """Attempts within the time limit that the steps need; None without a speed, or if a start leaves no time."""
    wait_now_s: float | None = None
    """Expected wait of a job that is submitted now, in seconds; None if Slurm names no start."""
    note: str | None = None
    """Reason why there is no start, or no end."""

    @property
    def duration_s(self) -> float | None:
        """Seconds that the run holds its nodes, over all segments; None if not known."""
        if self.speed is None or self.segments is None:
            return None
        each_s = (self.speed.start_s or 0.0) + (self.speed.save_s or 0.0)
        return self.steps * self.speed.step_s + self.segments * each_s

    @property
    def restart_wait_s(self) -> float:
        """Expected wait of each restart in seconds: as measured, else as long as a job waits now."""
        measured = None if self.speed is None else self.speed.restart_wait_s
        return (self.wait_now_s or 0.0) if measured is None else measured

    @property
    def waits_s(self) -> float:
        """Seconds that the restarts of the run are expected to wait in the queue, all together."""
        return max(0, (self.segments or 1) - 1) * self.restart_wait_s

    @property
    def end(self) -> float | None:
        """Expected end in seconds since the epoch, with the waits of restarts; None if not known."""
        if self.start is None or self.duration_s is None:
            return None
        return self.start + self.duration_s + self.waits_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """Job of the grid that waits in the queue already, and its expected start in seconds since the epoch."""

    run_id: str
    job_id: str
    start: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Answer of `plan --fit`: candidates, the best first, and a sentence that says why it is the best."""

    candidates: tuple[Candidate, ...]
    waiting: tuple[WaitingJob, ...]
    by_end: bool
    """True if ends were compared; False if only starts could be."""
    why: str


def find_fit(plan: SweepPlan, runs_dir: Path) -> Fit:
    """Compare the shapes of a plan by when their runs would end.

    Slurm is asked at most once for each shape, by the plan or here, and once for all jobs that wait.

    Args:
        plan: the plan of a grid with several shapes, as `hardware=a,b` or `hardware=first:a,b`.
        runs_dir: folder of the sweeps whose runs show how fast a training is.

    Raises:
        ConfigError: the plan is for the local executor.
        SlurmError: there is no Slurm here, or it does not answer.
    """
    if plan.grid.executor is not Executor.slurm:
        raise ConfigError("plan --fit asks Slurm when jobs would start: choose a cluster, as cluster=my_site.")
    if not has_slurm():
        raise SlurmError("plan --fit asks Slurm when jobs would start, and there is no sbatch here.")
    by_shape: dict[tuple[str, Shape], list[RunSpec]] = {}
    for spec in plan.specs:
        for on_one in spec.on_each():
            by_shape.setdefault((on_one.hardware, on_one.shape), []).append(on_one)
    speeds = Speeds(runs_dir)
    candidates = [_candidate(plan, hardware, shape, specs, speeds) for (hardware, shape), specs in by_shape.items()]
    startable = [candidate for candidate in candidates if candidate.start is not None]
    by_end = bool(startable) and all(candidate.end is not None for candidate in startable)
    candidates.sort(
        key=lambda candidate: (_or_never(candidate.end if by_end else candidate.start), candidate.shape.gpu_hours)
    )
    return Fit(
        candidates=tuple(candidates), waiting=tuple(_waiting(plan)), by_end=by_end, why=_why(candidates, by_end=by_end)
    )


def _or_never(moment: float | None) -> float:
    return math.inf if moment is None else moment


def _candidate(plan: SweepPlan, hardware: str, shape: Shape, specs: Sequence[RunSpec], speeds: Speeds) -> Candidate:
    left = [(spec, max(0, spec.num_steps - plan.known.steps.get(spec.run_id, 0))) for spec in specs]
    measured = [(spec, steps, speeds.of(spec)) for spec, steps in left]
    # The longest run decides; one of unknown speed hides it.
    spec, steps, speed = max(measured, key=lambda run: (run[2] is None, run[1] * (run[2].step_s if run[2] else 1)))
    start, note = _start_of(plan, hardware, shape, specs)
    segments = None
    if not spec.num_steps:
        speed, note = None, note or "a program does not say how many steps it takes"
    if speed is not None:
        room_s = training_s(shape.time_limit_min, shape.signal_lead_s, (speed.start_s or 0.0) + (speed.save_s or 0.0))
        segments = max(1, math.ceil(steps * speed.step_s / room_s)) if room_s > 0 else None
        if segments is None:
            note = note or f"its time limit of {shape.time_limit_min} min leaves no time between a start and a save"
    return Candidate(
        hardware=hardware, shape=shape, num_runs=len(specs), run_id=spec.run_id, steps=steps, start=start, speed=speed,
        segments=segments, wait_now_s=None if start is None else max(0.0, start - time.time()), note=note,
    )  # fmt: skip


def _start_of(
    plan: SweepPlan, hardware: str, shape: Shape, specs: Sequence[RunSpec]
) -> tuple[float | None, str | None]:
    """Return the start that Slurm expects, or the reason why there is none; use the plan's answer if it has one."""
    if shape in plan.answers:
        told, note = plan.answers[shape]
    else:
        array = ArrayPlan(hardware=hardware, shape=shape, specs=tuple(specs))
        try:
            told, note = estimate_start(array_script_of(plan, array)), None
        except (RefusedError, NoRoomError, SilentError) as error:
            told, note = None, str(error)
    start = None if told is None else parse_time(told)
    return start, None if start is not None else note or "Slurm names no start"


def _waiting(plan: SweepPlan) -> Iterator[WaitingJob]:
    """Yield the jobs of the grid's runs that wait in the queue, by one question for all of them."""
    jobs = [(spec.run_id, job) for spec in plan.grid.specs for job in plan.known.waiting_jobs.get(spec.run_id, ())]
    if jobs:
        starts = read_starts([job_id for _, job_id in jobs])
        for run_id, job_id in jobs:
            yield WaitingJob(run_id=run_id, job_id=job_id, start=starts.get(job_id))


# The sentence that says why.


def _why(found: Sequence[Candidate], *, by_end: bool) -> str:
    startable = [candidate for candidate in found if candidate.start is not None]
    if not startable:
        return "No run of this grid would be submitted." if not found else "Slurm names a start for none of them."
    best, *others = startable
    if not by_end:
        unknown = dict.fromkeys(name_of(candidate) for candidate in startable if candidate.end is None)
        return (
            f"{name_of(best)} starts soonest, {moment(best.start)}"
            f"{_than(best, others, lambda candidate: candidate.start)}. Ends are not compared: the speed "
            f"on {', '.join(unknown)} is not known, as no run of this training has been measured there."
        )
    sentence = (
        f"{name_of(best)} ends soonest, {moment(best.end)}: it starts {moment(best.start)} and needs {_needs(best)}"
    )
    return f"{sentence}{_than(best, others, lambda candidate: candidate.end)}."


def _needs(best: Candidate) -> str:
    speed = best.speed
    assert speed is not None
    needed = duration(best.duration_s or 0.0)
    parts = f"{needed} for {best.steps} steps of {speed.step_s:.3g} s, by {speed.runs[0]}"
    if best.segments is not None and best.segments > 1:
        source = (
            "as a job waits now, because no restart has been measured there"
            if speed.restart_wait_s is None
            else "as earlier restarts did"
        )
        parts += (
            f", in {best.segments} attempts of at most {best.shape.time_limit_min} min, if each restart waits "
            f"{duration(best.restart_wait_s)}, {source}"
        )
    unknown = [what for what, value in (("start", speed.start_s), ("save", speed.save_s)) if value is None]
    return parts + (f" (the time to {' and '.join(unknown)} is not known, and not counted)" if unknown else "")


def _than(best: Candidate, others: Sequence[Candidate], moment_of: Callable[[Candidate], float | None]) -> str:
    """Return the end of a sentence that compares the best candidate with the second; "" if there is no second."""
    if not others:
        return ""
    second, own, its = others[0], moment_of(best), moment_of(others[0])
    later_s = _or_never(its) - _or_never(own)
    if later_s < 1:
        return f", as soon as {name_of(second)}, and takes fewer GPU-hours" if best.shape.gpu_hours else ""
    return f"; {name_of(second)} is {duration(later_s)} later"


def name_of(candidate: Candidate) -> str:
    """Return the hardware's name, with its partition if it names one."""
    partition = candidate.shape.partition
    return candidate.hardware if partition is None else f"{candidate.hardware} in {partition}"


def moment(seconds: float | None) -> str:
    """Return a time as the user reads it: `at 14:05` today, else with the day; `-` for None."""
    if seconds is None:
        return "-"
    if seconds <= time.time() + 1:
        return "now"
    then, today = time.localtime(seconds), time.localtime()
    return time.strftime("at %H:%M" if then[:3] == today[:3] else "on %Y-%m-%d at %H:%M", then)


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: `3 d 4 h`, `5 h 12 min`, `12 min`, `40 s`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


# Speeds of earlier runs.

_MOST_SWEEPS = 50
_MOST_RUNS = 20
_FEWEST_STEPS = 5
_NOT_OF_SPEED = PASSED_OVER | {"seed", "schedule", "checkpoint", "hardware", "init_from", "optim"}
_NOT_OF_STEP = ("num_steps", "early_stop")
_OF_EACH_STEP = (Kind.step, Kind.data_wait, Kind.program)


class Speeds:
    """Speeds of trainings on hardware, from the runs in a folder of sweeps, the newest sweeps first."""

    def __init__(self, runs_dir: Path) -> None:
        self._sweeps = sorted(_sweeps_in(runs_dir), key=lambda pair: -pair[0])[:_MOST_SWEEPS]
        self._found: dict[str, Speed | None] = {}
        self._texts: dict[tuple[Shape, str], dict[str, list[RunPaths]]] = {}
        self._specs: dict[Path, list[RunSpec]] = {}

    def of(self, wanted: RunSpec) -> Speed | None:
        """Return the speed of the run's training on its hardware; None if no run in the folder has measured it."""
        key = f"{_hardware_key(wanted.shape)}{_training_key(wanted.config)}"
        if key not in self._found:
            alike = itertools.islice(self._alike(wanted), _MOST_RUNS)
            self._found[key] = _median(
                [speed for run, spec in alike if (speed := _measured(run, spec, wanted.shape.partition)) is not None]
            )
        return self._found[key]

    def _alike(self, wanted: RunSpec) -> Iterator[tuple[RunPaths, RunSpec]]:
        """Yield the runs that did the same training on the same hardware."""
        hardware, training = _hardware_key(wanted.shape), _training_key(wanted.config)
        for _, sweep in self._sweeps:
            for spec in self._specs_of(sweep):
                if _hardware_key(spec.shape) == hardware and _training_key(spec.config) == training:
                    yield sweep.run(spec.run_id), spec

    def _specs_of(self, sweep: SweepPaths) -> list[RunSpec]:
        if sweep.folder not in self._specs:
            try:
                specs = list(read_specs(sweep, Faults()).values())
                rivals = rivals_of_each_run(read_submissions(sweep)) if any(spec.others for spec in specs) else {}
                specs = [_as_started(sweep, spec, rivals) for spec in specs]
            except (HpcTrainerError, OSError):  # a colleague's sweep, or one that is being deleted
                specs = []
            self._specs[sweep.folder] = specs
        return self._specs[sweep.folder]


def _sweeps_in(runs_dir: Path) -> Iterator[tuple[float, SweepPaths]]:
    """Yield the sweeps of the folder with the time of their newest submission."""
    try:
        folders = list(runs_dir.iterdir())
    except OSError:
        return
    for sweep in map(SweepPaths, folders):
        if exists(sweep.specs, Faults()):
            try:
                yield sweep.specs.stat().st_mtime, sweep
            except OSError:
                continue


def _as_started(sweep: SweepPaths, spec: RunSpec, rivals: Mapping[str, Any]) -> RunSpec:
    """Return the run on the hardware of its list on which it has started."""
    jobs = rivals.get(spec.run_id)
    won = winner_of(sweep.run(spec.run_id), jobs) if spec.others and jobs else None
    return spec.on(won[0].choice) if won is not None and won[0].choice <= len(spec.others) else spec


def _hardware_key(shape: Shape) -> str:
    """Return a key of the hardware that determines the duration of a step; without a GPU type it has the partition."""
    return repr(
        (
            shape.num_nodes, shape.tasks_per_node, shape.gpus_per_node, shape.cpus_per_task, shape.gpu_type,
            shape.constraint, None if shape.gpu_type else shape.partition,
        )
    )  # fmt: skip


def _training_key(config: Mapping[str, Any]) -> str:
    """Return a key that is equal for configurations whose steps take equally long, with any seed and learning rate."""
    counted = {key: value for key, value in config.items() if key not in _NOT_OF_SPEED}
    counted["train"] = {key: value for key, value in config["train"].items() if key not in _NOT_OF_STEP}
    counted["optim"] = config["optim"].get("name") if "optim" in config else None
    return json.dumps(counted, sort_keys=True, default=str)


def _measured(run: RunPaths, spec: RunSpec, partition: str | None) -> Speed | None:
    """Return the speed of the newest attempt of a run; from its heartbeat if it kept no ledger.

    Args:
        partition: the partition for which waits count; those of a run in another one are left out.
    """
    wait_s = _restart_wait(run) if spec.shape.partition == partition else None
    beat = read_heartbeat(run.heartbeat)
    save_s = beat.get("save_s")
    attempts = [attempt for attempt in read_spent(run, Faults()).values() if attempt.steps_done >= _FEWEST_STEPS]
    name = f"{run.folder.parent.name}/{run.run_id}"
    if attempts:
        newest = attempts[-1]
        step_s = math.fsum(newest.seconds.get(kind.value, 0.0) for kind in _OF_EACH_STEP) / newest.steps_done
        step_s += _share(newest, Kind.evaluation, spec.config["train"].get("eval_every_steps"))
        step_s += _share(newest, Kind.save_stall, spec.config["checkpoint"].get("every_steps"))
        start_s = math.fsum(newest.seconds.get(kind.value, 0.0) for kind in STARTS)
        if step_s > 0:
            return Speed(step_s=step_s, start_s=start_s, save_s=save_s, restart_wait_s=wait_s, runs=(name,))
    rate = beat.get("steps_per_s")
    if not rate:
        return None
    return Speed(step_s=1 / rate, start_s=None, save_s=save_s, restart_wait_s=wait_s, runs=(name,))


def _restart_wait(run: RunPaths) -> float | None:
    """Return the median time in seconds that a run waited for its restarts; None if nothing restarted it."""
    attempts = Journal(run).read(Faults())
    waits = [
        later.start_time - earlier.end_time
        for earlier, later in itertools.pairwise(attempts)
        if earlier.end_time is not None and earlier.action not in (None, "none")
    ]
    return max(0.0, statistics.median(waits)) if waits else None


def _share(spent: Spent, kind: Kind, every: int | None) -> float:
    """Return a step's share of an event that occurs every `every` steps and at the end; a short run has one too."""
    if not every:
        return 0.0
    return spent.seconds.get(kind.value, 0.0) / math.ceil(spent.steps_done / every) / every


def _median(speeds: Sequence[Speed]) -> Speed | None:
    if not speeds:
        return None

    def middle(values: Iterable[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return statistics.median(numbers) if numbers else None

    return dataclasses.replace(
        speeds[0],
        step_s=statistics.median(speed.step_s for speed in speeds),
        start_s=middle(speed.start_s for speed in speeds),
        save_s=middle(speed.save_s for speed in speeds),
        restart_wait_s=middle(speed.restart_wait_s for speed in speeds),
        runs=tuple(speed.runs[0] for speed in speeds),
    )
