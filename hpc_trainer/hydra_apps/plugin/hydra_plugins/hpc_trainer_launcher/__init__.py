"""`hydra/launcher=hpc_trainer`: the points of a Hydra app's grid as frozen runs (docs/hydra_apps.md).

Hydra imports this module at the start of each of its programs, so the module imports only Hydra. Hydra finds plugins in
a namespace package: `hydra_plugins` has no `__init__.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class LauncherConf:
    """Keys of `hydra.launcher`: where and how the runs work. A null key has the default of `hpc-trainer submit`."""

    _target_: str = "hydra_plugins.hpc_trainer_launcher.HpcTrainerLauncher"
    wait: bool | None = None
    """true: wait until the runs end. false: return at once. null: wait if the sweeper needs values (Optuna's)."""
    fresh: bool = False
    """true: start finished runs again from the beginning, and set their folders aside."""
    hardware: str | None = None
    cluster: str | None = None
    partition: str | None = None
    account: str | None = None
    time_limit_min: int | None = None
    sweep_name: str | None = None
    overrides: list[str] = field(default_factory=list)
    """Further overrides, as typed before `--app`: ["hardware.num_nodes=2", "train.command_per=node"]."""


# No schema: the app's own configuration may have keys of another sweeper.
_SWEEPER = {"_target_": "hydra_plugins.hpc_trainer_launcher.HpcTrainerSweeper", "params": None}

_store = ConfigStore.instance()
_store.store(group="hydra/launcher", name="hpc_trainer", node=LauncherConf, provider="hpc_trainer")
_store.store(group="hydra/sweeper", name="hpc_trainer", node=_SWEEPER, provider="hpc_trainer")


class HpcTrainerSweeper(BasicSweeper):
    """Hydra's own sweeper for `--app`; only our launcher composes the points, so each is composed once, not twice."""

    def __init__(self, params: dict[str, str] | None = None, **others: Any) -> None:
        super().__init__(max_batch_size=None, params=params)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: the launcher composes and checks the points."""


class HpcTrainerLauncher(Launcher):
    """Launcher that hands a batch of points to `hpc_trainer.hydra_apps.launching`."""

    def __init__(self, **keys: Any) -> None:
        self._keys = keys

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's state; Hydra calls this once, before the first batch."""
        self._given = (hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit a run for each list of overrides, and return the results."""
        from hpc_trainer.hydra_apps.launching import launch

        return launch(*self._given, self._keys, job_overrides, initial_job_idx)
