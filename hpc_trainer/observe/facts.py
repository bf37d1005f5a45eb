"""Facts of one run, from its own files, on which advice rests. Nothing is estimated; torch is not imported."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import shown, typed
from hpc_trainer.observe.straggler_log import Straggler, read_stragglers, slow_at_end
from hpc_trainer.observe.telemetry import THROTTLE, Sample, mean_of, newest_of_ranks
from hpc_trainer.record.measured import Figures, read_figures
from hpc_trainer.record.metrics import sampled_metrics
from hpc_trainer.record.reading import is_finite, is_number, read_json
from hpc_trainer.record.run_figures import ledger_of_run
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.runtime.pace import nearest_rank
from hpc_trainer.slurm.limits import Limits

IDLE_GPU = 0.01
"""Utilisation below which a GPU counts as idle."""
MOST_RANKS = 64
"""Largest number of ranks whose files are read; of more ranks, 64 at equal distances."""
_MOST_RECORDS = 100  # of metrics.jsonl, at equal distances
_MOST_S = 1e9
MOST_LIKE = 200
"""Largest number of similar runs whose folders are read for one run: a sweep may have 10,000."""
_START_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """Pace by metrics.jsonl, without the first logged span of each attempt, in which caches and compilers are cold.

    `steps` took `seconds`, of which `wait_s` were spent waiting for batches; `lines` records were logged.
    """

    steps: int
    seconds: float
    wait_s: float
    lines: int

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.steps

    @property
    def wait_share(self) -> float:
        """Fraction of a step spent waiting for its batch, 0 to 1."""
        return min(1.0, self.wait_s / self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """Resources that one rank used, or one GPU of a program with several; means over an attempt unless noted."""

    name: str
    """Name for messages: `rank 3`, or `GPU 2 of rank 0`."""
    node: str
    samples: int
    device: str | None = None
    """Name of the GPU."""
    utilisation: float | None = None
    """Utilisation of the GPU, 0 to 1."""
    throttle: Mapping[str, float] = field(default_factory=dict)
    """Throttle reason -> fraction of the samples that name it (observe/telemetry.py)."""
    clock_share: float | None = None
    """Mean clock of the GPU, divided by the highest clock of a GPU of that name in this run."""
    power_limit_w: float | None = None
    cpus: float | None = None
    """Busy cores of the rank and its children."""
    most_cpus: float | None = None
    """95th percentile of `cpus`."""
    cpus_allowed: float | None = None
    most_rss: float | None = None
    """Peak host memory in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of one run. Unknown facts are None or empty, and rules that need them give no advice."""

    run: RunStatus
    config: TrainConfig
    pace: Pace | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    """Figures of memory.json in bytes, of the rank with the most memory (features/memory_report)."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds of all attempts by their kind (`record.ledger.Kind`), from the run's ledger."""
    ranks: Sequence[RankUse] = ()
    stragglers: Sequence[Straggler] = ()
    """Ranks that delayed the others at the last measurement, the slowest first."""
    ask_limits: Callable[[], Limits] = Limits
    """Function that returns the cluster's limits; called only for a change that alters the request to Slurm."""
    needs_s: Sequence[float] = ()
    """Seconds that each complete run of the sweep with the same shape and steps took, over all its attempts; at most
    the first `MOST_LIKE` runs."""
    other_gpu_hours: float = 0.0
    """GPU-hours of the sweep's other runs that wait or work; counted only if `budget.max_gpu_hours` is set."""
    measured: Figures | None = None
    """Figures of `hardware check --run` for the run's hardware."""

    @property
    def gpu_hours_left(self) -> float | None:
        """GPU-hours that `budget.max_gpu_hours` leaves to this run; None without a budget."""
        budget = self.config.budget.max_gpu_hours
        return None if budget is None else budget - self.other_gpu_hours

    @property
    def is_shared_loop(self) -> bool:
        """True if hpc_trainer's own loop trains; False for a user's loop or program."""
        return not self.run.spec.is_own_loop

    @property
    def is_on_slurm(self) -> bool:
        """True if the newest attempt was started by Slurm."""
        return bool(self.run.attempts) and self.run.attempts[-1].executor == "slurm"

    @property
    def wall_s(self) -> float:
        """Seconds that the ledger accounts for."""
        return sum(self.spent.values())

    @property
    def trained_s(self) -> float:
        """Seconds of the ledger from the first step to the last."""
        return self.spent_on("step", "data_wait", "evaluation", "save_stall", "redone")

    def spent_on(self, *kinds: str) -> float:
        """Return the total seconds of these kinds."""
        return sum(self.spent.get(kind, 0.0) for kind in kinds)

    @property
    def is_complete(self) -> bool:
        """True if all steps are done."""
        return self.run.state is RunState.COMPLETED


