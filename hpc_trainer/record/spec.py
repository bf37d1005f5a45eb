"""RunSpec: one frozen run in plain values, written once and never changed; and the axes in which runs differ."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.schema.key import PASSED_OVER, without_secrets
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.record.files import append_texts, claim, make_folder
from hpc_trainer.record.layout import SweepPaths, is_run_id
from hpc_trainer.record.reading import (
    TORN,
    Faults,
    Line,
    as_count,
    as_text,
    has_seal,
    is_torn,
    list_folder,
    parse_record,
    raw_lines,
    seal,
    tell,
)
from hpc_trainer.record.trust import is_ours
from hpc_trainer.slurm.shape import Shape

if TYPE_CHECKING:
    from hpc_trainer.config.schema.train import TrainConfig


class LateConfig(Mapping[str, Any]):
    """Configuration in a line with a valid checksum, parsed when it is looked at.

    10,000 parsed configurations would take 380 MB and 2 s; their lines in the file take nothing. So the process keeps
    only the newest `_MOST_PARSED`, and parses another again: loops over all runs should look at each run once.
    """

    __slots__ = ("_found", "_offset", "_path", "_size")

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._path, self._offset, self._size = path, offset, size
        self._found: Mapping[str, Any] | None = None

    def __getitem__(self, key: str) -> Any:
        return self._content()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content())

    def __len__(self) -> int:
        return len(self._content())

    def _content(self) -> Mapping[str, Any]:
        """Return the parsed configuration.

        Raises:
            RunStateError: since the line was read, the file was removed or replaced.
        """
        found = self._found
        if found is None:
            try:
                with self._path.open("rb") as file:
                    config = parse_record(os.pread(file.fileno(), self._size, self._offset))["config"]
            except (OSError, ValueError, KeyError) as error:
                raise RunStateError(f"{self._path} was changed while it was read ({error}). Try again.") from error
            self._found = found = dict(config)
            _parsed.append(self)
            if len(_parsed) > _MOST_PARSED:
                _parsed.popleft()._found = None
        return found


_MOST_PARSED = 500
_parsed: deque[LateConfig] = deque()

SPEC_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherShape:
    """Further hardware on which a run may start: its profile, its shape, and the sections that differ there."""

    hardware: str
    shape: Shape
    sections: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)  # not frozen: 10,000 instances would take 30 ms more
class RunSpec:
    """Run as it was submitted: later edits of YAML or code do not change it, and no code may change an instance."""

    run_id: str
    digest: str
    axes: Mapping[str, str]
    overrides: tuple[str, ...]
    shape: Shape
    hardware: str
    """The hardware profile's name."""
    num_steps: int
    """Optimizer steps of the whole run."""
    config: Mapping[str, Any]
    others: tuple[OtherShape, ...] = ()
    """Further hardware of a run that is submitted to several (`hardware=first:a,b`), in order; the first is `shape`."""

    def on(self, choice: int) -> RunSpec:
        """Return the run on one item of its hardware list, without the list; 0 is the first item.

        Raises:
            RunStateError: the list has no such item.
        """
        if choice > len(self.others):
            raise RunStateError(f"{self.run_id}: its spec has no hardware number {choice}. {WRITE_AGAIN}")
        if not choice:
            return dataclasses.replace(self, others=()) if self.others else self
        other = self.others[choice - 1]
        config = {**self.config, **other.sections}
        return dataclasses.replace(self, hardware=other.hardware, shape=other.shape, config=config, others=())

    def on_each(self) -> list[RunSpec]:
        """Return the run on each item of its hardware list; without a list, only the run itself."""
        return [self.on(choice) for choice in range(len(self.others) + 1)]

    @property
    def hardware_names(self) -> str:
        """The hardware's name, or the list `first:a,b` as the user types it, with partitions if the names are equal."""
        names = [self.hardware, *(other.hardware for other in self.others)]
        if len(set(names)) < len(names):
            shapes = [self.shape, *(other.shape for other in self.others)]
            names = [f"{name}:{shape.partition or 'default'}" for name, shape in zip(names, shapes, strict=True)]
        return names[0] if len(names) == 1 else f"first:{','.join(names)}"

    @property
    def per_gpu(self) -> int:
        """Number of runs that share the GPU of this one in a pool; 1 if it has its own."""
        pool = self.config.get("pool") or {}
        return int(pool.get("per_gpu", 1)) if pool.get("jobs") is not None else 1

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of one attempt that runs to its time limit; of a shared GPU the run's share."""
        return self.shape.gpu_hours / self.per_gpu

    @property
    def is_lost(self) -> bool:
        """True if this object is a placeholder for a spec that cannot be read (`lost_spec`)."""
        return not self.digest

    @property
    def is_program(self) -> bool:
        """True if the run executes a program of the user (`train.command`)."""
        return self.config["train"].get("command") is not None

    @property
    def is_own_loop(self) -> bool:
        """True if the run does not use the shared loop: it executes the user's own loop, or a program."""
        return self.config["train"].get("main") is not None or self.is_program

    def typed(self) -> TrainConfig:
        """Return the configuration as dataclasses.

        Raises:
            ConfigError: the spec is lost, was written by another version, or its digest does not fit its content.
        """
        if self.is_lost:
            raise ConfigError(f"{self.run_id}: its line in specs.jsonl is lost or damaged. {WRITE_AGAIN}")
        # OmegaConf and the schemas cost `status` 0.15 s that it does not need.
        from hpc_trainer.config.identity import config_digest
        from hpc_trainer.config.load import from_plain

        config = from_plain(self.config)
        digest = config_digest(self.config)
        if digest != self.digest:
            raise ConfigError(
                f"{self.run_id}: the frozen configuration was changed after submission (digest {digest[:8]}, "
                f"frozen {self.digest[:8]}). Submit it again under another sweep_name."
            )
        return config


