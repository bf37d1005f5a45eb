"""log: what a shell script tells of the run that it is."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpc_trainer.errors import ConfigError
from hpc_trainer.runs.told_metrics import VARIABLE, log_metrics

_HINT = "Write: hpc-trainer log step=10 loss=0.3"


def run_log(words: Sequence[str]) -> None:
    """One line of metrics.

    Raises:
        ConfigError: there is no step, a value is no number, or this is no run.
    """
    given = dict(word.partition("=")[::2] for word in words)
    try:
        step = int(given.pop("step"))
        num_steps = int(given.pop("num_steps")) if "num_steps" in given else None
        metrics = {key: float(value) for key, value in given.items()}
    except KeyError:
        raise ConfigError(f"log needs the step that was done. {_HINT}") from None
    except ValueError as error:
        raise ConfigError(f"log takes numbers: {error}. {_HINT}") from None
    if step < 0 or "" in metrics:
        raise ConfigError(f"log takes a step ≥ 0 and names of metrics. {_HINT}")
    if VARIABLE not in os.environ:
        raise ConfigError(f"log tells of the run that it is called in, and ${VARIABLE} is not set: this is none.")
    log_metrics(step, metrics, num_steps=num_steps)
