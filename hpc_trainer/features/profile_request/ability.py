"""Steps are watched on the ranks that somebody asks for, while the run is at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpc_trainer.features.profile_request.stepper import StepperOnRequest
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


class ProfileRequestAbility(Ability):
    _watcher: StepperOnRequest | None = None

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        run = building.run
        if run is None:
            return make

        def make_watched(**fields: Any) -> Any:
            self._watcher = StepperOnRequest(make(**fields), self.config, run.paths, run.group, attempt=run.attempt)
            return self._watcher

        return make_watched

    def close(self, error: BaseException | None) -> None:
        if self._watcher is not None:
            self._watcher.close()


ABILITY = ProfileRequestAbility
