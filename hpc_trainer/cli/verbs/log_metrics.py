"""`hpc-trainer log-metrics`: metrics that a shell script records for its own run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpc_trainer.errors import ConfigError
from hpc_trainer.record.metrics import VARIABLE, log_metrics

_HINT = "Write: hpc-trainer log-metrics step=10 loss=0.3"


def run_log_metrics(words: Sequence[str]) -> None:
    """Record one line of metrics of the run that calls this command.

    Raises:
        ConfigError: there is no step, a value is not a number, or the caller is not a run.
    """
    given = dict(word.partition("=")[::2] for word in words)
    try:
        step = int(given.pop("step"))
        num_steps = int(given.pop("num_steps")) if "num_steps" in given else None
        metrics = {key: float(value) for key, value in given.items()}
    except KeyError:
        raise ConfigError(f"log-metrics needs the step that was done. {_HINT}") from None
    except ValueError as error:
        raise ConfigError(f"log-metrics takes numbers: {error}. {_HINT}") from None
    if step < 0 or "" in metrics:
        raise ConfigError(f"log-metrics takes a step ≥ 0 and names of metrics. {_HINT}")
    if VARIABLE not in os.environ:
        raise ConfigError(
            f"log-metrics records metrics of the run that calls it, and ${VARIABLE} is not set: no run calls it here."
        )
    log_metrics(step, metrics, num_steps=num_steps)
