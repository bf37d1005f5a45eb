"""Changes of a frozen configuration, such as `retry RUN hardware.time_limit_min=480`.

Overrides follow Hydra's grammar and the schemas, as at a submit. No configuration file is read again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_trainer.config.compose.composer import ROOT, Composer
from hpc_trainer.config.compose.hydra_parts import HydraParts
from hpc_trainer.config.compose.own_files import config_dirs_of
from hpc_trainer.config.load import plain_value, section_from_plain
from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError

CHANGEABLE = ("cluster", "hardware")
_STAYS = "cluster.executor"


def with_changes(config: TrainConfig, changes: Sequence[str]) -> TrainConfig:
    """Return the configuration with other values of `cluster.*` and `hardware.*`; `config` itself is not changed.

    Raises:
        ConfigError: a change is of another section, has more than one value, or does not fit the schema.
    """
    with Composer() as composer:
        return _changed(composer, config, changes, CHANGEABLE, _problem)


def with_data(
    config: TrainConfig, overrides: Sequence[str], config_dirs: Sequence[Path] = (),
    inherited: Callable[[DataConfig, Collection[str]], Mapping[str, Any]] = lambda data, given: {},
) -> tuple[TrainConfig, frozenset[str]]:  # fmt: skip
    """Return a configuration with other data (`eval RUN data=.. data.path=..`), and the keys that the user gave.

    `config` itself is not changed. With `data=CHOICE` the whole section is composed again; otherwise single keys are
    changed. A value that differs from the default counts as given by the user, even if a file of the choice sets it.

    Args:
        inherited: function of the new section and the given keys, which returns values of other keys.

    Raises:
        ConfigError: an override is of another section, has more than one value, or does not fit the schema.
    """
    changed, given = config, frozenset[str]()
    if overrides:
        with Composer(config_dirs_of(config_dirs)) as composer:
            parsed = composer.parse(overrides)
            _refuse(map(_problem_of_data, parsed))
            given = frozenset(override.key_or_group.partition(".")[2] for override in parsed)
            if any(override.key_or_group == "data" for override in parsed):
                changed = dataclasses.replace(config, data=composer.compose(overrides).data)
                usual, here = plain_value(type(changed.data)()), plain_value(changed.data)
                given |= {name for name, value in here.items() if value != usual[name]}
            else:
                changed = _changed(composer, config, overrides, ("data",), _problem_of_data)
    more = inherited(changed.data, given)
    if more:
        data = section_from_plain(type(changed.data), {**plain_value(changed.data), **more})
        changed = dataclasses.replace(changed, data=data)
    return changed, given


def _changed(
    composer: Composer, config: TrainConfig, overrides: Sequence[str], names: Sequence[str],
    problem_of: Callable[[Override], str | None],
) -> TrainConfig:  # fmt: skip
    """Return `config` with single keys of these sections changed."""
    parsed = composer.parse(overrides)
    sections = OmegaConf.create({name: OmegaConf.structured(getattr(config, name)) for name in names})
    OmegaConf.set_struct(sections, True)
    _refuse(problem_of(override) or composer.problem_of_key(override, lambda: sections) for override in parsed)
    try:
        HydraParts(ROOT).apply(parsed, sections)
        made: dict[str, Any] = {name: OmegaConf.to_object(sections[name]) for name in names}
    except (HydraException, OmegaConfBaseException) as error:
        raise composer.explain(error, overrides) from error
    return dataclasses.replace(config, **made)


def _refuse(problems: Iterable[str | None]) -> None:
    problem = next(filter(None, problems), None)
    if problem is not None:
        raise ConfigError(problem)


def _problem_of_data(override: Override) -> str | None:
    if override.key_or_group.partition(".")[0] == "data" and not override.is_sweep_override():
        return None
    return (
        f"{override.input_line}: only the data can be changed here, each key to one value: data=CHOICE, data.KEY=VALUE."
    )


def _problem(override: Override) -> str | None:
    key, said = override.key_or_group, override.input_line
    section, _, name = key.partition(".")
    if section not in CHANGEABLE:
        return f"{said}: only cluster.* and hardware.* can be changed. For another {key} submit another run."
    if not name:
        return f"{said}: change single keys, as {key}.KEY=VALUE. To use another profile, submit another run."
    if key == _STAYS:
        return f"{said}: the executor of a sweep cannot be changed. Submit the run under another sweep_name."
    return f"{said}: a run has one value of {key}. Give a single value." if override.is_sweep_override() else None
