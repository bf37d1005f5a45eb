"""Choice of a run's checkpoint and weights for a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.output import best_is_max
from hpc_trainer.config.schema.parallel import Sync
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.operate.show import Known
from hpc_trainer.record.checkpoint_folders import committed
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.metrics import scores_in
from hpc_trainer.training.checkpoint.retention import Retention

MODEL = "model"
TORCH_SIDE = "hpc_trainer.deploy.main"
# The averaged weights (features/averaged_weights): their name in a checkpoint, and the prefix of their tensors' names.
_AVERAGE = ("ema", "module.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Choice of a run's weights. `step` None means the newest checkpoint; `best` chooses by `checkpoint.keep_best`.

    `raw`: the weights that training continues from, in a run with averaged weights. `name`: the module's name in a
    user's own loop.
    """

    best: bool = False
    step: int | None = None
    raw: bool = False
    name: str = MODEL


def step_of(paths: RunPaths, config: TrainConfig, which: Which) -> int:
    """Return the step of the chosen checkpoint.

    Raises:
        ConfigError: the choice is not valid for this run.
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
    """Return the description of the weights for the process with torch."""
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
    """Return a note if the ranks' weights may still differ at `step`, else no notes."""
    apart = config.parallel.sync is not Sync.every_step and step != config.train.num_steps
    return ("With parallel.sync ranks differ between two averages: these are rank 0's.",) if apart else ()


def check_trained_here(run: Known) -> None:
    """Raise RunStateError if the run is a program of the user: the format of its checkpoints is not known."""
    if run.spec.is_program:
        paths = run.sweep.run(run.spec.run_id)
        raise RunStateError(f"{paths.run_id} is a program of yours: what it saved is in {paths.own_checkpoints}.")
