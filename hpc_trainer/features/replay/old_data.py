"""Data that are replayed: those of the run that `init_from` names, by its frozen spec, and those that it replayed.

No torch, because `plan` imports this file. The run itself checks the built data before its first step (`replay.py`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.config.load import Memo, plain_value, section_from_plain
from hpc_trainer.config.rules.data_rules import data_problems, with_absolute_paths
from hpc_trainer.config.rules.declared_rules import section_problems
from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.task import TaskConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS, variant_of
from hpc_trainer.config.targets import check_target
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError, valid
from hpc_trainer.features.replay import ReplayConfig
from hpc_trainer.record import chain
from hpc_trainer.record.layout import SweepPaths, default_runs_dir
from hpc_trainer.record.spec import RunSpec, read_spec

_NOT_KEPT = frozenset({"num_workers", "stage_dir"})
"""Keys of the loader processes and the node's disk: the new data have their own."""
_SET_ASIDE = re.compile(r"\.old-\d+\Z")  # renamed by `submit --fresh`
_BY_HAND = "Or name the old data yourself: replay.data=[{name: image_folder, path: /data/old}]"


def fill(config: TrainConfig, memo: Memo) -> None:
    """Fill in the old data: those of the run that `init_from` names."""
    origin = config.init_from.path
    if config.init_from.awaits and not config.replay.data:
        origin = _awaited_origin(str(origin), config.paths.runs_dir)
    config.replay = memo.of(resolved, config.replay, origin, config.data, config.task)


def _awaited_origin(source: str, runs_dir: str | None) -> str:
    """Return the place where a run that is not complete will have a checkpoint: its spec already names its data."""
    if source.startswith(chain.BEST):
        raise ConfigError(
            f"replay: init_from={source} may be any run of that sweep, so its data are not known before. {_BY_HAND}."
        )
    folder = (Path(runs_dir).expanduser() if runs_dir else default_runs_dir()).absolute()
    awaited = chain.find_awaited(source, folder, "init_from=")
    return str(awaited.sweep.run(str(awaited.run_id)).checkpoints / "step")


def resolved(replay: ReplayConfig, origin: str | None, data: DataConfig, task: TaskConfig) -> ReplayConfig:
    """Return `replay` with the old data: keys that differ from the defaults of their kind, paths absolute.

    Args:
        replay: as the user gave it.
        origin: resolved `init_from.path`.
        data: new data of the run.
        task: of the run.

    Raises:
        ConfigError: the old data are not known, not there any more, or of another kind than `data`.
    """
    old = [typed_data(values) for values in replay.data] or _of_run(origin, task)
    for data_config in old:
        lines = [*data_problems(data_config, task), *_differences(data_config, data)]
        if lines:
            raise ConfigError("\n".join(f"replay: the old data (data={data_config.name}): {line}" for line in lines))
    kept = [_shortened(with_absolute_paths(data_config)) for data_config in old]
    return dataclasses.replace(replay, data=[item for place, item in enumerate(kept) if item not in kept[:place]])


def typed_data(values: Any) -> DataConfig:
    """Return an item of `replay.data` with its type. Raises ConfigError."""
    name = values.get("name") if isinstance(values, Mapping) else None
    kind = VARIANTS["data"].get(str(name))
    if kind is None:
        raise ConfigError(
            f"replay.data holds {values!r}, but must hold data sections, each with its name, as {{name: image_folder, "
            f"path: /data/old}}. {valid(str(name), VARIANTS['data'])}"
        )
    try:
        made: DataConfig = section_from_plain(kind, values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"replay.data: {error}. Write it as the keys of data={name} are, without `data.`.") from error
    return made


def given_problems(config: TrainConfig) -> Iterator[str]:
    """Yield problems with the items of `replay.data`: no data set, a wrong key, or code that is not trusted."""
    for place, values in enumerate(config.replay.data):
        try:
            data = typed_data(values)
        except ConfigError as error:
            yield str(error)
            continue
        yield from (f"replay.data[{place}]: {line}" for line in section_problems("data", data))
        if data.encodes_by_rows:
            yield "replay.data holds a table, whose numbers and categories are encoded by its own rows. Use arrays."
        problem = check_target(f"replay.data[{place}]._target_", data._target_, config.trust)
        if problem is not None:
            yield problem


def _of_run(origin: str | None, task: TaskConfig) -> list[DataConfig]:
    """Return the data of the run that has the checkpoint, the oldest first."""
    place = Path(str(origin))
    run = place.parent.parent
    where = f"replay: init_from={place}"
    if place.parent.name != "checkpoints":
        raise ConfigError(
            f"{where} is not a checkpoint in a run's folder, so its training data are unknown. Name the run: "
            f"init_from=RUN. {_BY_HAND}."
        )
    try:
        spec = read_spec(SweepPaths(run.parent), _SET_ASIDE.sub("", run.name))
    except (RunStateError, HpcTrainerError, OSError) as error:
        raise ConfigError(f"{where}: the data of that run are not known any more: {error} {_BY_HAND}.") from error
    if spec.is_own_loop:
        raise ConfigError(
            f"{where}: {spec.run_id} has a loop of its own, and only that loop knows its data. {_BY_HAND}."
        )
    _check_task(spec, task, where)
    try:
        data: DataConfig = section_from_plain(variant_of("data", dict(spec.config["data"])), spec.config["data"])
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: its data are of another version of hpc_trainer: {error}. {_BY_HAND}.") from error
    if data.encodes_by_rows:
        raise ConfigError(
            f"{where} was trained on data=table, whose numbers and categories are encoded by its own rows: new rows "
            "would be encoded differently. Write both tables as arrays with the same encoding (data=arrays)."
        )
    earlier = spec.config.get("replay", {}).get("data", [])
    return [*(typed_data(values) for values in earlier), data]


def _check_task(spec: RunSpec, task: TaskConfig, where: str) -> None:
    was = str(spec.config.get("task", {}).get("name", TaskConfig().name))
    if was != task.name:
        raise ConfigError(
            f"{where}: {spec.run_id} has task={was}, and this is task={task.name}: their targets differ. Use "
            f"task={was}, or replay.share=null."
        )


def _shortened(data: DataConfig) -> dict[str, Any]:
    """Return the name of the data's kind, and the keys that differ from the defaults of this kind."""
    usual, here = plain_value(type(data)()), plain_value(data)
    return {
        key: value for key, value in here.items() if key == "name" or (key not in _NOT_KEPT and value != usual[key])
    }


def _differences(old: DataConfig, new: DataConfig) -> Iterator[str]:
    """Yield each reason, known at plan time, why a model of one data set cannot take the other."""
    was, now = old.model_facts(), new.model_facts()
    for key, before in was.items():
        if key in now and now[key] != before:
            yield _difference(key, before, now[key])


def _difference(key: str, before: Any, now: Any) -> str:
    if key == "classes":
        return (
            f"its classes are {_listed(before)}, and those of the new data {_listed(now)}: classes are numbered in "
            "order, so both must have the same classes. Make a folder for each class in both, and give equal classes "
            "equal names."
        )
    keys = {"shape": "inputs of the shape", "num_classes": "num_classes", "tokenizer": "the tokenizer"}
    return (
        f"it has {keys.get(key, key)} {_shown(before)}, and the new data {_shown(now)}. One model needs the same for "
        "both: change the new data (data.*), or prepare them anew."
    )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:8])}{', ..' if len(names) > 8 else ''} ({len(names)})"


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
