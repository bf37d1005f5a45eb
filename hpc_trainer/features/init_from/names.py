"""Names of saved weights and of the model's: renamed, included, excluded. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from hpc_trainer.config.name_patterns import fits_any, there_are
from hpc_trainer.config.schema.features.init_from import InitFromConfig
from hpc_trainer.errors import ConfigError


def is_wanted(name: str, config: InitFromConfig) -> bool:
    """Return True if `include` and `exclude` allow to load this weight of the model."""
    return (not config.include or fits_any(name, config.include)) and not fits_any(name, config.exclude)


def pattern_problems(config: InitFromConfig) -> Iterator[str]:
    """Yield what is wrong with the patterns by themselves, a line each."""
    for key in ("include", "exclude"):
        for pattern in getattr(config, key):
            if not pattern.strip():
                yield f"init_from.{key} holds {pattern!r}: names of weights, as 'head.*'. Leave it out."
    for there, here in config.rename.items():
        if there.count("*") != here.count("*") or not there or not here:
            yield (
                f"init_from.rename has {there!r}: {here!r}, and both must have as many *: what each stands for is "
                "carried over. Use names as {'bert.*': 'encoder.*'}."
            )


def renamed(names: Collection[str], config: InitFromConfig, where: str) -> dict[str, str]:
    """Return name in the model -> name at `where`, for all names there.

    Raises:
        ConfigError: a pattern fits no name, two fit one name, or two names become one.
    """
    ways = [(there, _regex(there), here) for there, here in config.rename.items()]
    for pattern, regex, _ in ways:
        if not any(map(regex.fullmatch, names)):
            raise ConfigError(
                f"init_from.rename has {pattern!r}, and no name in {where} fits it. {there_are(pattern, names)}"
            )
    origins: dict[str, str] = {}
    for name in names:
        fitting = [(pattern, match, here) for pattern, regex, here in ways if (match := regex.fullmatch(name))]
        if len(fitting) > 1:
            raise ConfigError(
                f"init_from.rename has {fitting[0][0]!r} and {fitting[1][0]!r}, which both fit {name}. Make one of "
                "them narrower."
            )
        here = _filled(fitting[0][2], fitting[0][1].groups()) if fitting else name
        if here in origins:
            raise ConfigError(
                f"init_from.rename makes {here} of {origins[here]} and of {name}. Give one of them another name."
            )
        origins[here] = name
    return origins


def check_patterns(config: InitFromConfig, here: Mapping[str, str], where: str) -> None:
    """Check the patterns against the names `here`, as `renamed` returns them.

    Raises:
        ConfigError: a pattern of `include` fits none, or nothing is left.
    """
    for pattern in config.include:
        if not any(fnmatchcase(name, pattern) for name in here):
            raise ConfigError(
                f"init_from.include has {pattern!r}, and no name in {where} fits it. {there_are(pattern, here)}"
            )
    if not any(is_wanted(name, config) for name in here):
        raise ConfigError(
            f"init_from.exclude={config.exclude} leaves nothing of {where} to begin with. Leave out a pattern, or "
            "init_from.path."
        )


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def _filled(pattern: str, parts: Iterable[str | None]) -> str:
    first, *rest = pattern.split("*")
    return first + "".join(f"{part}{each}" for part, each in zip(parts, rest, strict=True))
