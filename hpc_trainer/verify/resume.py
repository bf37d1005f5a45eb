"""`hpc-trainer verify resume`: the same training twice undisturbed and once interrupted, compared step by step.

The comparison uses traces and files alone: what differs first, and the likely reason. No torch; the part of the
ranks is verify/probe.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_trainer.errors import RunStateError
from hpc_trainer.record.checkpoint_folders import committed
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.metrics import read_metrics
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.verify.compare_metrics import NEVER_EQUAL, is_same, lines_by_step
from hpc_trainer.verify.interruptions import LOOSE, LOOSE_BUFFER, Interruption
from hpc_trainer.verify.own_runs import await_end, end_local, raise_failure

INPUTS, RANDOM = "inputs", "random."


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """First difference of two runs: its step, its rank, and the `names` of the tensors and numbers that differ."""

    step: int
    rank: int
    names: tuple[str, ...]

    @property
    def state(self) -> tuple[str, ...]:
        """Names that a checkpoint holds: all except inputs and random states."""
        return tuple(name for name in self.names if name != INPUTS and not name.startswith(RANDOM))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Records of one run: the lines of its trace by rank, its metrics by step, the files of its last checkpoint."""

    lines: tuple[tuple[Mapping[str, Any], ...], ...]
    metrics: Mapping[int, Mapping[str, float | None]]
    files: Mapping[str, bytes]
    last_step: int | None

    def steps(self, rank: int) -> dict[int, Mapping[str, str]]:
        """Return the leaves of each step of a rank; if a step was repeated, the last time counts."""
        return {line["step"]: line["leaves"] for line in self.lines[rank] if line["kind"] == "step"}

    def find(self, rank: int, kind: str, *, step: int, before: int | None = None) -> Mapping[str, str] | None:
        """Return the leaves of the newest line of a kind at a step, before attempt `before`; None if there is none."""
        for line in reversed(self.lines[rank]):
            if (line["kind"], line["step"]) == (kind, step) and (before is None or line["attempt"] < before):
                leaves: Mapping[str, str] = line["leaves"]
                return leaves
        return None

    def resumes(self) -> list[tuple[int, int]]:
        """Return (attempt, step) of every start after the first that resumed from a checkpoint."""
        starts = [(line["attempt"], line["step"]) for line in self.lines[0] if line["kind"] == "restored"]
        return [start for start in starts[1:] if start[1] > 0]


def read_trace(paths: RunPaths, world_size: int) -> Trace:
    """Read the trace, metrics and last checkpoint of a finished run. Files that were not written count as empty."""
    newest = committed(paths.checkpoints)[:1]
    return Trace(
        lines=tuple(tuple(read_lines(paths.trace(rank))) for rank in range(world_size)),
        metrics=lines_by_step(read_metrics(paths.metrics), leaves_out=NEVER_EQUAL.__contains__),
        files={
            path.name: path.read_bytes()
            for _, folder in newest
            for path in sorted(folder.iterdir())
            if path.name != "manifest.json"  # it holds the attempt's number
        },
        last_step=newest[0][0] if newest else None,
    )


def first_difference(one: Trace, other: Trace) -> First | None:
    """Return the first difference of two traces; None if they are the same at every step."""
    differences = [first for rank in range(len(one.lines)) for first in _first_of_rank(one, other, rank)]
    return min(differences, key=lambda first: (first.step, first.rank), default=None)


def _first_of_rank(one: Trace, other: Trace, rank: int) -> Iterator[First]:
    here, there = one.steps(rank), other.steps(rank)
    for step in sorted(here.keys() | there.keys()):
        names = _unlike(here.get(step, {}), there.get(step, {}))
        if names:
            yield First(step=step, rank=rank, names=names)
            return


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    keys = [*one, *(key for key in other if key not in one)]
    return tuple(key for key in keys if one.get(key) != other.get(key))


def other_files(one: Trace, other: Trace) -> tuple[str, ...]:
    """Return the names of the last checkpoint's files whose bytes differ."""
    return _unlike(one.files, other.files)


def other_metrics(one: Trace, other: Trace, twin: Trace) -> tuple[tuple[int, str], ...]:
    """Return each differing (step, metric), except metrics such as times that also differ from `one` to its `twin`."""
    unsteady = {name for _, name in _unlike_metrics(one, twin)}
    return tuple(pair for pair in _unlike_metrics(one, other) if pair[1] not in unsteady)


