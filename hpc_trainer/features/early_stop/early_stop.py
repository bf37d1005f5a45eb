"""Early stopping: the best evaluation so far, and the number of evaluations since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from hpc_trainer.errors import ConfigError
from hpc_trainer.features.early_stop import EarlyStopConfig, Mode
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.state import TrainState


class EarlyStopAbility(Ability):
    _early: EarlyStop

    def on_state(self, state: TrainState, module: nn.Module, building: Building) -> None:
        self._early = state.more["early_stop"] = EarlyStop(self.config.train.early_stop)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> str | None:
        self._early.see(step, metrics)
        return self._early.reason_to_stop


ABILITY = EarlyStopAbility


def is_better(mode: Mode, value: float, best: float | None) -> bool:
    """Return True if `value` is better than `best`, or the first; an equal value is not better, and nan never is."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best if mode is Mode.min else value > best


class EarlyStop:
    """Record of one metric of the evaluations. Its `state_dict` goes into checkpoints.

    `value` and `step` are those of the best evaluation so far (None before the first). `num_worse` counts the
    evaluations since. `seen_step` is the step of the last one: an evaluation that is seen again, after a resume, counts
    once.
    """

    def __init__(self, config: EarlyStopConfig) -> None:
        self._config = config
        self.value: float | None = None
        self.step: int | None = None
        self.num_worse = 0
        self.seen_step = 0

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation at `step`. Metrics are those of all ranks, so all ranks decide alike.

        Raises:
            ConfigError: there is no such metric.
        """
        if step <= self.seen_step:
            return
        name = self._config.metric
        if name not in metrics:
            raise ConfigError(
                f"train.early_stop.metric={name} is not a metric of the evaluation: {', '.join(metrics)}."
            )
        self.seen_step = step
        if is_better(self._config.mode, metrics[name], self.value):
            self.value, self.step, self.num_worse = metrics[name], step, 0
        else:
            self.num_worse += 1

    @property
    def reason_to_stop(self) -> str | None:
        """Reason why the run should end now; None: it should not."""
        patience = self._config.patience
        if patience is None or self.num_worse < patience:
            return None
        best = "no number yet" if self.value is None else f"best {self.value:.6g} at step {self.step}"
        return f"early stop: {self._config.metric} has not improved for {self.num_worse} evaluations, {best}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"value": self.value, "step": self.step, "num_worse": self.num_worse, "seen_step": self.seen_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises KeyError if a part is missing."""
        self.value, self.step = state["value"], state["step"]
        self.num_worse, self.seen_step = state["num_worse"], state["seen_step"]
