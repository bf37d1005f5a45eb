"""Changes of a frozen configuration, as `retry RUN hardware.time_limit_min=480` gives them: where and how a run is run.

By Hydra's grammar and the schemas, as on the command line of a submit; no file of a configuration is read again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_trainer.config.compose.composer import ROOT, Composer
from hpc_trainer.config.compose.hydra_parts import HydraParts
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError

CHANGEABLE = ("cluster", "hardware")
_STAYS = "cluster.executor"


def with_changes(config: TrainConfig, changes: Sequence[str]) -> TrainConfig:
    """The configuration with other values of `cluster.*` and `hardware.*`; `config` stays as it is.

    Raises:
        ConfigError: a change is of another section, is no single value, or does not fit the schema.
    """
    with Composer() as composer:
        overrides = composer.parse(changes)
        sections = OmegaConf.create({name: OmegaConf.structured(getattr(config, name)) for name in CHANGEABLE})
        OmegaConf.set_struct(sections, True)
        for override in overrides:
            problem = _problem(override) or composer.problem_of_key(override, lambda: sections)
            if problem is not None:
                raise ConfigError(problem)
        try:
            HydraParts(ROOT).apply(overrides, sections)
            made: dict[str, Any] = {name: OmegaConf.to_object(sections[name]) for name in CHANGEABLE}
        except (HydraException, OmegaConfBaseException) as error:
            raise composer.explain(error, changes) from error
    return dataclasses.replace(config, **made)


def with_data(config: TrainConfig, words: Sequence[str], config_dirs: Sequence[Path] = ()) -> TrainConfig:
    """The configuration with other data, as `eval RUN data=image_folder data.path=..` names them; `config` stays.

    With `data=CHOICE` all of the section is composed anew; else single keys are changed.

    Raises:
        ConfigError: a word is of another section, is no single value, or does not fit the schema.
    """
    with Composer(config_dirs) as composer:
        overrides = composer.parse(words)
        for each in overrides:
            if each.key_or_group.partition(".")[0] != "data" or each.is_sweep_override():
                raise ConfigError(
                    f"{each.input_line}: only the data can be others here, each with one value: data=CHOICE, "
                    "data.KEY=VALUE."
                )
        if any(each.key_or_group == "data" for each in overrides):
            return dataclasses.replace(config, data=composer.compose(words).data)
        section = OmegaConf.create({"data": OmegaConf.structured(config.data)})
        OmegaConf.set_struct(section, True)
        problem = next(filter(None, (composer.problem_of_key(each, lambda: section) for each in overrides)), None)
        if problem is not None:
            raise ConfigError(problem)
        try:
            HydraParts(ROOT).apply(overrides, section)
            data: Any = OmegaConf.to_object(section["data"])
        except (HydraException, OmegaConfBaseException) as error:
            raise composer.explain(error, words) from error
    return dataclasses.replace(config, data=data)


def _problem(override: Override) -> str | None:
    key, said = override.key_or_group, override.input_line
    section, _, name = key.partition(".")
    if section not in CHANGEABLE:
        return f"{said}: only cluster.* and hardware.* can change. Another {key} is another run: hpc-trainer submit."
    if not name:
        return f"{said}: give single keys, as {key}.KEY=VALUE. Another profile: hpc-trainer submit with it."
    if key == _STAYS:
        return f"{said}: a run stays with the executor of its sweep. Submit it under another sweep_name."
    return f"{said}: a run has one value of {key}. Give one." if override.is_sweep_override() else None
