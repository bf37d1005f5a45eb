"""What hangs on each key stays as it was: ids of runs, the resume contract, keys of the compile cache.

HPC_TRAINER_UPDATE_GOLDEN=1 writes the golden file anew: a line that changes there changes ids of finished runs, or what
their checkpoints go on with.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.identity import build_run_id, config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.resume_contract import effect_of
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.compile.compile import cache_key
from tests.composed import composed

GOLDEN = Path(__file__).parents[3] / "golden" / "keys.json"
CONF = Path(__file__).parents[4] / "conf"
_FACTS: dict[str, Any] = {"code": {"hpc_trainer": "1f"}, "versions": {"torch": "2.8"}, "device": {}, "world_size": 1}
# Groups whose choices need others beside them to be legal; ids do not ask for legality.
_GROUPS = ("model", "data", "optim", "parallel")


def _points() -> Iterator[tuple[str, ...]]:
    experiments = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
    yield ()
    for name in experiments:
        yield (f"experiment={name}",)
        yield (f"experiment={name}", "hardware=gpu_x16", "cluster=slurm")
        yield (f"experiment={name}", "train.logical_ranks=4", "train.ema_decay=0.9", "train.guard.on_spike=skip")
        yield (f"experiment={name}", "parallel.elastic=true", "train.early_stop.patience=3")
    for group in _GROUPS:
        for path in sorted((CONF / group).glob("*.yaml")):
            target = (f"{group}._target_=torch.x",) if path.stem == "custom" else ()
            yield (f"{group}={path.stem}", *target)


def _ids() -> dict[str, list[str]]:
    found = {}
    for words in _points():
        config = composed(words)
        raw = config_digest(to_plain(config))
        cache = cache_key(config, _FACTS)
        try:
            validate(config)
            run_id = build_run_id(config, config_digest(to_plain(config)))
        except ConfigError:
            run_id = "(refused)"
        found[" ".join(words)] = [run_id, raw, cache]
    return found


def _plains() -> Iterator[tuple[str, dict[str, Any]]]:
    plain = to_plain(TrainConfig())
    yield "", plain
    for group, variants in VARIANTS.items():
        for name, kind in variants.items():
            config = TrainConfig(**{group: kind()})
            yield f"{group}={name} ", {**plain, group: to_plain(config)[group]}


def _leaves(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name)


def _kinds() -> dict[str, str]:
    """Of each key: does another value make another run, does its default count, and what does a resume say."""
    found = {}
    for label, plain in _plains():
        for path in _leaves(plain):
            if label and path[0] != label.partition("=")[0]:
                continue
            changed, without = copy.deepcopy(plain), copy.deepcopy(plain)
            inner, outer = changed, without
            for name in path[:-1]:
                inner, outer = inner[name], outer[name]
            inner[path[-1]] = "another"
            del outer[path[-1]]
            ids = [config_digest(each) for each in (plain, changed)]
            is_absent = config_digest(without) == ids[0]
            counts = "apart" if ids[0] == ids[1] else "once-set" if is_absent else "counts"
            key = ".".join(path)
            found[f"{label}{key}"] = f"{counts} {effect_of(key).value}"
    return found


def _unknown() -> dict[str, str]:
    """Keys that a checkpoint of another version may have."""
    names = [each.name for each in dataclasses.fields(TrainConfig)]
    names += ["train.guard", "train.early_stop", "optim.kwargs", "model.kwargs", "data.kwargs", "nobody"]
    return {f"{name}.gone": effect_of(f"{name}.gone").value for name in names} | {
        name: effect_of(name).value
        for name in ("versions.torch", "versions.python", "versions.numpy", "code.x", "world_size", "device.name",
                     "fit", "dataset.digest", "eval_dataset.digest")
    }  # fmt: skip


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    found = {"ids": _ids(), "kinds": _kinds(), "unknown": _unknown(), "defaults": to_plain(TrainConfig())}
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return found


@pytest.mark.parametrize("part", ["ids", "kinds", "unknown", "defaults"])
def test_nothing_that_hangs_on_keys_has_changed(part: str, now: dict[str, Any]) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[part]
    changed = {key: (golden.get(key), value) for key, value in now[part].items() if golden.get(key) != value}
    assert changed == {}, f"(before, now). Of new keys and choices HPC_TRAINER_UPDATE_GOLDEN=1 takes it: {changed}"
    assert golden.keys() - now[part].keys() == set()