def join_shapes(specs: Sequence[RunSpec]) -> RunSpec:
    """Return one run of a list of hardware; `specs` are the run on each item, in order. Equal shapes are kept once."""
    first, *rest = specs
    others: list[OtherShape] = []
    seen = [(first.hardware, first.shape)]
    for spec in rest:
        if (spec.hardware, spec.shape) not in seen:
            seen.append((spec.hardware, spec.shape))
            sections = {key: value for key, value in spec.config.items() if value != first.config.get(key)}
            others.append(OtherShape(hardware=spec.hardware, shape=spec.shape, sections=sections))
    return dataclasses.replace(first, others=tuple(others))


def lost_spec(run_id: str, hardware: str = "?") -> RunSpec:
    """Return a placeholder without steps for a run that is missing in specs.jsonl but recorded elsewhere."""
    shape = Shape(
        num_nodes=1, tasks_per_node=1, gpus_per_node=0, cpus_per_task=1, mem_gb_per_node=None, mem_gb_per_gpu=None,
        mem_gb_per_cpu=None, gpu_type=None, partition=None, qos=None, constraint=None, exclude=None, account=None,
        time_limit_min=1, signal_lead_s=1,
    )  # fmt: skip
    config = {
        "hardware": {"name": hardware},
        "train": {"num_steps": 0, "global_batch_size": 0, "main": None},
        "paths": {"group_readable": False},
    }
    return RunSpec(
        run_id=run_id, digest="", axes={}, overrides=(), shape=shape, hardware=hardware, num_steps=0, config=config
    )


# Specs that are held as text at a time, about 1 MB; 10,000 specs are 33 MB of text.
_SPECS_A_WRITE = 256


