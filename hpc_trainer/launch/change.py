"""Frozen runs with other values of `cluster.*` and `hardware.*`: the same runs, started elsewhere, longer or larger."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_trainer.config.compose.changes import CHANGEABLE, with_changes
from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import plain_value
from hpc_trainer.config.mesh import num_parts, whole_batch
from hpc_trainer.config.program import is_one_a_node
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.config.schema.key import Identity
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import KEYS
from hpc_trainer.errors import ConfigError
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.slurm.shape import resources


def change_specs(specs: Sequence[RunSpec], changes: Sequence[str], *, may_differ: bool = False) -> list[RunSpec]:
    """Return the runs with these changes, checked by the rules of a submit.

    Args:
        may_differ: allow changes that would turn a run into another one; each run keeps its id and digest.

    Raises:
        ConfigError: a change is wrong, or turns a run into another one, whose results would be indistinguishable from
            the earlier ones.
    """
    made: dict[str, TrainConfig] = {}
    changed, problems = [], dict[str, None]()
    for spec in specs:
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
        changed.append(dataclasses.replace(spec, config=plain, shape=shape, overrides=overrides))
    if problems:
        raise ConfigError("\n".join(problems))
    return changed


def _divide_anew(config: TrainConfig, before: HardwareConfig) -> bool:
    """Divide the batch anew if the number of ranks has changed; return True if it was divided.

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
        "hpc-trainer submit with it begins that one; with parallel.elastic=true or train.logical_ranks a run may go on "
        "with other ranks."
    )
