"""Rules about a user's own code: which names may be used, and which values it may get. Imports none of that code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from hpc_trainer.config.keys import DECLARED
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.config.targets import check_target

_MAY_NAME_CODE = (
    ("model", "_target_"), ("data", "_target_"), ("task", "_target_"), ("optim", "_target_"), ("train", "main"),
)  # fmt: skip
MISSING = "???"
"""Value of a choice for a user's own code: its name has to be given."""
_MOST_MEANT = 3


def targets_of(config: TrainConfig | Mapping[str, Any]) -> dict[str, str]:
    """Return the code names in a configuration, typed or plain, by key: `model._target_`, `train.main`."""
    if isinstance(config, TrainConfig):
        targets = {f"{group}.{key}": getattr(getattr(config, group), key, None) for group, key in _MAY_NAME_CODE}
    else:
        targets = {f"{group}.{key}": config.get(group, {}).get(key) for group, key in _MAY_NAME_CODE}
        replayed = config.get("replay", {}).get("data", [])
        targets |= {f"replay.data[{place}]._target_": data.get("_target_") for place, data in enumerate(replayed)}
    return {key: str(target) for key, target in targets.items() if target is not None}


def packages_of(config: TrainConfig) -> list[str]:
    """Return the top-level packages whose sources decide what a run does: ours, and those that it names."""
    named = {target.partition(".")[0] for target in targets_of(config).values()} - {"torch"}
    return sorted({"hpc_trainer", *named, *config.snapshot.packages})


def target_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with a name of code: not on the allow-list, or used where something shipped is built."""
    for key, target in targets_of(config).items():
        problem = check_target(key, target, config.trust) or _shipped_problem(config, key, target)
        if problem:
            yield problem


def _shipped_problem(config: TrainConfig, key: str, target: str) -> str | None:
    """Return the problem with a choice that fixes what is built; a user's own loop may read any key as it likes."""
    group, _, name = key.partition(".")
    if config.train.main is not None or name != "_target_":
        return None
    section: Any = getattr(config, group)
    built = {kind.name: _built_by(kind) for kind in (cls() for cls in VARIANTS[group].values())}
    own = _built_by(type(section)())
    if own in (target, MISSING):
        return None
    shipped = next((choice for choice, code in built.items() if code == target), None)
    use = f"{group}={shipped}" if shipped else f"{group}=custom {key}={target}"
    return (
        f"{key}={target} is for {group}=custom: {group}={section.name} is built by {own}. Use {use}, or leave {key} "
        "out."
    )


def _built_by(section: Any) -> str | None:
    """Return the code that a section names; None if it names none, as for a shipped optimizer."""
    return getattr(section, "_target_", None)


def unread_params(
    config: TrainConfig, overrides: Iterable[str], axes: Iterable[str], is_taken_from: Callable[[], bool]
) -> Iterator[str]:
    """Yield each value of `params` that nothing reads: it would only give the run another name.

    Args:
        config: the configuration of a point.
        overrides: overrides as the user typed them.
        axes: keys that differ over the grid.
        is_taken_from: True if another key takes its value from `params`, as ${params.lr}; called once at most.
    """
    lines = [override.lstrip("+") for override in overrides]
    given = [line for line in lines if line.partition("=")[0].partition(".")[0] == "params"]
    if not given or config.train.main is not None or is_taken_from():
        return
    for line in given:
        key, _, value = line.partition("=")
        is_axis = key in axes
        meant = [name for name in _keys_called(key.rpartition(".")[2], config) if name != key][:_MOST_MEANT]
        ways = meant if is_axis else [f"{name}={value}" for name in meant]
        use = f"Use {' or '.join(ways)}" if ways else "Leave it out"
        yield (
            f"{key if is_axis else line} has no effect: params is for code of your own, and this is "
            f"model={config.model.name} with the shared loop, which reads none. {use}, or take a key's value from it: "
            f"KEY=${{{key}}}."
        )


def _keys_called(name: str, config: TrainConfig) -> Iterator[str]:
    """Yield the keys of this configuration whose last part is `name`."""
    for key in DECLARED:
        if key.rpartition(".")[2] == name:
            with contextlib.suppress(AttributeError):
                attrgetter(key)(config)
                yield key


def param_problems(params: dict[str, Any]) -> tuple[str, ...]:
    """Return the problems with values of `params` that a frozen run cannot hold."""
    return tuple(_not_json("params", params))


def _not_json(key: str, value: Any) -> Iterator[str]:
    """Yield each problem with a value that is not JSON: a frozen run would hand the worker something else."""
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(name, str):
                yield from _not_json(f"{key}.{name}", item)
            else:
                yield f"{key} has the key {name!r}, and keys must be texts. Use '{name}' in quotes."
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(f"{key}[{index}]", item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield f"{key}={value!r} must be a number, a text, true, false, null, or lists and mappings of them."
