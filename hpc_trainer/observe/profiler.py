"""Profile of a window of steps by torch.profiler: the trace, the table and its figures, and the answer to a request.

Rank 0 profiles the window of `monitor.profile_steps`; any rank profiles one if a user asks for it (profile_request.py).
Profiling changes no bit of the training (tests/unit/training/test_neutral.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.observe.profile_figures import (
    DATA_WAIT,
    OPTIMIZER,
    STEP,
    ProfileFigures,
    Span,
    figures_of,
    summary_lines,
)
from hpc_trainer.observe.profile_request import (
    DONE,
    FAILED,
    WATCHING,
    ProfileAnswer,
    ProfileRequest,
    read_answer,
    read_request,
    write_answer,
)
from hpc_trainer.record.files import rename, write_atomic
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.data.loader import Batch
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper, StepResult

_ROWS = 25


class ProfiledStepper:
    """Stepper that profiles a window of its own steps.

    Args:
        stepper: the stepper inside; everything but `step` is its own.
        warmup_steps: number of steps before the window, ≥ 1.
        num_steps: number of steps in the window.
        paths: where the trace and the table go; those of an earlier profile are replaced.
        rank: rank that is profiled.
        report: gets the figures and their lines, or why the profile could not be written.
    """

    def __init__(
        self, stepper: Any, config: TrainConfig, paths: RunPaths, *, warmup_steps: int, num_steps: int, rank: int = 0,
        report: Callable[[ProfileFigures | None, Sequence[str]], None] = lambda figures, lines: None,
    ) -> None:  # fmt: skip
        self._stepper, self._config, self._rank, self._report = stepper, config, rank, report
        self._table, self._trace = paths.profile_files(rank)
        self._first = warmup_steps
        self._end = self._first + num_steps
        self._num_done = 0
        self._torch: Any = None
        self._inside_s: list[float] = []
        self._first_step = self._num_seen = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def step(self, state: Any, batches: Iterator[Batch], **options: Any) -> StepResult:
        """Run the stepper's step, and profile it if it is in the window."""
        # One step more than the window: the profiler's own first step is slow, and its schedule leaves it out.
        if self._num_done == self._first - 1:
            self._start()
        if self._torch is None:
            self._num_done += 1
            return self._stepper.step(state, batches, **options)  # type: ignore[no-any-return]
        if self._num_done == self._first:
            self._first_step = state.step + 1
        self._wait_for_device()
        begin = time.perf_counter()
        result: StepResult = self._stepper.step(state, _Watched(batches), **options)
        self._wait_for_device()
        if self._num_done >= self._first:
            self._inside_s.append(time.perf_counter() - begin)
            self._num_seen += 1
        self._num_done += 1
        self._safely(self._torch.step)  # the call for the last step writes the profile
        if self._num_done >= self._end:
            self.close()
        return result

    @property
    def is_over(self) -> bool:
        """True when the window has ended."""
        return self._num_done >= self._end

    def close(self) -> None:
        """End the window early, and write what it has recorded."""
        seen, self._torch = self._torch, None
        if seen is not None:
            self._safely(seen.stop)

    def _start(self) -> None:
        cuda = [ProfilerActivity.CUDA] if self._stepper.device.type == "cuda" else []
        self._torch = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=0, warmup=1, active=self._end - self._first, repeat=1),
            on_trace_ready=self._write,
        )
        self._safely(self._torch.start)

    def _safely(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # counters that are not permitted, another profiler: no reason to end a run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        print(f"WARNING: no profile: {type(error).__name__}: {error}", flush=True)
        self._report(None, [str(error)])
        self._report = lambda figures, lines: None
        seen, self._torch, self._end = self._torch, None, 0
        if seen is not None:
            with contextlib.suppress(Exception):
                seen.stop()

    def _wait_for_device(self) -> None:
        # So that a step's kernels are counted in that step; only while the profiler is on.
        kind_of(self._stepper.device).synchronize(self._stepper.device)

    def _write(self, seen: Any) -> None:
        """Write the profile. A failure is a warning: it must not end a training."""
        try:
            figures = read_figures(
                seen.events(), self._stepper.device, first_step=self._first_step, num_steps=self._num_seen,
                inside_s=self._inside_s,
            )  # fmt: skip
            if figures is None:
                return
            said = list(summary_lines(figures, self._config, self._rank))
            lines = [f"profile: {line}" for line in said]
            temporary = self._trace.with_name(f".{self._trace.name}")
            seen.export_chrome_trace(str(temporary))
            rename(temporary, self._trace)
            by = "self_cuda_time_total" if figures.device == "cuda" else "self_cpu_time_total"
            table = seen.key_averages().table(sort_by=by, row_limit=_ROWS)
            write_atomic(self._table, "\n".join([*lines, "", table]) + "\n", sync=False)
            where = f"profile: {self._table.name} and {self._trace.name} (chrome://tracing)"
            print("\n".join([*lines, where]), flush=True)
        except Exception as error:
            print(f"WARNING: the profile could not be written: {error}", flush=True)
            self._report(None, [str(error)])
        else:
            self._report(figures, said)


class _Watched(Iterator[Batch]):
    """Batches of a loader, with the wait for each in the trace."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __next__(self) -> Batch:
        with record_function(DATA_WAIT):
            return next(self._batches)

    def targets_ahead(self, num_batches: int, count: Callable[[Batch], int]) -> list[int]:
        """Return the loader's `targets_ahead`, with the wait for it in the trace."""
        with record_function(DATA_WAIT):
            return self._batches.targets_ahead(num_batches, count)  # type: ignore[no-any-return]


def read_figures(
    events: Any, device: torch.device, *, first_step: int, num_steps: int, inside_s: Sequence[float]
) -> ProfileFigures | None:
    """Return the figures of the events (torch.autograd.profiler_util); None if no step was recorded completely."""
    marks = [event for event in events if event.name.startswith(STEP) and _is_on_cpu(event)]
    # The mark that was begun after the last step is no step.
    steps = sorted(marks, key=lambda mark: mark.time_range.start)[:num_steps]
    if not steps:
        return None
    main = [event for event in events if _is_on_cpu(event) and event.thread == steps[0].thread]
    operators = [event for event in main if not _is_mark(event)]
    outermost = [_span(event) for event in operators if _is_outermost(event)]
    work, own = outermost, [(event.name, event.self_cpu_time_total) for event in operators if not _is_in_wait(event)]
    memory = None
    if device.type == "cuda":
        work = [_span(event) for event in events if not _is_on_cpu(event) and not _is_mark(event)]
        own = [(span.name, span.end - span.start) for span in work]
        total = torch.cuda.get_device_properties(device).total_memory
        memory = torch.cuda.max_memory_allocated(device) / total
    return figures_of(
        device=device.type,
        first_step=first_step,
        steps=[_span(step) for step in steps],
        waits=[_span(event) for event in main if event.name == DATA_WAIT],
        optimizer=[_span(event) for event in main if event.name.startswith(OPTIMIZER)],
        work=work,
        host=outermost,
        own_us=own,
        inside_s=inside_s,
        peak_memory_share=memory,
    )


def _span(event: Any) -> Span:
    return Span(event.name, event.time_range.start, event.time_range.end)


def _is_on_cpu(event: Any) -> bool:
    return str(event.device_type) == "DeviceType.CPU"


def _is_mark(event: Any) -> bool:
    """Return True for a named span, which is neither an operator nor a kernel."""
    return bool(event.is_user_annotation) or event.name.startswith((STEP, OPTIMIZER, DATA_WAIT))


def _is_outermost(event: Any) -> bool:
    return all(_is_mark(parent) for parent in _parents(event))


def _is_in_wait(event: Any) -> bool:
    return any(parent.name == DATA_WAIT for parent in _parents(event))


def _parents(event: Any) -> Iterator[Any]:
    while (event := event.cpu_parent) is not None:
        yield event


# A check is a stat of a file that mostly does not exist. 512 ranks make some 30 checks a second.
_LOOK_S, _LOOK_PER_RANK_S = 1.0, 0.03


class StepperOnRequest:
    """Stepper that profiles a window on request; everything but `step` is that of the stepper inside.

    A step without a request takes 0.4 µs more. A request waits while `is_busy` returns true.
    """

    def __init__(
        self, stepper: Any, config: TrainConfig, paths: RunPaths, group: RankGroup, *, attempt: int,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._stepper, self._config, self._paths, self._rank = stepper, config, paths, group.rank
        self._attempt, self._is_busy = attempt, is_busy
        self._every_s = max(config.monitor.heartbeat_every_s, _LOOK_S, _LOOK_PER_RANK_S * group.world_size)
        self._next_look = 0.0
        self._request: ProfileRequest | None = None
        self._answered: str | None = None
        self._watched: ProfiledStepper | None = None
        self._has_reported = False
        self._step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def step(self, state: Any, batches: Iterator[Batch], **options: Any) -> StepResult:
        """Run the stepper's step, and profile it if it is in a requested window."""
        if self._watched is None and time.monotonic() >= self._next_look:
            self._look(state.step)
        watched = self._watched
        if watched is None:
            return self._stepper.step(state, batches, **options)  # type: ignore[no-any-return]
        self._step = state.step + 1
        result = watched.step(state, batches, **options)
        if watched.is_over:
            self._end("no step was recorded completely")
        return result

    def close(self) -> None:
        """Write the profile of an open window at the end of the run's steps."""
        if self._watched is not None:
            self._watched.close()
            self._end("the run ended its steps before one was recorded completely")

    def _look(self, step: int) -> None:
        self._next_look = time.monotonic() + self._every_s
        request = read_request(self._paths)
        if request is None or request.id == self._answered or self._rank not in request.ranks:
            return
        if not request.is_wanted() or self._is_busy() or torch.autograd.profiler._is_profiler_enabled:
            return  # torch allows one profiler at a time
        before = read_answer(self._paths, self._rank)
        if before is not None and before.id == request.id and before.state != WATCHING:
            self._answered = request.id  # by an earlier attempt
            return
        self._request, self._has_reported, self._step = request, False, step
        self._answer(WATCHING)
        self._watched = ProfiledStepper(
            self._stepper, self._config, self._paths, warmup_steps=1, num_steps=request.num_steps, rank=self._rank,
            report=self._report,
        )  # fmt: skip

    def _report(self, figures: ProfileFigures | None, lines: Sequence[str]) -> None:
        self._has_reported = True
        if figures is None:
            self._answer(FAILED, error="; ".join(lines))
        else:
            self._answer(DONE, figures={**asdict(figures), "step_s": figures.step_s}, lines=tuple(lines))

    def _end(self, why_nothing: str) -> None:
        if not self._has_reported:
            self._answer(FAILED, error=why_nothing)
        self._watched, self._answered = None, None if self._request is None else self._request.id

    def _answer(self, state: str, **more: Any) -> None:
        assert self._request is not None
        try:
            answer = ProfileAnswer(id=self._request.id, state=state, attempt=self._attempt, step=self._step, **more)
            write_answer(self._paths, self._rank, answer)
        except OSError as error:  # a full disk must not end a training for a profile
            print(f"WARNING: the answer to a request for a profile could not be written: {error}", flush=True)


class ProfileAbility(Ability):
    _watchers: tuple[ProfiledStepper | StepperOnRequest, ...] = ()

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        run, monitor = building.run, self.config.monitor
        if run is None:
            return make

        def make_watched(**fields: Any) -> Any:
            stepper: Any = make(**fields)
            own: ProfiledStepper | None = None
            if monitor.profile_steps and run.is_rank_zero:
                own = stepper = ProfiledStepper(
                    stepper, self.config, run.paths, warmup_steps=monitor.profile_warmup_steps,
                    num_steps=monitor.profile_steps,
                )  # fmt: skip
                self._watchers = (own,)
            on_request = StepperOnRequest(
                stepper, self.config, run.paths, run.group, attempt=run.attempt,
                is_busy=lambda: own is not None and not own.is_over,
            )  # fmt: skip
            self._watchers += (on_request,)
            return on_request

        return make_watched

    def close(self, error: BaseException | None) -> None:
        for watcher in self._watchers:
            watcher.close()


ABILITY = ProfileAbility