def append_specs(paths: SweepPaths, specs: Sequence[RunSpec]) -> None:
    """Append specs to the sweep's file and its copy, whole lines at a time.

    The copy is written first, because a spec in the file is never written again. A command killed in between leaves
    specs that no submission names: those runs are NEW, and the next command adds the other specs.
    """
    if specs:
        texts: dict[int, tuple[object, str]] = {}
        make_folder(paths.intents)
        for path in (paths.specs_copy, paths.specs):
            starts = range(0, len(specs), _SPECS_A_WRITE)
            append_texts(
                path,
                ("".join(_line(spec, texts) for spec in specs[start : start + _SPECS_A_WRITE]) for start in starts),
            )


def _line(spec: RunSpec, texts: dict[int, tuple[object, str]]) -> str:
    """Return one line of the file.

    Args:
        spec: the run.
        texts: id -> object and text of the sections and shapes so far: what several specs share is serialized once.
    """
    sections = {key: value for key, value in spec.config.items() if isinstance(value, dict)}
    for part in (*sections.values(), spec.shape):
        if id(part) not in texts:
            texts[id(part)] = part, json.dumps(dataclasses.asdict(part) if isinstance(part, Shape) else part)
    config = ", ".join(
        f"{json.dumps(key)}: {texts[id(value)][1] if key in sections else json.dumps(value)}"
        for key, value in spec.config.items()
    )
    head = {
        "format": SPEC_FORMAT, "run_id": spec.run_id, "digest": spec.digest, "axes": dict(spec.axes),
        "overrides": spec.overrides, "hardware": spec.hardware, "num_steps": spec.num_steps,
    }  # fmt: skip
    if spec.others:  # not under the names `shape` and `config`, by which `_quickly` finds the ends of the line's parts
        head["others"] = [
            {"hardware": other.hardware, "resources": dataclasses.asdict(other.shape), "sections": other.sections}
            for other in spec.others
        ]
    return seal(f"{json.dumps(head)[:-1]}{_SHAPE}{texts[id(spec.shape)][1]}{_CONFIG}{{{config}}}}}") + "\n"


# Beginnings of the last two values of a line. No JSON string contains them: a quotation mark in it has a backslash.
_SHAPE, _CONFIG = ', "shape": ', ', "config": '
_SHAPE_BEGIN, _CONFIG_BEGIN = _SHAPE.encode(), _CONFIG.encode()
_decode = json.JSONDecoder().raw_decode  # `decode` looks for white space around the text


def claim_spec(paths: SweepPaths, number: int, spec: RunSpec, more: Mapping[str, Any]) -> bool:
    """Add a run that was drawn as trial `number`; return False if another process has drawn that trial.

    Args:
        paths: the sweep.
        number: the trial's number, ≥ 0.
        spec: the run.
        more: further facts of the draw, in values that JSON can hold.
    """
    make_folder(paths.drawn)
    line = _line(spec, {})
    return claim(paths.drawn / f"{number:06d}{_DRAWN}", f"{line}{seal(json.dumps(dict(more)))}\n".encode())


_DRAWN = ".jsonl"


def drawn_names(paths: SweepPaths, faults: Faults) -> list[str]:
    """Return the names of the files of drawn runs, in the order of their trials; [] if the sweep has no search."""
    return [name for name in list_folder(paths.drawn, faults) or () if re.fullmatch(rf"[0-9]{{6,}}\{_DRAWN}", name)]


def read_drawn(path: Path, faults: Faults | None = None) -> tuple[RunSpec, dict[str, Any]] | None:
    """Return a drawn run, and the further facts of its draw; None, with a fault, if the file cannot be read.

    Raises:
        UntrustedFileError: others may have changed the file.
    """
    if not is_ours(path, faults):
        return None
    lines = list(raw_lines(path, faults))
    try:
        first, second = (parse_record(line.data.removesuffix(TORN)) for line in lines)
        return _quickly(path, lines[0], {}) or _parse(first), second
    except ValueError as error:
        if faults is not None:
            tell(faults, path, error)
        return None


