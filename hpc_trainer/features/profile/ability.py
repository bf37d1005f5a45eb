"""Steps are watched on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpc_trainer.features.profile.stepper import ProfiledStepper
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState
from hpc_trainer.training.step import Stepper


class ProfileAbility(Ability):
    _watcher: ProfiledStepper | None = None

    def stepper(self, make: Callable[..., Stepper], state: TrainState, building: Building) -> Callable[..., Stepper]:
        run = building.run
        if run is None or not run.is_rank_zero:
            return make

        def make_watched(**fields: Any) -> Any:
            monitor = self.config.monitor
            self._watcher = ProfiledStepper(
                make(**fields), self.config, run.paths, warmup_steps=monitor.profile_warmup_steps,
                num_steps=monitor.profile_steps,
            )  # fmt: skip
            return self._watcher

        return make_watched

    def close(self, error: BaseException | None) -> None:
        if self._watcher is not None:
            self._watcher.close()


ABILITY = ProfileAbility
