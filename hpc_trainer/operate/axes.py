"""Keys in which the runs of a sweep differ, with one value per run and key: the columns of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hpc_trainer.config.load import PASSED_OVER
from hpc_trainer.record.spec import RunSpec

_MOST_KEYS = 8


def find_axes(specs: Sequence[RunSpec]) -> dict[str, dict[str, str]]:
    """Return the value of each run on each axis, by run id, whichever commands submitted the runs.

    Axes are the keys that any command swept, and the other keys that commands named and runs differ in. If runs are
    alike on all of these, the keys in which their configurations differ are added: a file has changed. A run has the
    value of its frozen configuration on an axis that it was not submitted with. An axis is absent from runs whose
    configuration has no such key: runs of another model.
    """
    # An app's override that deletes a key (`~callbacks`) has no value; earlier versions stored it among the axes.
    swept = list(dict.fromkeys(axis for spec in specs for axis in spec.axes if "~" not in axis))
    rows: dict[str, dict[str, str | None]] = {spec.run_id: {} for spec in specs}
    for axis in swept:
        typed = _words_as_typed(axis, specs)
        for spec in specs:
            rows[spec.run_id][axis] = _value(spec, axis, typed)
    for key in _named(specs):
        values = [] if key in swept else [_value(spec, key, {}) for spec in specs]
        if len(set(values)) > 1:
            for spec, value in zip(specs, values, strict=True):
                rows[spec.run_id][key] = value
    alike: dict[tuple[str | None, ...], list[RunSpec]] = {}
    for spec in specs:
        alike.setdefault(tuple(rows[spec.run_id].values()), []).append(spec)
    more = dict.fromkeys(key for group in alike.values() if len(group) > 1 for key in _differing(group))
    for spec in specs if more else ():
        rows[spec.run_id] |= {key: _value(spec, key, {}) for key in more}
    return {run_id: {key: value for key, value in row.items() if value is not None} for run_id, row in rows.items()}


def typed_axes(spec: RunSpec, axes: Mapping[str, str]) -> dict[str, Any]:
    """Return a run's row of `find_axes` with its numbers and truth values as the frozen configuration has them."""
    values = {key: _configured(spec, key) for key in axes}
    return {key: values[key] if isinstance(values[key], (bool, int, float)) else text for key, text in axes.items()}


def _named(specs: Sequence[RunSpec]) -> list[str]:
    """Return the keys of overrides that not all runs share, except sections that do not change the computation."""
    overrides_by_run = [dict.fromkeys(spec.overrides) for spec in specs]
    counts = Counter(word for overrides in overrides_by_run for word in overrides)
    keys = dict.fromkeys(word.split("=")[0].lstrip("+~") for word, count in counts.items() if count < len(specs))
    return [key for key in keys if key.split(".")[0] not in PASSED_OVER]


def _words_as_typed(axis: str, specs: Sequence[RunSpec]) -> dict[str, str]:
    """Map a configuration's value to the text that a command had: 0.001 -> 1e-3; empty if all runs have such a text."""
    if all(axis in spec.axes for spec in specs):
        return {}
    return {str(_configured(spec, axis)): spec.axes[axis] for spec in reversed(specs) if axis in spec.axes}


def _value(spec: RunSpec, key: str, typed: Mapping[str, str]) -> str | None:
    if key in spec.axes:
        return spec.axes[key]
    value = _configured(spec, key)
    return None if value is None else typed.get(str(value), _text(value))


def _configured(spec: RunSpec, key: str) -> Any:
    """Return a value of the frozen configuration; for a section, the name of the choice."""
    value: Any = spec.config
    for part in key.lstrip("+~").split("@")[0].replace("/", ".").split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value.get("name") if isinstance(value, Mapping) else "null" if value is None else value


def _differing(specs: Sequence[RunSpec]) -> list[str]:
    """Return keys in which the configurations differ, at most `_MOST_KEYS`; a section with another name counts once."""
    runs = [dict(leaves(spec.config, without=PASSED_OVER)) for spec in specs]
    keys = [key for key in dict.fromkeys(key for config in runs for key in config) if _differs(key, runs)]
    renamed = {key.removesuffix(".name") for key in keys if key.count(".") == 1 and key.endswith(".name")}
    keys = list(dict.fromkeys(key.split(".")[0] if key.split(".")[0] in renamed else key for key in keys))
    return keys[:_MOST_KEYS]


def _differs(key: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    first, *others = (config.get(key, ...) for config in runs)
    return any(type(value) is not type(first) or value != first for value in others)


def leaves(tree: Mapping[str, Any], path: str = "", without: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a configuration, except its sections `without`; an empty mapping is a value."""
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