def gather(status: SweepStatus, run: RunStatus, ask_limits: Callable[[], Limits] = Limits) -> Facts:
    """Read the files of one run.

    Args:
        ask_limits: see `Facts`.

    Raises:
        ConfigError: the run's frozen configuration is of another version.
    """
    paths, faults = status.sweep.run(run.run_id), status.faults_of(run.run_id)
    records, gap = sampled_metrics(paths.metrics, _MOST_RECORDS, faults)
    pace = pace_of(records, [attempt.resumed_step or 0 for attempt in run.attempts])
    memory = read_json(paths.memory, faults) or {}
    ledger = ledger_of_run(status, run)
    config = run.spec.typed()
    open_runs = () if config.budget.max_gpu_hours is None else status.open_runs.values()
    return Facts(
        run=run,
        config=config,
        pace=pace if pace is None else dataclasses.replace(pace, lines=pace.lines * gap),
        memory={key: float(value) for key, value in memory.items() if is_finite(value)},
        spent={} if ledger is None else {kind.value: seconds for kind, seconds in ledger.seconds.items()},
        ranks=uses_of(newest_of_ranks(paths, most_ranks=MOST_RANKS, faults=faults)),
        stragglers=slow_at_end(read_stragglers(paths, faults)),
        ask_limits=ask_limits,
        needs_s=_needs(status, run),
        other_gpu_hours=sum(
            other.spec.gpu_hours for other in open_runs if other.state.is_active and other.run_id != run.run_id
        ),
        measured=None if run.submission is None else read_figures(run.submission.cluster, run.spec.hardware),
    )


def pace_of(records: Iterable[Mapping[str, Any]], resumed_steps: Sequence[int]) -> Pace | None:
    """Return the pace by the records of metrics.jsonl; None if no attempt has two spans between records."""
    before, attempt = 0, -1
    steps = lines = 0
    seconds = wait_s = 0.0
    for record in records:
        step_s, waited_s = record.get("step_time_s"), record.get("data_wait_s")
        if not _is_seconds(step_s):
            continue  # a record of an evaluation
        step = record["step"]
        start = max((resumed for resumed in resumed_steps if resumed < step), default=0)
        count, is_cold = step - max(start, before), start != attempt
        before, attempt = step, start
        if not is_cold and count > 0:
            steps, lines = steps + count, lines + 1
            seconds += count * float(step_s)  # type: ignore[arg-type]
            wait_s += count * float(waited_s) if _is_seconds(waited_s) else 0.0  # type: ignore[arg-type]
    return Pace(steps, seconds, wait_s, lines) if lines and seconds > 0 else None


def uses_of(samples: Sequence[Sample]) -> list[RankUse]:
    """Return the resources that each rank used while it trained; samples of its start and last save do not count."""
    samples_of: dict[tuple[int, str | None], list[Sample]] = {}
    for sample in samples:
        samples_of.setdefault((sample.rank, sample.device.uuid if sample.device else None), []).append(sample)
    several = {rank for rank, count in Counter(rank for rank, _ in samples_of).items() if count > 1}
    best: dict[str | None, float] = {}
    for sample in samples:
        if sample.device is not None and sample.device.sm_clock_mhz is not None:
            best[sample.device.name] = max(best.get(sample.device.name, 0.0), sample.device.sm_clock_mhz)
    uses = []
    for number, ((rank, _), mine) in enumerate(samples_of.items()):
        name = f"GPU {number} of rank {rank}" if rank in several else f"rank {rank}"
        uses.append(_use(name, _of_training(mine), best))
    return uses


