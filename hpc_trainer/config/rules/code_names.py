"""Rules about a person's own code: which names may be used, and what its values may be. Imports none of it."""

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
"""What a choice says of code that is a person's own: its name has to be given."""
_MOST_MEANT = 3


def targets_of(config: TrainConfig | Mapping[str, Any]) -> dict[str, str]:
    """Key -> name of the code that a configuration, typed or plain, is built from: `model._target_`, `train.main`."""
    if isinstance(config, TrainConfig):
        found = {f"{group}.{key}": getattr(getattr(config, group), key, None) for group, key in _MAY_NAME_CODE}
    else:
        found = {f"{group}.{key}": config.get(group, {}).get(key) for group, key in _MAY_NAME_CODE}
        replayed = config.get("replay", {}).get("data", [])
        found |= {f"replay.data[{place}]._target_": each.get("_target_") for place, each in enumerate(replayed)}
    return {key: str(target) for key, target in found.items() if target is not None}


def packages_of(config: TrainConfig) -> list[str]:
    """The top-level packages whose sources decide what a run does: ours, and those that it names."""
    named = {target.partition(".")[0] for target in targets_of(config).values()} - {"torch"}
    return sorted({"hpc_trainer", *named, *config.snapshot.packages})


def target_problems(config: TrainConfig) -> Iterator[str]:
    """Names of code that are not on the allow-list, or stand where something shipped is built."""
    for key, target in targets_of(config).items():
        problem = check_target(key, target, config.trust) or _shipped_problem(config, key, target)
        if problem:
            yield problem


def _shipped_problem(config: TrainConfig, key: str, target: str) -> str | None:
    """Of a choice that says itself what is built. A loop of one's own may read any key as it likes."""
    group, _, name = key.partition(".")
    if config.train.main is not None or name != "_target_":
        return None
    section: Any = getattr(config, group)
    built = {each.name: _built_by(each) for each in (kind() for kind in VARIANTS[group].values())}
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
    """None of a choice that names no code, as an optimizer that is shipped."""
    return getattr(section, "_target_", None)


def unread_params(
    config: TrainConfig, overrides: Iterable[str], axes: Iterable[str], is_taken_from: Callable[[], bool]
) -> Iterator[str]:
    """Values of `params` that nothing reads, a line each: the run would only get another name.

    Args:
        axes: keys that differ over the grid.
        is_taken_from: True if another key takes its value from `params`, as ${params.lr}; asked once, if at all.
    """
    lines = [each.lstrip("+") for each in overrides]
    given = [each for each in lines if each.partition("=")[0].partition(".")[0] == "params"]
    if not given or config.train.main is not None or is_taken_from():
        return
    for line in given:
        key, _, value = line.partition("=")
        is_axis = key in axes
        meant = [each for each in _keys_called(key.rpartition(".")[2], config) if each != key][:_MOST_MEANT]
        ways = meant if is_axis else [f"{each}={value}" for each in meant]
        use = f"Use {' or '.join(ways)}" if ways else "Leave it out"
        yield (
            f"{key if is_axis else line} has no effect: params is for code of your own, and this is "
            f"model={config.model.name} with the shared loop, which reads none. {use}, or take a key's value from it: "
            f"KEY=${{{key}}}."
        )


def _keys_called(name: str, config: TrainConfig) -> Iterator[str]:
    """The keys that this configuration has whose last word is `name`."""
    for key in DECLARED:
        if key.rpartition(".")[2] == name:
            with contextlib.suppress(AttributeError):
                attrgetter(key)(config)
                yield key


def param_problems(params: dict[str, Any]) -> tuple[str, ...]:
    """What a frozen run cannot hold of `params`."""
    return tuple(_not_json("params", params))


def _not_json(key: str, value: Any) -> Iterator[str]:
    """A frozen run is JSON: other keys and values would come back to the worker as something else."""
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
