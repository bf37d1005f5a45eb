"""Steps that are watched: on rank 0 as `monitor.profile_steps` says, on any rank if a user asks for a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.profile.figures import ProfileFigures
from hpc_trainer.features.profile.stepper import ProfiledStepper
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.profile_request import (
    DONE,
    FAILED,
    WATCHING,
    ProfileAnswer,
    ProfileRequest,
    read_answer,
    read_request,
    write_answer,
)
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.data.loader import Batch
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper, StepResult

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
        self._has_told = False
        self._step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def step(self, state: Any, batches: Iterator[Batch], **words: Any) -> StepResult:
        """Run the stepper's step; in a requested window with a profile of it."""
        if self._watched is None and time.monotonic() >= self._next_look:
            self._look(state.step)
        watched = self._watched
        if watched is None:
            return self._stepper.step(state, batches, **words)  # type: ignore[no-any-return]
        self._step = state.step + 1
        result = watched.step(state, batches, **words)
        if watched.is_over:
            self._end("no step was seen whole")
        return result

    def close(self) -> None:
        """Write what an open window has recorded, when the run leaves its steps."""
        if self._watched is not None:
            self._watched.close()
            self._end("the run left its steps before one was seen whole")

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
        self._request, self._has_told, self._step = request, False, step
        self._answer(WATCHING)
        self._watched = ProfiledStepper(
            self._stepper, self._config, self._paths, warmup_steps=1, num_steps=request.num_steps, rank=self._rank,
            told=self._told,
        )  # fmt: skip

    def _told(self, figures: ProfileFigures | None, lines: Sequence[str]) -> None:
        self._has_told = True
        if figures is None:
            self._answer(FAILED, error="; ".join(lines))
        else:
            self._answer(DONE, figures={**asdict(figures), "step_s": figures.step_s}, lines=tuple(lines))

    def _end(self, why_nothing: str) -> None:
        if not self._has_told:
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