def _of_training(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples of one rank between its first step and its last one, or all but the first few.

    A run of 20 s on an H100 computed for 8 s of them, at full load; with its start and its last save the mean load was
    37 %, and the advice was that the host is too slow. Programs that report no step keep the samples after their start.
    """
    steps = [sample.step or 0 for sample in samples]
    begin = next((index for index, step in enumerate(steps) if step > steps[0]), len(samples))
    end = steps.index(max(steps)) + 1
    # The sample at `begin` covers the time before it, which belongs to the start.
    return samples[begin + 1 : end] or samples[_START_SAMPLES:] or samples


def _use(name: str, samples: Sequence[Sample], best: Mapping[str | None, float]) -> RankUse:
    devices = [sample.device for sample in samples if sample.device is not None]
    hosts = [sample.host for sample in samples if sample.host is not None]
    device = devices[-1] if devices else None
    reasons = [gpu.throttle for gpu in devices if gpu.throttle is not None]
    throttle = {word: sum(word in names for names in reasons) / len(reasons) for word in THROTTLE if reasons}
    clock = mean_of(gpu.sm_clock_mhz for gpu in devices)
    return RankUse(
        name=name, node=samples[-1].node or "?", samples=len(samples),
        utilisation=mean_of(gpu.utilisation for gpu in devices),
        device=device.name if device else None, throttle={word: share for word, share in throttle.items() if share},
        clock_share=clock / best[device.name] if device and clock and best.get(device.name) else None,
        power_limit_w=device.power_limit_w if device else None,
        cpus=mean_of(host.cpus for host in hosts),
        most_cpus=nearest_rank([host.cpus for host in hosts if host.cpus is not None], 0.95),
        cpus_allowed=max((host.cpus_allowed for host in hosts if host.cpus_allowed is not None), default=None),
        most_rss=max((host.rss_bytes for host in hosts if host.rss_bytes is not None), default=None),
    )  # fmt: skip


def _is_seconds(value: object) -> bool:
    return is_number(value) and 0 <= value < _MOST_S  # type: ignore[operator]


def _needs(status: SweepStatus, run: RunStatus) -> list[float]:
    alike = (
        run_id
        for run_id, state in status.states.items()
        if state is RunState.COMPLETED
        and status.specs[run_id].num_steps == run.spec.num_steps
        and status.specs[run_id].shape == run.spec.shape
    )
    seconds = (worked_s(status.run(run_id)) for run_id in itertools.islice(alike, MOST_LIKE))
    return [value for value in seconds if value > 0]


def worked_s(run: RunStatus) -> float:
    """Return the total seconds of a run's attempts; attempts without a recorded end do not count."""
    return sum(
        max(0.0, attempt.end_time - attempt.start_time) for attempt in run.attempts if attempt.end_time is not None
    )


TIME = "time"
LEAST_LOST_S = 1.0
"""Smallest loss in seconds that counts: losses of a very short run say nothing about a real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Saving of a change: the fraction `share` (0 to 1) of `of`: time, GPUs, CPUs, host memory, time limit, jobs."""

    share: float
    of: str = TIME
    is_bound: bool = True
    """True if `share` is an upper bound, False if it is an estimate."""

    def __str__(self) -> str:
        word = "up to " if self.is_bound else "about "
        if self.of == TIME:
            return f"{word}{1 / (1 - min(self.share, 0.99)):.3g}x faster"
        less = "fewer" if self.of.endswith("s") else "less"
        return f"{word}{min(self.share, 0.99):.0%} {less} {self.of}"


@dataclass(frozen=True, slots=True)
class Change:
    """Values of keys, set together, and their gain. `do` is an instruction if no key of the configuration helps."""

    values: Mapping[str, Any]
    gain: Gain
    do: str = ""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Change as overrides for the command line."""
        return tuple(f"{typed(key)}={shown(value)}" for key, value in self.values.items())


@dataclass(frozen=True, slots=True)
class Finding:
    """Observed fault with its figures, and the changes that would remove it, the best first."""

    seen: str
    changes: Sequence[Change]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule of `advise`: a condition on the facts of a run, and its advice; decision 0049 lists all rules."""

    name: str
    when: str
    """The condition, with its threshold."""
    why: str
    """Source of the threshold."""
    find: Callable[[Facts], Iterator[Finding]]
