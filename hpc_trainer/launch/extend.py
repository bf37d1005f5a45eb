"""Frozen runs that change after their submit: other resources (`change_specs`), or longer training from an ended run.

A run of more steps begins where a shorter, otherwise equal run has ended. This is allowed only if both have the same
learning rate up to that step. The longer run then equals, bit for bit, one that was trained from the beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.compose.changes import CHANGEABLE, with_changes
from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import Memo, plain_value
from hpc_trainer.config.mesh import num_parts, whole_batch
from hpc_trainer.config.program import is_one_a_node
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.config.schema.key import Identity
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import KEYS
from hpc_trainer.config.table.choice import holds
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.record.checkpoint_folders import committed
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.spec import RunSpec, join_shapes, read_specs
from hpc_trainer.record.states import DONE
from hpc_trainer.slurm.shape import resources
from hpc_trainer.training.optim.schedule import learning_rate, momentum

# Frozen runs with other values of `cluster.*` and `hardware.*`: the same runs, started elsewhere, longer or larger.


def change_specs(specs: Sequence[RunSpec], changes: Sequence[str], *, may_differ: bool = False) -> list[RunSpec]:
    """Return the runs with these changes, checked by the rules of a submit; a list of hardware on each of its items.

    Args:
        may_differ: allow changes that would turn a run into another one; each run keeps its id and digest.

    Raises:
        ConfigError: a change is wrong, or turns a run into another one, whose results would be indistinguishable from
            the earlier ones.
    """
    made: dict[str, TrainConfig] = {}
    changed, problems = dict[str, list[RunSpec]](), dict[str, None]()
    for spec in (item for listed in specs for item in listed.on_each()):
        config = spec.typed()
        before = config.hardware
        key = repr([spec.config.get(name) for name in CHANGEABLE])
        if key not in made:  # most runs of a sweep share these sections
            made[key] = with_changes(config, changes)
        config.cluster, config.hardware = made[key].cluster, made[key].hardware
        is_divided = _divide_anew(config, before)
        if config.train.command is not None and config.train.num_steps == 0:
            # The number of a program's steps is unknown, and a rule requires at least one (`with_command`).
            config.train = dataclasses.replace(config.train, num_steps=1)
        try:
            validate(config)
        except ConfigError as error:
            problems.update(dict.fromkeys(str(error).splitlines()))
            continue
        sections = (*CHANGEABLE, "train") if is_divided else CHANGEABLE
        plain = {**spec.config, **{name: plain_value(getattr(config, name)) for name in sections}}
        if config_digest(plain) != spec.digest and not may_differ:
            problems[_another_run(spec.config, plain)] = None
            continue
        shape = resources(config.hardware, config.cluster, is_one_a_node(config))
        overrides = (*spec.overrides, *changes)
        now = dataclasses.replace(spec, config=plain, shape=shape, overrides=overrides)
        changed.setdefault(spec.run_id, []).append(now)
    if problems:
        raise ConfigError("\n".join(problems))
    return [join_shapes(on_each) for on_each in changed.values()]


def _divide_anew(config: TrainConfig, before: HardwareConfig) -> bool:
    """Divide the batch again if the number of ranks has changed; return True if it was divided.

    The micro-batch size stays if the batch is a multiple of it, because memory depends on it.
    """
    train, now = config.train, num_parts(config.train, config.hardware, config.parallel)
    if train.command is not None or train.is_batch_auto or now == num_parts(train, before, config.parallel):
        return False
    micro, total = train.given_micro_batch_size, whole_batch(train, config.hardware, config.parallel)
    fits = micro is not None and now > 0 and total % (micro * now) == 0
    config.train = dataclasses.replace(train, micro_batch_size=micro if fits else None, grad_accum_steps=None)
    return True


def _another_run(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    counts = [
        f"{section}.{name}={value}"
        for section in CHANGEABLE
        for name, value in now[section].items()
        if value != was[section].get(name) and KEYS[f"{section}.{name}"].identity is not Identity.apart
    ]
    return (
        f"{', '.join(counts)} makes another run of it: other ranks, cores or devices may give other results. "
        "`hpc-trainer submit` with this override begins that run; with parallel.elastic=true or train.logical_ranks a "
        "run may continue with other ranks."
    )


_DIGITS = 10  # digits of the digest, at the end of a run's id
_SHOWN = 3
_ORIGIN = "checkpoint.resume_from="


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """Pair of a run that does not exist yet and a finished, otherwise equal run of fewer steps."""

    run_id: str
    twin: str
    origin: str | None = None
    """Folder of the checkpoint that the longer run can begin with; None if it cannot begin with any."""
    step: int | None = None
    """Step of that checkpoint."""
    why: str | None = None
    """Reason why the longer run cannot begin with a checkpoint of the twin."""
    is_extended: bool = False
    """True if `twin` is the longer run itself, which the sweep already has."""


def find_twins(sweep: SweepPaths, wanted: Iterable[RunSpec], known: Mapping[str, RunSpec]) -> list[Twin]:
    """Find the longest twin of each wanted run that the sweep does not have; runs without a twin are left out.

    Args:
        known: every run of the sweep, by its id. Twins are recognised by digest, not by configuration.
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
    """Return the grid in which each run with a shorter twin begins at the twin's end; such a run gets its own id.

    Raises:
        ConfigError: no run has a twin, or a run cannot continue from its twin.
    """
    known = read_specs(grid.sweep)
    twins = {twin.run_id: twin for twin in find_twins(grid.sweep, grid.specs, known)}
    refused = [twin for twin in twins.values() if twin.origin is None]
    if refused:
        lines = [f"  {twin.run_id} from {twin.twin}: {twin.why}" for twin in refused[:_SHOWN]]
        more = [f"  and {len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else []
        raise ConfigError(
            "\n".join(
                [
                    f"{len(refused)} of these runs cannot continue where their shorter twins ended:",
                    *lines,
                    *more,
                    "Leave out --extend for straight runs. Or use checkpoint.resume_from, which resumes all the same.",
                ]
            )
        )
    if not twins:
        raise ConfigError(
            f"no new run of this grid has a shorter twin in the sweep {grid.sweep.name}: a complete run that differs "
            "only in having fewer train.num_steps. Leave out --extend."
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
    """Return the checkpoint that a run's overrides name as its beginning; None if they name none."""
    return next(
        (override[len(_ORIGIN) :] for override in reversed(spec.overrides) if override.startswith(_ORIGIN)), None
    )


class _Finder:
    """Search for twins; results that depend only on sections, which runs of a grid share, are computed once."""

    def __init__(self, sweep: SweepPaths) -> None:
        self._sweep = sweep
        self._memo = Memo()
        self._trains: dict[tuple[int, int], dict[str, Any]] = {}
        self._limits: dict[tuple[int, ...], tuple[int, str]] = {}

    def find(self, spec: RunSpec, others: Iterable[RunSpec]) -> Twin | None:
        if not spec.num_steps or spec.config["checkpoint"].get("resume_from") is not None:
            return None
        origins = ((run, _origin(run)) for run in others if 0 < run.num_steps <= spec.num_steps)
        shorter = [pair for pair in origins if pair[0].num_steps < spec.num_steps or pair[1] is not None]
        for other, origin in sorted(shorter, key=lambda pair: -pair[0].num_steps):
            if not self._is_alike(spec, other, origin):
                continue
            if other.num_steps == spec.num_steps:
                return Twin(run_id=spec.run_id, twin=other.run_id, origin=origin, is_extended=True)
            if is_there(self._sweep.run(other.run_id).marker(DONE)):
                return self._judged(spec, other)
        return None

    def _is_alike(self, spec: RunSpec, other: RunSpec, origin: str | None) -> bool:
        """Return True if `other` equals `spec` except for its number of steps and its first checkpoint."""
        train, steps = spec.config["train"], other.num_steps
        shorter = self._trains.setdefault((id(train), steps), {**train, "num_steps": steps})
        config = {**spec.config, "train": shorter}
        if origin is not None:
            config["checkpoint"] = {**config["checkpoint"], "resume_from": origin}
        return config_digest(config, self._memo) == other.digest

    def _judged(self, spec: RunSpec, twin: RunSpec) -> Twin:
        """Return the pair with the twin's checkpoint that the longer run can begin with, or the reason for none."""
        run_id, twin_id = spec.run_id, twin.run_id
        key = (*(id(spec.config[name]) for name in ("train", "schedule", "optim", "parallel")), twin.num_steps)
        if key not in self._limits:
            self._limits[key] = same_until(spec.typed(), twin.num_steps)
        limit, why = self._limits[key]
        kept = committed(self._sweep.run(twin_id).checkpoints)
        if (
            spec.config["train"].get("early_stop", {}).get("patience") is not None
            and kept
            and kept[0][0] < twin.num_steps
        ):
            return Twin(
                run_id=run_id, twin=twin_id, why=f"it stopped early, at step {kept[0][0]}, and so would the longer run"
            )
        step, path = next(((step, path) for step, path in kept if step <= limit), (None, None))
        if path is None:
            return Twin(run_id=run_id, twin=twin_id, why=why or "it has no checkpoint any more")
        return Twin(run_id=run_id, twin=twin_id, origin=str(path.absolute()), step=step)


def same_until(config: TrainConfig, num_steps: int) -> tuple[int, str]:
    """Count the updates that are equal in a run of `num_steps` and in this longer run.

    Returns:
        The count, and the reason for the first difference; "" if all `num_steps` updates are equal.
    """
    if holds(config, "parallel.sync"):
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
