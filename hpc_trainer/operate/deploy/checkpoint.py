"""Which of a run's weights a verb means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.rules.retention import best_is_max
from hpc_trainer.config.schema.parallel import Sync
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.operate.show import Known
from hpc_trainer.runs.checkpoint_folders import committed
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.metrics_log import scores_in
from hpc_trainer.training.checkpoint.retention import Retention

MODEL = "model"
TORCH_SIDE = "hpc_trainer.worker.deploy.main"
# Of features/averaged_weights: its name in a checkpoint, and what its names begin with.
_AVERAGE = ("ema", "module.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Of a run's weights. `step`: None is the newest checkpoint; `best`: by `checkpoint.keep_best`.

    `raw`: the weights that training goes on from, of a run that averages them. `name`: the module, as a loop of a
    person's own has called it.
    """

    best: bool = False
    step: int | None = None
    raw: bool = False
    name: str = MODEL


def step_of(paths: RunPaths, config: TrainConfig, which: Which) -> int:
    """The step of the checkpoint that is meant.

    Raises:
        ConfigError: it cannot be meant so.
        RunStateError: the run has no such checkpoint.
    """
    steps = [step for step, _ in committed(paths.checkpoints)]
    if not steps:
        raise RunStateError(
            f"{paths.run_id} has no checkpoint yet. Look: hpc-trainer status {paths.folder.parent.name}"
        )
    if which.best and which.step is not None:
        raise ConfigError("--best and --step name two checkpoints. Use one of them.")
    if which.step is not None:
        if which.step not in steps:
            raise ConfigError(f"--step {which.step}: there is no such checkpoint. There are: {_listed(steps)}.")
        return which.step
    if not which.best:
        return steps[0]
    metric = config.checkpoint.keep_best
    if metric is None:
        raise ConfigError(
            "--best takes the checkpoint that checkpoint.keep_best=METRIC keeps, and this run has none. Leave it out "
            f"for the newest, or use --step: {_listed(steps)}."
        )
    scores = scores_in(paths.metrics, metric)
    best = Retention(best_is_max=best_is_max(config.checkpoint)).best({s: scores[s] for s in steps if s in scores})
    if best is None:
        raise RunStateError(f"no checkpoint of {paths.run_id} has a value of {metric}. Use --step: {_listed(steps)}.")
    return best


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps)))


def asked_of(run: Known, config: TrainConfig, which: Which, step: int) -> dict[str, Any]:
    """What the process with torch is told of the weights."""
    is_average = config.train.ema_decay is not None and not which.raw
    return {
        "config": dict(run.spec.config),
        "checkpoints": str(run.sweep.run(run.spec.run_id).checkpoints),
        "run_id": run.spec.run_id,
        "step": step,
        "name": which.name,
        "over": _AVERAGE if is_average else None,
        "is_model": which.name == MODEL and config.train.main is None,
    }


def notes_of(config: TrainConfig, step: int) -> tuple[str, ...]:
    """What is to be said of weights that ranks do not share yet."""
    apart = config.parallel.sync is not Sync.every_step and step != config.train.num_steps
    return ("With parallel.sync ranks differ between two averages: these are rank 0's.",) if apart else ()


def check_trained_here(run: Known) -> None:
    """Raises RunStateError: a program of a person's own saved what it has, and nobody knows how."""
    if run.spec.is_program:
        paths = run.sweep.run(run.spec.run_id)
        raise RunStateError(f"{paths.run_id} is a program of yours: what it saved is in {paths.own_checkpoints}.")