def read_specs(paths: SweepPaths, faults: Faults | None = None) -> dict[str, RunSpec]:
    """Return every spec of the sweep by run id, in order of submission; {} for a sweep that does not exist.

    Runs that a search has drawn come first, in the order of their trials.

    An unreadable line costs only its own run. The line is skipped and becomes a fault, unless a later line of the same
    run is readable. The fault ends with `NAMELESS` if no readable line has the run.

    Raises:
        UntrustedFileError: others may have changed the file.
    """
    unseen = Faults() if faults is None else faults
    drawn = (read_drawn(paths.drawn / name, unseen) for name in drawn_names(paths, unseen))
    specs: dict[str, RunSpec] = {made[0].run_id: made[0] for made in drawn if made is not None}
    if not is_ours(paths.specs, faults):
        return specs
    shapes: dict[bytes, Shape] = {}
    damaged: list[tuple[Line, ValueError]] = []
    newest: dict[str, int] = {}
    path = paths.specs
    for line in raw_lines(path, faults):
        try:
            spec = _quickly(path, line, shapes) or _parse(parse_record(line.data.removesuffix(TORN)))
        except ValueError as error:  # noqa: PERF203  (a damaged line affects no other line)
            if not is_torn(line.data):
                damaged.append((line, error))
        else:
            specs[spec.run_id] = spec
            newest[spec.run_id] = line.number
    for line, why in damaged:
        match = _NAMES.search(line.data)
        read = newest.get(match[1].decode()) if match else None
        if read is None:
            tell(faults, paths.specs, f"{why}{NAMELESS}", line.number)
        elif read < line.number:
            tell(faults, paths.specs, why, line.number)
    return specs


_NAMES = re.compile(rb'"run_id": ?"([A-Za-z0-9._-]+)"')
NAMELESS = "; no other line has its run"
"""End of the fault for a damaged line of specs.jsonl, if no line of its run can be read."""


def _quickly(path: Path, line: Line, shapes: dict[bytes, Shape]) -> RunSpec | None:
    """Return the spec of a line in `_line`'s format, with its configuration still unread; None for other formats.

    Lines of older versions have other formats. The checksum vouches for the part that is not parsed here.

    Args:
        path: the file of the line, from which the configuration is read later.
        line: the line.
        shapes: the shapes parsed so far, by their text; most lines share a shape with others.

    Raises:
        ValueError: the line is damaged.
    """
    data = line.data.rstrip()
    if not has_seal(data):
        return None
    begin = data.find(_SHAPE_BEGIN)
    end = data.find(_CONFIG_BEGIN, begin)  # within the first 600 bytes of 4 kB: the rest is not copied
    if begin < 0 or end < 0:
        return None
    text = data[begin + len(_SHAPE_BEGIN) : end]
    try:
        record, _ = _decode(f"{data[:begin].decode()}}}")
        if text not in shapes:
            shapes[text] = Shape(**json.loads(text))
        return RunSpec(
            run_id=record["run_id"], digest=record["digest"], axes=record["axes"],
            overrides=tuple(record["overrides"]), shape=shapes[text], hardware=record["hardware"],
            num_steps=record["num_steps"], config=LateConfig(path, line.offset, len(data)),
            others=_others(record) if "others" in record else (),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None


def read_spec(paths: SweepPaths, run_id: str) -> RunSpec:
    """Return the newest spec of a run id, from the copy if the file has lost it.

    Only lines that contain the run id are parsed: a sweep may have 10,000 specs.

    Raises:
        RunStateError: there is no such run.
        UntrustedFileError: others may have changed the file.
        OSError: the file system failed, so the spec may exist.
    """
    mention = json.dumps(run_id).encode()
    faults = Faults()
    for path in (paths.specs, paths.specs_copy):
        newest = None
        for number, _, data in raw_lines(path, faults) if is_ours(path, faults) else ():
            if mention in data:
                try:
                    spec = _parse(parse_record(data.removesuffix(TORN)))
                    newest = spec if spec.run_id == run_id else newest
                except ValueError as error:  # an earlier line may do; after a torn line its writer wrote the spec again
                    tell(faults, path, error, number)
        if newest is not None:
            return newest
    for name in reversed(drawn_names(paths, faults)):  # the newest trials start more often than older ones restart
        drawn = read_drawn(paths.drawn / name, faults)
        if drawn is not None and drawn[0].run_id == run_id:
            return drawn[0]
    if faults.refusal is not None:
        raise faults.refusal
    why = "".join(f" {fault}." for fault in dict.fromkeys(faults))
    raise RunStateError(f"{paths.specs} holds no run {run_id} that can be read.{why} {WRITE_AGAIN}")


WRITE_AGAIN = "The same `hpc-trainer submit` command writes what is lost anew."
"""Advice for a spec that is lost or damaged."""

# Keys that the code relies on in a configuration; `typed` checks the rest. Specs of an older version may lack keys.
_KINDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hardware": {"name": str},
    "cluster": {
        "executor": str, "setup": list, "python": (str, type(None)), "srun_args": list, "array_parallelism": int,
        "sbatch": dict, "environment": dict,
    },
    "train": {
        "num_steps": int, "global_batch_size": (int, type(None)), "main": (str, type(None)),
        "command": (str, type(None)), "command_dir": (str, type(None)), "command_from": (str, type(None)),
    },
    "local": {"max_parallel": int},
    "paths": {"group_readable": bool},
}  # fmt: skip


