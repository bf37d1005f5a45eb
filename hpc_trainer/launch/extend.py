"""Training longer: a run of more steps begins where a shorter one that is else the same has ended.

Only where both have the same learning rate up to there: then the longer run has the bits of one that was never shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.memo import Memo
from hpc_trainer.config.schema.parallel import Sync
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.runs.checkpoint_folders import committed
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.shared_folder import is_there
from hpc_trainer.runs.spec import RunSpec, read_specs
from hpc_trainer.runs.states import DONE
from hpc_trainer.training.optim.schedule import learning_rate, momentum

_DIGITS = 10  # of the digest, at the end of a run's id
_SHOWN = 3
_ORIGIN = "checkpoint.resume_from="


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A run that is not there yet, and one of fewer steps that is done and else the same."""

    run_id: str
    twin: str
    origin: str | None = None
    """The folder of the checkpoint that the longer one can begin with; None: it cannot."""
    step: int | None = None
    """Of that checkpoint."""
    why: str | None = None
    """Why it cannot."""
    is_extended: bool = False
    """`twin` is the longer run itself: the sweep has it."""


def find_twins(sweep: SweepPaths, wanted: Iterable[RunSpec], known: Mapping[str, RunSpec]) -> list[Twin]:
    """Of each wanted run that the sweep does not know the longest twin, if it has one.

    Args:
        known: every run of the sweep, by its id. Their configurations are not read: their digests tell.
    """
    new = [spec for spec in wanted if spec.run_id not in known]
    if not new:
        return []
    by_label: dict[str, list[RunSpec]] = {}
    for spec in known.values():
        by_label.setdefault(spec.run_id[:-_DIGITS], []).append(spec)
    finder = _Finder(sweep)
    twins = (finder.find(spec, by_label.get(spec.run_id[:-_DIGITS], ())) for spec in new)
    return [twin for twin in twins if twin is not None]


def extend_grid(grid: Grid) -> Grid:
    """The grid with each run that has a shorter twin begun at its end; such a run has an id of its own.

    Raises:
        ConfigError: no run has a twin, or one cannot go on from it.
    """
    known = read_specs(grid.sweep)
    twins = {each.run_id: each for each in find_twins(grid.sweep, grid.specs, known)}
    refused = [each for each in twins.values() if each.origin is None]
    if refused:
        lines = [f"  {each.run_id} from {each.twin}: {each.why}" for each in refused[:_SHOWN]]
        more = [f"  and {len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else []
        raise ConfigError(
            "\n".join(
                [
                    f"{len(refused)} of these runs cannot go on where their shorter twins ended:",
                    *lines,
                    *more,
                    "Leave out --extend for straight runs. Or take checkpoint.resume_from, which goes on all the same.",
                ]
            )
        )
    if not twins:
        raise ConfigError(
            f"no run of this grid is new and has a twin in the sweep {grid.sweep.name} that is done, of fewer "
            "train.num_steps and else the same. Leave out --extend."
        )
    memo = Memo()
    specs = [_extended(spec, twins[spec.run_id], memo) if spec.run_id in twins else spec for spec in grid.specs]
    return dataclasses.replace(grid, specs=tuple(specs))


def _extended(spec: RunSpec, twin: Twin, memo: Memo) -> RunSpec:
    config = {**spec.config, "checkpoint": {**spec.config["checkpoint"], "resume_from": twin.origin}}
    digest = config_digest(config, memo)
    return dataclasses.replace(
        spec, run_id=f"{spec.run_id[:-_DIGITS]}{digest[:_DIGITS]}", digest=digest, config=config,
        overrides=(*spec.overrides, f"{_ORIGIN}{twin.origin}"),
    )  # fmt: skip


def _origin(spec: RunSpec) -> str | None:
    """The checkpoint that a command said it begins with."""
    return next((each[len(_ORIGIN) :] for each in reversed(spec.overrides) if each.startswith(_ORIGIN)), None)


class _Finder:
    """Runs of a grid share their sections: what hangs on these alone is worked out once."""

    def __init__(self, sweep: SweepPaths) -> None:
        self._sweep = sweep
        self._memo = Memo()
        self._trains: dict[tuple[int, int], dict[str, Any]] = {}
        self._limits: dict[tuple[int, ...], tuple[int, str]] = {}

    def find(self, spec: RunSpec, others: Iterable[RunSpec]) -> Twin | None:
        if not spec.num_steps or spec.config["checkpoint"].get("resume_from") is not None:
            return None
        origins = ((each, _origin(each)) for each in others if 0 < each.num_steps <= spec.num_steps)
        shorter = [each for each in origins if each[0].num_steps < spec.num_steps or each[1] is not None]
        for other, origin in sorted(shorter, key=lambda each: -each[0].num_steps):
            if not self._is_alike(spec, other, origin):
                continue
            if other.num_steps == spec.num_steps:
                return Twin(run_id=spec.run_id, twin=other.run_id, origin=origin, is_extended=True)
            if is_there(self._sweep.run(other.run_id).marker(DONE)):
                return self._judged(spec, other)
        return None

    def _is_alike(self, spec: RunSpec, other: RunSpec, origin: str | None) -> bool:
        """True if `other` is `spec` with its own number of steps, and its own beginning."""
        train, steps = spec.config["train"], other.num_steps
        shorter = self._trains.setdefault((id(train), steps), {**train, "num_steps": steps})
        config = {**spec.config, "train": shorter}
        if origin is not None:
            config["checkpoint"] = {**config["checkpoint"], "resume_from": origin}
        return config_digest(config, self._memo) == other.digest

    def _judged(self, spec: RunSpec, twin: RunSpec) -> Twin:
        """With the checkpoint of the twin's that the longer run can begin with, or why there is none."""
        run_id, twin_id = spec.run_id, twin.run_id
        key = (*(id(spec.config[name]) for name in ("train", "schedule", "optim", "parallel")), twin.num_steps)
        if key not in self._limits:
            self._limits[key] = _same_until(spec.typed(), twin.num_steps)
        limit, why = self._limits[key]
        kept = committed(self._sweep.run(twin_id).checkpoints)
        if spec.config["train"]["early_stop"]["patience"] is not None and kept and kept[0][0] < twin.num_steps:
            return Twin(
                run_id=run_id, twin=twin_id, why=f"it ended early, at step {kept[0][0]}, as the longer one would"
            )
        step, path = next(((step, path) for step, path in kept if step <= limit), (None, None))
        if path is None:
            return Twin(run_id=run_id, twin=twin_id, why=why or "it has no checkpoint any more")
        return Twin(run_id=run_id, twin=twin_id, origin=str(path.absolute()), step=step)


def _same_until(config: TrainConfig, num_steps: int) -> tuple[int, str]:
    """How many updates are the same in a run of `num_steps` and in this longer one, and what differs then, if any."""
    if config.parallel.sync is not Sync.every_step:
        return 0, "with parallel.sync its last step ended a round early"
    schedule, peak, longer = config.schedule, config.optim.lr, config.train.num_steps
    for step in range(num_steps):
        rates = [learning_rate(schedule, peak, step, total) for total in (num_steps, longer)]
        if rates[0] != rates[1] or momentum(schedule, step, num_steps) != momentum(schedule, step, longer):
            return step, (
                f"schedule={schedule.name.value}: step {step + 1} has the learning rate {rates[0]:.6g} in a run of "
                f"{num_steps} steps and {rates[1]:.6g} in one of {longer}, and no checkpoint from before is left"
            )
    return num_steps, ""
