"""Profiles of steps: on rank 0 as `monitor.profile_steps` says, on any rank on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpc_trainer.features.profile.on_request import StepperOnRequest
from hpc_trainer.features.profile.stepper import ProfiledStepper
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


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
