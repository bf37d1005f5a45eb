"""`hydra/launcher=hpc_trainer`: the points of a Hydra app's grid as frozen runs (docs/hydra_apps.md).

Hydra imports this at the start of each of its programs, so it imports Hydra alone. It lies in a namespace package, as
Hydra finds its plugins: `hydra_plugins` has no `__init__.py`.
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
    """`hydra.launcher`: where and how the runs work. What is null is as for `hpc-trainer submit`."""

    _target_: str = "hydra_plugins.hpc_trainer_launcher.HpcTrainerLauncher"
    wait: bool | None = None
    """true: until the runs have ended. false: return at once. null: wait for sweepers that need values (Optuna's)."""
    fresh: bool = False
    """true: begin anew what was done before, and set its folder aside."""
    hardware: str | None = None
    cluster: str | None = None
    partition: str | None = None
    account: str | None = None
    time_limit_min: int | None = None
    sweep_name: str | None = None
    overrides: list[str] = field(default_factory=list)
    """Further words as they stand before `--app`: ["hardware.num_nodes=2", "train.command_per=node"]."""


# Without a schema: the app's own configuration may have keys of another sweeper.
_SWEEPER = {"_target_": "hydra_plugins.hpc_trainer_launcher.HpcTrainerSweeper", "params": None}

_store = ConfigStore.instance()
_store.store(group="hydra/launcher", name="hpc_trainer", node=LauncherConf, provider="hpc_trainer")
_store.store(group="hydra/sweeper", name="hpc_trainer", node=_SWEEPER, provider="hpc_trainer")


class HpcTrainerSweeper(BasicSweeper):
    """Hydra's own sweeper for `--app`, but each point is composed once and not twice: our launcher does it."""

    def __init__(self, params: dict[str, str] | None = None, **others: Any) -> None:
        super().__init__(max_batch_size=None, params=params)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Left to the launcher."""


class HpcTrainerLauncher(Launcher):
    """Hands a batch of points to `hpc_trainer.hydra_apps.launching`."""

    def __init__(self, **keys: Any) -> None:
        self._keys = keys

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called once, before the first batch."""
        self._given = (hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submits a run for each of these lists of overrides."""
        from hpc_trainer.hydra_apps.launching import launch

        return launch(*self._given, self._keys, job_overrides, initial_job_idx)
