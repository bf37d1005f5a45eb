"""What the runs of a sweep differ in, one value a run and key: for tables, whichever commands submitted the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hpc_trainer.config.trackers import PASSED_OVER
from hpc_trainer.runs.spec import RunSpec

_MOST_KEYS = 8


def find_axes(specs: Sequence[RunSpec]) -> dict[str, dict[str, str]]:
    """The value of each run on each axis, by run id.

    Axes are those that any command swept, the other keys that commands named and runs differ in, and then what tells
    runs apart that are alike on all of these: a changed file. A run has the value of its frozen configuration on an
    axis that it was not submitted with. Left out where the configuration has no such key: runs of another model.
    """
    # An override of an app that deletes a key (`~callbacks`) has no value; sweeps of before have it among their axes.
    swept = list(dict.fromkeys(axis for spec in specs for axis in spec.axes if "~" not in axis))
    found: dict[str, dict[str, str | None]] = {spec.run_id: {} for spec in specs}
    for axis in swept:
        typed = _words_as_typed(axis, specs)
        for spec in specs:
            found[spec.run_id][axis] = _value(spec, axis, typed)
    for key in _named(specs):
        values = [] if key in swept else [_value(spec, key, {}) for spec in specs]
        if len(set(values)) > 1:
            for spec, value in zip(specs, values, strict=True):
                found[spec.run_id][key] = value
    alike: dict[tuple[str | None, ...], list[RunSpec]] = {}
    for spec in specs:
        alike.setdefault(tuple(found[spec.run_id].values()), []).append(spec)
    more = dict.fromkeys(key for group in alike.values() if len(group) > 1 for key in _differing(group))
    for spec in specs if more else ():
        found[spec.run_id] |= {key: _value(spec, key, {}) for key in more}
    return {run_id: {key: value for key, value in row.items() if value is not None} for run_id, row in found.items()}


def typed_axes(spec: RunSpec, axes: Mapping[str, str]) -> dict[str, Any]:
    """Return a run's row of `find_axes` with its numbers and truth values as the frozen configuration has them."""
    values = {key: _configured(spec, key) for key in axes}
    return {key: values[key] if isinstance(values[key], (bool, int, float)) else text for key, text in axes.items()}


def _named(specs: Sequence[RunSpec]) -> list[str]:
    """Keys that commands named, of what a run computes and with what, but for what all runs were given alike."""
    words = [dict.fromkeys(spec.overrides) for spec in specs]
    counts = Counter(word for each in words for word in each)
    keys = dict.fromkeys(word.split("=")[0].lstrip("+~") for word, count in counts.items() if count < len(specs))
    return [key for key in keys if key.split(".")[0] not in PASSED_OVER]


def _words_as_typed(axis: str, specs: Sequence[RunSpec]) -> dict[str, str]:
    """A value of the configurations -> how a command had it: 0.001 -> 1e-3. Nobody asks where all runs have words."""
    if all(axis in spec.axes for spec in specs):
        return {}
    return {str(_configured(spec, axis)): spec.axes[axis] for spec in reversed(specs) if axis in spec.axes}


def _value(spec: RunSpec, key: str, typed: Mapping[str, str]) -> str | None:
    if key in spec.axes:
        return spec.axes[key]
    value = _configured(spec, key)
    return None if value is None else typed.get(str(value), _text(value))


def _configured(spec: RunSpec, key: str) -> Any:
    """A value of the frozen configuration; of a section the name of the choice."""
    value: Any = spec.config
    for part in key.lstrip("+~").split("@")[0].replace("/", ".").split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value.get("name") if isinstance(value, Mapping) else "null" if value is None else value


def _differing(specs: Sequence[RunSpec]) -> list[str]:
    """Keys in which these configurations differ; of a section that has another name that alone."""
    runs = [dict(leaves(spec.config, without=PASSED_OVER)) for spec in specs]
    keys = [key for key in dict.fromkeys(key for each in runs for key in each) if _differs(key, runs)]
    renamed = {key.removesuffix(".name") for key in keys if key.count(".") == 1 and key.endswith(".name")}
    keys = list(dict.fromkeys(key.split(".")[0] if key.split(".")[0] in renamed else key for key in keys))
    return keys[:_MOST_KEYS]


def _differs(key: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    first, *others = (each.get(key, ...) for each in runs)
    return any(type(each) is not type(first) or each != first for each in others)


def leaves(tree: Mapping[str, Any], path: str = "", without: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a configuration, but for its sections `without`; an empty mapping is a value."""
    for key, value in tree.items():
        if key in without:
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
