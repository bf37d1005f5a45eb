"""Certification of a configuration: one training, twice undisturbed and once interrupted, compared step by step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpc_trainer.errors import RunStateError
from hpc_trainer.operate.certify.compare import (
    First,
    Reason,
    Trace,
    first_difference,
    other_files,
    other_metrics,
    read_trace,
    why_resumed_differs,
    why_undisturbed_differ,
)
from hpc_trainer.operate.end_local import end_local
from hpc_trainer.operate.one_run import await_end, raise_failure
from hpc_trainer.runs.interruptions import Interruption
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.spec import RunSpec
from hpc_trainer.runs.states import RunState
from hpc_trainer.state.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Sweep of one run: `start` submits it, `bring_back` submits it again."""

    sweep: SweepPaths
    spec: RunSpec
    start: Callable[[], object]
    bring_back: Callable[[], object]


@dataclass(slots=True, kw_only=True)
class Certificate:
    """Result of a certification."""

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


def certify(
    undisturbed: Sequence[Trial], disturbed: Trial, interruptions: Sequence[Interruption], *, seed: int,
    timeout_s: float, say: Callable[[str], None] = lambda _: None,
) -> Certificate:  # fmt: skip
    """Run two undisturbed trials and a disturbed one, and compare them. No process is left, also after an error.

    Args:
        undisturbed: two trials that differ in their folders only.
        disturbed: the same training; its ranks interrupt themselves as `interruptions` say.
        interruptions: the interruptions of the disturbed trial, in order.
        seed: seed of the interruptions, for the certificate.
        timeout_s: seconds that one attempt may take.
        say: called with a line about the progress.

    Raises:
        ConfigError: the worker found the configuration wrong.
    """
    try:
        return _certify(undisturbed, disturbed, interruptions, seed, timeout_s, say)
    finally:
        # After a time-out, a rank that waits for a failed one, or Ctrl-C, nothing else would end the processes.
        end_local([trial.sweep for trial in (*undisturbed, disturbed)], say=say)


def _certify(
    undisturbed: Sequence[Trial], disturbed: Trial, interruptions: Sequence[Interruption], seed: int, timeout_s: float,
    say: Callable[[str], None],
) -> Certificate:  # fmt: skip
    spec = disturbed.spec
    certificate = Certificate(
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
            certificate.first, certificate.between = twins, "two undisturbed runs"
            deterministic = bool(spec.config["train"]["deterministic"])
            own = spec.config["train"]["main"] is not None
            certificate.reason = why_undisturbed_differ(twins, deterministic=deterministic, has_own_loop=own)
            return certificate
        say(f"interrupted run: {', '.join(certificate.interruptions)} ..")
        _run(disturbed, interruptions, timeout_s, say)
    except RunStateError as error:
        certificate.failed = str(error)
        return certificate
    paths = disturbed.sweep.run(spec.run_id)
    resumed = read_trace(paths, spec.shape.world_size)
    resumed_steps = [attempt.resumed_step for attempt in Journal(paths).read()]
    certificate.resumed_steps = [step for step in resumed_steps if step is not None][1:]
    if not any(certificate.resumed_steps):
        certificate.failed = (
            "nothing was shown: the interrupted run never went on from a checkpoint. Take more --steps; a loop of your "
            "own must save where run.should_save and run.should_stop say so (docs/own_loop.md)."
        )
        return certificate
    _compare(certificate, traces[0], traces[1], resumed, spec)
    return certificate


def _compare(certificate: Certificate, one: Trace, twin: Trace, resumed: Trace, spec: RunSpec) -> None:
    certificate.num_compared = sum(len(next(iter(one.steps(rank).values()), {})) for rank in range(len(one.lines)))
    certificate.metrics = sorted({name for values in one.metrics.values() for name in values})
    certificate.files = sorted(one.files)
    first = first_difference(one, resumed)
    if first is not None:
        certificate.first, certificate.between = first, "the undisturbed run and the interrupted one"
        certificate.reason = why_resumed_differs(
            first, one, resumed, num_workers=int(spec.config["data"]["num_workers"]),
            has_own_loop=spec.config["train"]["main"] is not None,
        )  # fmt: skip
    metrics = other_metrics(one, resumed, twin)
    certificate.also = [f"metric {name} at step {step}" for step, name in metrics[:3]]
    certificate.also += [f"bytes of {name} in the last checkpoint" for name in other_files(one, resumed)]
    if one.last_step != resumed.last_step:
        certificate.also.append(f"the last checkpoint is of step {resumed.last_step}, not {one.last_step}")


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
