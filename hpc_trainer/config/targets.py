"""`_target_` and `train.main`: names of classes and functions, used only if their prefix is on the allow-list.

A name in a configuration is code that will run. Hydra's own blocklist is no boundary (1.3.8 still opens files for
writing), so an allow-list decides: hpc_trainer, torch, and what the user trusts by `--trust`.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import DECLARED, VARIANTS
from hpc_trainer.errors import ConfigError, did_you_mean

TRUSTED_PREFIXES = ("hpc_trainer.models", "hpc_trainer.datasets", "hpc_trainer.tasks", "torch.nn", "torch.optim")
TO_BE_FOUND = (
    "A package is found in three ways: it is in the folder from which you submit; PYTHONPATH or `pip install -e` "
    "names its folder there (both are frozen with the run); or it is installed for the runs' own Python "
    "(cluster.python, or what cluster.setup activates)."
)
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")


def check_target(key: str, target: str, trusted: Sequence[str] = ()) -> str | None:
    """Return the problem with `target`, or None; import nothing.

    A prefix covers whole parts of a name: `my_lab` covers `my_lab.nets.Net`, not `my_laboratory.Net`.
    """
    if not _NAME.match(target):
        return f"{key}={target!r} must be a dotted name, as my_package.models.Net."
    prefixes = [*TRUSTED_PREFIXES, *trusted]
    if any(target == prefix or target.startswith(prefix + ".") for prefix in prefixes):
        return None
    package = target.split(".", 1)[0]
    return (
        f"{key}={target}: this package is not on the allow-list ({', '.join(prefixes)}). "
        f"If you trust that package, add --trust {package}, or `trust: [{package}]` to the project file."
    )


def locate(key: str, target: str, trusted: Sequence[str] = ()) -> Any:
    """Return the class or function that `target` names.

    Raises:
        ConfigError: the name is not on the allow-list, or names nothing that exists.
    """
    problem = check_target(key, target, trusted)
    if problem:
        raise ConfigError(problem)
    module_name, _, attribute = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(_not_imported(f"{key}={target}", module_name, error)) from error
    except ImportError as error:
        raise ConfigError(f"{key}={target}: {module_name} cannot be imported: {error}.") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        nearest = did_you_mean(attribute, [name for name in dir(module) if not name.startswith("_")])
        file = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{key}={target} was not found: {error}. Looked in: {file}. {nearest}".rstrip()) from error


def _not_imported(what: str, module_name: str, error: ModuleNotFoundError) -> str:
    missing = error.name or ""
    if missing != module_name and not module_name.startswith(f"{missing}."):  # an import in the user's own code
        return (
            f"{what}: {module_name} was found, but it imports {missing}, which was not: {error}. The runs' Python is "
            f"{sys.executable}. {TO_BE_FOUND}"
        )
    parent = sys.modules.get(missing.rpartition(".")[0])
    looked = sys.path if parent is None else getattr(parent, "__path__", [getattr(parent, "__file__", None)])
    where = ", ".join(str(entry) or "the current folder" for entry in looked)
    return f"{what} was not found: {error}. Looked in: {where}. {TO_BE_FOUND}"


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
    """Return the top-level packages whose code a run executes: hpc_trainer, and those that the configuration names."""
    named = {target.partition(".")[0] for target in targets_of(config).values()} - {"torch"}
    return sorted({"hpc_trainer", *named, *config.snapshot.packages})


def target_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with a name of code: not on the allow-list, or used where something shipped is built."""
    for key, target in targets_of(config).items():
        problem = check_target(key, target, config.trust) or _shipped_problem(config, key, target)
        if problem:
            yield problem


def _shipped_problem(config: TrainConfig, key: str, target: str) -> str | None:
    """Return the problem with a `_target_` beside a shipped choice, which has its own. A user's loop may read it."""
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
        is_taken_from: True if another key takes its value from `params`, such as ${params.lr}; called once at most.
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
            f"{key if is_axis else line} has no effect: params is for code of your own, but "
            f"model={config.model.name} runs in the shared loop, which does not read params. {use}, or set another key "
            f"from it: KEY=${{{key}}}."
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