def _unlike_metrics(one: Trace, other: Trace) -> list[tuple[int, str]]:
    return [
        (step, name)
        for step in sorted(one.metrics.keys() | other.metrics.keys())
        for name in _unlike(one.metrics.get(step, {}), other.metrics.get(step, {}))
        if not is_same(one.metrics.get(step, {}).get(name), other.metrics.get(step, {}).get(name))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Likely reason why two runs differ: a short name of the kind, a sentence, and advice."""

    kind: str
    text: str
    advice: str


_UNSEEDED = (
    "Change training samples in augment(inputs, generators) of the data set: row i draws from generators[i] alone, a "
    "function of (seed, epoch, sample). __getitems__ does not get the epoch: it must depend on the indices alone "
    "(docs/own_model_and_data.md)."
)
_UNSEEDED_OWN_LOOP = (
    "Draw from np.random.default_rng((seed, epoch, index)) of each sample, not from a global generator; or give the "
    "generator, and the position in the data, to run.save and run.restore."
)
_UNSAVED = (
    "Make it a buffer (register_buffer), if it is a tensor; or return it from get_extra_state of the module that holds "
    "it, and restore it in set_extra_state: both are saved with the model."
)
_UNSAVED_OWN_LOOP = (
    "Give it to run.save by a name of its own, and take it from run.restore; or make it a part of the model's state: "
    "register_buffer, or get_extra_state and set_extra_state."
)


def why_undisturbed_differ(first: First, *, deterministic: bool, has_own_loop: bool = False) -> Reason:
    """Return the likely reason why two undisturbed runs with the same seed differ.

    Args:
        first: their first difference.
        deterministic: the value of train.deterministic.
        has_own_loop: True if `train.main` is a user's own loop, which knows epochs and calls run.save.
    """
    where = f"at step {first.step}"
    if INPUTS in first.names:
        return Reason(
            kind="unseeded data",
            text=f"the model's inputs differ {where} already between two undisturbed runs: the data set, or an "
            "augmentation in it, draws from a generator without a seed.",
            advice=_UNSEEDED_OWN_LOOP if has_own_loop else _UNSEEDED,
        )
    if not first.state and any(name.startswith(RANDOM) for name in first.names):
        return Reason(
            kind="random numbers drawn",
            text=f"the random state differs {where} while all tensors are the same: something draws a varying number "
            "of random numbers, or seeds a global generator by the clock.",
            advice="Look for seeding and for draws that depend on time, threads or the process.",
        )
    switch = "" if deterministic else " train.deterministic=false allows it; set it to true."
    return Reason(
        kind="nondeterministic computation",
        text=f"two undisturbed runs get the same inputs and random states, and {_some(first.state)} differ {where}: an "
        f"operation gives varying results, or your model draws from a generator without a seed.{switch}",
        advice="Name the operation with torch.use_deterministic_algorithms(True), or seed the generator.",
    )


def why_resumed_differs(
    first: First, undisturbed: Trace, resumed: Trace, *, num_workers: int, has_own_loop: bool = False
) -> Reason:
    """Return the likely reason why an interrupted run differs from the undisturbed runs, which are the same.

    Args:
        first: the first difference of the two runs.
        undisturbed: the trace of an undisturbed run.
        resumed: the trace of the interrupted run.
        num_workers: number of loader processes.
        has_own_loop: True if `train.main` is a user's own loop.
    """
    earlier = [(attempt, step) for attempt, step in resumed.resumes() if step < first.step]
    if not earlier:
        return Reason(
            kind="unknown",
            text="it differs before any resume: the start of an attempt changes it, not the checkpoint.",
            advice="Compare the logs of the attempts.",
        )
    attempt, step = earlier[-1]
    rank = first.rank
    saved, restored = (
        resumed.find(rank, "saved", step=step, before=attempt),
        _line_of(resumed, rank, attempt, "restored"),
    )
    began = _line_of(resumed, rank, attempt, "began")
    where = f"after the resume at step {step}"
    if saved and restored:
        names = _unlike({k: v for k, v in saved.items() if not k.startswith((LOOSE, LOOSE_BUFFER))}, restored)
        if names:
            what = "run.restore, what run.save was given" if has_own_loop else "loading the checkpoint, what was saved"
            return Reason(
                kind="not put back",
                text=f"{_some(names)} are not, after {what} at step {step}.",
                advice="load_state_dict (and set_extra_state of a module) must restore everything that is saved of it.",
            )
    if INPUTS in first.names:
        return _why_inputs(where, num_workers, has_own_loop)
    if saved and began:
        names = tuple(
            name for name in _unlike(saved, began) if name.startswith((LOOSE, LOOSE_BUFFER)) and name in saved
        )
        if names:
            return _why_loose(names, saved, began, step, has_own_loop)
    num_ranks = len(resumed.lines)
    if num_ranks > 2 and not any(name.startswith(RANDOM) for name in first.names):
        return Reason(
            kind="reduction order",
            text=f"inputs, random states and all that is saved are the same {where}, but sums over {num_ranks} ranks "
            "are not: gradients may be summed in another order in the first steps of a start.",
            advice="DistributedDataParallel(.., find_unused_parameters=True), and train.deterministic=true."
            if has_own_loop
            else "train.deterministic=true",
        )
    return Reason(
        kind="missing state",
        text=f"all that is saved was put back, and inputs are the same, but {_some(first.names)} differ {where}: "
        "something that is not saved influences it (a global, a closure, a generator of your own).",
        advice=f"Compute it from the step, or keep it. {_UNSAVED_OWN_LOOP}"
        if has_own_loop
        else f"Keep it in the model. {_UNSAVED}",
    )


def _why_loose(
    names: tuple[str, ...], saved: Mapping[str, str], began: Mapping[str, str], step: int, has_own_loop: bool
) -> Reason:
    """Return the reason that a value outside every checkpoint changed between the save and the resume."""
    shown = [name.removeprefix(LOOSE).removeprefix(LOOSE_BUFFER) for name in names]
    was, now = (lines.get(names[0], "nothing") for lines in (saved, began))
    values = f"{_some(shown)}: {was} when step {step} was saved, {now} after the resume at step {step}."
    if names[0].startswith(LOOSE_BUFFER):
        return Reason(
            kind="missing state",
            text=f"{values} It is a buffer with persistent=False, so no checkpoint holds it.",
            advice="register_buffer(.., persistent=True), the default: then it is saved with the model.",
        )
    return Reason(
        kind="missing state",
        text=f"{values} It is not part of state_dict, so no checkpoint holds it.",
        advice=_UNSAVED_OWN_LOOP if has_own_loop else _UNSAVED,
    )


def _why_inputs(where: str, num_workers: int, has_own_loop: bool) -> Reason:
    workers = (
        f" The {num_workers} loader processes begin with the same random state at every start."
        if num_workers
        else " It keeps something of its own: a position, a counter, a generator."
    )
    return Reason(
        kind="unseeded data",
        text=f"the model's inputs differ {where}: the data set makes a batch from more than the indices.{workers}",
        advice=_UNSEEDED_OWN_LOOP if has_own_loop else _UNSEEDED,
    )


def _line_of(trace: Trace, rank: int, attempt: int, kind: str) -> Mapping[str, str] | None:
    matches = (line["leaves"] for line in trace.lines[rank] if (line["kind"], line["attempt"]) == (kind, attempt))
    return next(matches, None)


def _some(names: tuple[str, ...] | list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Sweep of one run: `start` submits it, `bring_back` submits it again."""

    sweep: SweepPaths
    spec: RunSpec
    start: Callable[[], object]
    bring_back: Callable[[], object]


@dataclass(slots=True, kw_only=True)
class ResumeReport:
    """Result of `verify resume`."""

    run_id: str
    num_steps: int
    world_size: int
    seed: int
    interruptions: list[str]
    resumed_steps: list[int] = field(default_factory=list)
    num_compared: int = 0
    """Tensors and numbers compared after each step, over all ranks."""
    metrics: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    failed: str | None = None
    first: First | None = None
    between: str | None = None
    """Names of the two runs that `first` compares."""
    also: list[str] = field(default_factory=list)
    """Differences that the states did not show: metrics, bytes of the last checkpoint."""
    reason: Reason | None = None

    @property
    def is_identical(self) -> bool:
        """True if the interrupted run equals the undisturbed run, bit for bit."""
        return self.failed is None and self.first is None and not self.also


def verify_resume(
    undisturbed: Sequence[Trial], disturbed: Trial, interruptions: Sequence[Interruption], *, seed: int,
    timeout_s: float, say: Callable[[str], None] = lambda _: None,
) -> ResumeReport:  # fmt: skip
    """Run two undisturbed trials and a disturbed one, and compare them. No process is left, also after an error.

    Args:
        undisturbed: two trials that differ in their folders only.
        disturbed: the same training; its ranks interrupt themselves as `interruptions` say.
        interruptions: the interruptions of the disturbed trial, in order.
        seed: seed of the interruptions, for the report.
        timeout_s: seconds that one attempt may take.
        say: called with a line about the progress.

    Raises:
        ConfigError: the worker found the configuration wrong.
    """
    try:
        return _run_and_compare(undisturbed, disturbed, interruptions, seed, timeout_s, say)
    finally:
        # After a time-out, a rank that waits for a failed one, or Ctrl-C, nothing else would end the processes.
        end_local([trial.sweep for trial in (*undisturbed, disturbed)], say=say)


def _run_and_compare(
    undisturbed: Sequence[Trial], disturbed: Trial, interruptions: Sequence[Interruption], seed: int, timeout_s: float,
    say: Callable[[str], None],
) -> ResumeReport:  # fmt: skip
    spec = disturbed.spec
    report = ResumeReport(
        run_id=spec.run_id, num_steps=spec.num_steps, world_size=spec.shape.world_size, seed=seed,
        interruptions=[str(interruption) for interruption in interruptions],
    )  # fmt: skip
    try:
        traces = []
        for number, trial in enumerate(undisturbed, 1):
            say(f"undisturbed run {number} of {len(undisturbed)} ..")
            _run(trial, [], timeout_s, say)
            traces.append(read_trace(trial.sweep.run(spec.run_id), spec.shape.world_size))
        twins = first_difference(*traces)
        if twins is not None:
            report.first, report.between = twins, "two undisturbed runs"
            deterministic = bool(spec.config["train"]["deterministic"])
            own = spec.config["train"]["main"] is not None
            report.reason = why_undisturbed_differ(twins, deterministic=deterministic, has_own_loop=own)
            return report
        say(f"interrupted run: {', '.join(report.interruptions)} ..")
        _run(disturbed, interruptions, timeout_s, say)
    except RunStateError as error:
        report.failed = str(error)
        return report
    paths = disturbed.sweep.run(spec.run_id)
    resumed = read_trace(paths, spec.shape.world_size)
    resumed_steps = [attempt.resumed_step for attempt in Journal(paths).read()]
    report.resumed_steps = [step for step in resumed_steps if step is not None][1:]
    if not any(report.resumed_steps):
        report.failed = (
            "nothing was verified: the interrupted run never resumed from a checkpoint. Take more --steps; a loop of "
            "your own must save where run.should_save and run.should_stop say so (docs/own_loop.md)."
        )
        return report
    _compare(report, traces[0], traces[1], resumed, spec)
    return report


def _compare(report: ResumeReport, one: Trace, twin: Trace, resumed: Trace, spec: RunSpec) -> None:
    report.num_compared = sum(len(next(iter(one.steps(rank).values()), {})) for rank in range(len(one.lines)))
    report.metrics = sorted({name for values in one.metrics.values() for name in values})
    report.files = sorted(one.files)
    first = first_difference(one, resumed)
    if first is not None:
        report.first, report.between = first, "the undisturbed run and the interrupted one"
        report.reason = why_resumed_differs(
            first, one, resumed, num_workers=int(spec.config["data"]["num_workers"]),
            has_own_loop=spec.config["train"]["main"] is not None,
        )  # fmt: skip
    metrics = other_metrics(one, resumed, twin)
    report.also = [f"metric {name} at step {step}" for step, name in metrics[:3]]
    report.also += [f"bytes of {name} in the last checkpoint" for name in other_files(one, resumed)]
    if one.last_step != resumed.last_step:
        report.also.append(f"the last checkpoint is of step {resumed.last_step}, not {one.last_step}")


def _run(trial: Trial, interruptions: Sequence[Interruption], timeout_s: float, say: Callable[[str], None]) -> None:
    """Start the trial, and again after each interruption, until it is complete.

    Raises:
        ConfigError: the worker found the configuration wrong.
        RunStateError: the trial failed, or an attempt did not end in `timeout_s` seconds.
    """
    trial.start()
    for expected in (*interruptions, None):
        run = await_end(trial.sweep, trial.spec.run_id, timeout_s)
        if run.state is RunState.COMPLETED:
            return
        # After a kill, the queue reports FAILED, or a rank that outlived the others for a moment does.
        is_killed = expected is not None and expected.number is signal.SIGKILL
        as_killed = run.state.has_failed or run.state is RunState.NODE_FAIL
        if expected is None or not (run.state is RunState.PREEMPTED or (is_killed and as_killed)):
            raise_failure(trial.sweep, run)
        at = "" if is_killed else f" at step {run.step}"  # a killed rank reported its step some seconds earlier
        say(f"  {expected}: {run.state.value}{at}; started again")
        trial.bring_back()