def _parse(record: Mapping[str, Any]) -> RunSpec:
    """Return the spec of a record.

    Raises:
        ValueError: the record is damaged, or of another version.
    """
    try:
        config, shape = record["config"], Shape(**record["shape"])
        spec = RunSpec(
            run_id=record["run_id"], digest=as_text(record["digest"]), axes=record["axes"],
            overrides=tuple(record["overrides"]), shape=shape, hardware=config["hardware"]["name"],
            num_steps=config["train"]["num_steps"], config=config, others=_others(record),
        )  # fmt: skip
        is_sound = (
            is_run_id(as_text(spec.run_id))
            and isinstance(spec.axes, dict)
            and all(isinstance(word, str) for word in (*spec.axes.values(), *spec.overrides))
            and all(_fits(config[name], kinds) for name, kinds in _KINDS.items())
            and shape.num_nodes * shape.tasks_per_node * shape.cpus_per_task * shape.time_limit_min > 0
            and as_count(shape.ranks_per_task) > 0
            and as_count(shape.gpus_per_node) * as_count(config["train"]["num_steps"]) >= 0
            and spec.hardware != ""
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is of another version, or damaged ({type(error).__name__}: {error})") from error
    if not is_sound:
        raise ValueError("it is of another version, or damaged")
    return spec


def _others(record: Mapping[str, Any]) -> tuple[OtherShape, ...]:
    return tuple(
        OtherShape(
            hardware=as_text(other["hardware"]), shape=Shape(**other["resources"]), sections=dict(other["sections"])
        )
        for other in record.get("others", ())
    )


def _fits(section: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> bool:
    return all(isinstance(section[key], kind) for key, kind in kinds.items() if key in section)


# Keys in which the runs of a sweep differ, with one value per run and key: the columns of tables.

_MOST_KEYS = 8


def find_axes(specs: Sequence[RunSpec]) -> dict[str, dict[str, str]]:
    """Return the value of each run on each axis, by run id, whichever commands submitted the runs.

    Axes are the keys that any command swept, and the other keys that commands named and runs differ in. If runs are
    alike on all of these, the keys in which their configurations differ are added: a file has changed. A run has the
    value of its frozen configuration on an axis that it was not submitted with. An axis is absent from runs whose
    configuration has no such key: runs of another model. Secrets are redacted.
    """
    # An app's override that deletes a key (`~callbacks`) has no value; earlier versions stored it among the axes.
    swept = list(dict.fromkeys(axis for spec in specs for axis in spec.axes if "~" not in axis))
    named = [key for key in _named(specs) if key not in swept]
    found = _configured_keys(specs, [*(axis for axis in swept if any(axis not in spec.axes for spec in specs)), *named])
    rows: dict[str, dict[str, str | None]] = {spec.run_id: {} for spec in specs}
    for axis in swept:
        typed = _words_as_typed(axis, specs, found)
        for spec in specs:
            rows[spec.run_id][axis] = _value(spec, axis, typed, found)
    for key in named:
        values = [_value(spec, key, {}, found) for spec in specs]
        if len(set(values)) > 1:
            for spec, value in zip(specs, values, strict=True):
                rows[spec.run_id][key] = value
    alike: dict[tuple[str | None, ...], list[RunSpec]] = {}
    for spec in specs:
        alike.setdefault(tuple(rows[spec.run_id].values()), []).append(spec)
    more = dict.fromkeys(key for group in alike.values() if len(group) > 1 for key in _differing(group))
    if more:
        found = _configured_keys(specs, more)
        for spec in specs:
            rows[spec.run_id] |= {key: _value(spec, key, {}, found) for key in more}
    shown = functools.cache(without_secrets)  # 10,000 runs have few values
    return {
        run_id: {key: shown(key, value) for key, value in row.items() if value is not None}
        for run_id, row in rows.items()
    }


def typed_axes(spec: RunSpec, axes: Mapping[str, str]) -> dict[str, Any]:
    """Return a run's row of `find_axes` with its numbers and booleans as the frozen configuration has them."""
    values = {key: _configured(spec, key) for key in axes}
    return {key: values[key] if isinstance(values[key], (bool, int, float)) else text for key, text in axes.items()}


def _configured_keys(specs: Sequence[RunSpec], keys: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the values of these keys in each run's configuration, by run id; {} without keys."""
    return {spec.run_id: {key: _configured(spec, key) for key in keys} for spec in specs} if keys else {}


def _named(specs: Sequence[RunSpec]) -> list[str]:
    """Return the keys of overrides that not all runs share, except sections that do not change the computation."""
    overrides_by_run = [dict.fromkeys(spec.overrides) for spec in specs]
    counts = Counter(word for overrides in overrides_by_run for word in overrides)
    keys = dict.fromkeys(word.split("=")[0].lstrip("+~") for word, count in counts.items() if count < len(specs))
    return [key for key in keys if key.split(".")[0] not in PASSED_OVER]


def _words_as_typed(axis: str, specs: Sequence[RunSpec], found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Map a configuration's value to the text that a command had: 0.001 -> 1e-3; empty if all runs have such a text."""
    if all(axis in spec.axes for spec in specs):
        return {}
    return {str(found[spec.run_id][axis]): spec.axes[axis] for spec in reversed(specs) if axis in spec.axes}


def _value(spec: RunSpec, key: str, typed: Mapping[str, str], found: Mapping[str, Mapping[str, Any]]) -> str | None:
    if key in spec.axes:
        return shown_axis(spec.axes[key])
    value = found[spec.run_id][key]
    return None if value is None else shown_axis(typed.get(str(value), _text(value)))


def shown_axis(text: str) -> str:
    """Return a value on an axis as tables show it: 1e10 for 10000000000.0, which is what Hydra makes of 1e10."""
    return number_text(float(text)) if _LONG.fullmatch(text) else text


def number_text(value: float) -> str:
    """Return a whole number of six digits or more without .0, as a user types it: 1e10, 300000; others as Python does.

    Only tables show values so. Frozen configurations and overrides keep Python's text, on which ids depend.
    """
    if not _LONG.fullmatch(str(value)):
        return str(value)
    short = re.sub(r"e\+0*", "e", f"{value:g}")
    return short if float(short) == value else f"{value:.0f}"


_LONG = re.compile(r"-?[0-9]{6,}\.0")


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
