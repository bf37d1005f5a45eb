"""Rules between fields that types cannot express.

Each problem names the key, the rule, the value and a legal choice.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_trainer.config import script_words
from hpc_trainer.config.load import BUT_SEED, Memo, but_seed
from hpc_trainer.config.mesh import with_batch
from hpc_trainer.config.program import command_problems, with_command
from hpc_trainer.config.rules.cluster_rules import (
    cluster_problems,
    hardware_problems,
    monitor_problems,
    notify_problems,
    pool_problems,
)
from hpc_trainer.config.rules.data_rules import data_problems, metric_problems, task_problems, with_absolute_paths
from hpc_trainer.config.rules.declared_rules import effect_problems, value_problems, within
from hpc_trainer.config.rules.step_rules import (
    batch_problems,
    mesh_problems,
    optim_problems,
    step_problems,
    with_schedule,
)
from hpc_trainer.config.schema.cluster import SnapshotConfig
from hpc_trainer.config.schema.data import DataConfig, DigitsConfig
from hpc_trainer.config.schema.model import GptConfig, ModelConfig, VitConfig
from hpc_trainer.config.schema.output import BestMode, CheckpointConfig, TrackerConfig, small_is_better
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import feature_problems, fill_in
from hpc_trainer.config.targets import param_problems, target_problems
from hpc_trainer.config.user_files import home_problems, is_file, is_folder
from hpc_trainer.errors import ConfigError

_DIGIT_PIXELS = 8  # a side of data=digits
MAX_SEED = 2**32 - 1


def validate(config: TrainConfig, memo: Memo | None = None) -> None:
    """Check every rule; then fill in open values, such as batch sizes and warm-up, and make paths absolute.

    Sections that change are replaced by copies: points of a grid share theirs. With a `memo`, points that shared a
    section share the copy too.

    Raises:
        ConfigError: all problems found, a line each.
    """
    memo = memo or Memo()
    problems = list(find_problems(config, memo))
    if problems:
        raise ConfigError("\n".join(problems))
    if config.train.command is not None:
        config.train = memo.of(with_command, config.train)
        return
    config.train = memo.of(with_batch, config.train, config.hardware, config.parallel)
    config.schedule = memo.of(with_schedule, config.schedule)
    config.data = memo.of(with_absolute_paths, config.data)
    config.checkpoint = memo.of(with_absolute_origin, config.checkpoint)
    fill_in(config, memo)


def find_problems(config: TrainConfig, memo: Memo | None = None) -> Iterator[str]:
    """Yield each problem with `config`. Change nothing, and touch no file but the data's.

    With a `memo`, points that differ only in their seed are checked once.
    """
    memo = memo or Memo()
    yield from within("seed", config.seed, f"0 to {MAX_SEED}")
    yield from memo.of(_without_seed, memo, *but_seed(config))


def _without_seed(memo: Memo, *parts: Any) -> tuple[str, ...]:
    # With None, a rule that read the seed would fail at once, instead of using one point's result for another.
    config: Any = {"seed": None, **dict(zip(BUT_SEED, parts, strict=True))}
    return tuple(_find_problems(TrainConfig(**config), memo))


def _find_problems(config: TrainConfig, memo: Memo) -> Iterator[str]:
    wrong_items, beyond_limits = value_problems(config, memo)
    if wrong_items:  # the rules below rely on types
        yield from wrong_items
        return
    yield from beyond_limits
    yield from _general(config)
    yield from memo.of(hardware_problems, config.hardware)
    yield from cluster_problems(config)
    yield from memo.of(pool_problems, config.hardware, config.pool)
    yield from _snapshot(config.snapshot)
    yield from memo.of(param_problems, config.params)
    if config.train.command is not None:  # the rules below do not apply to a program
        yield from command_problems(config)
        return
    yield from mesh_problems(config)
    yield from batch_problems(config)
    yield from optim_problems(config)
    yield from step_problems(config)
    yield from feature_problems(config)
    yield from metric_problems(config)
    yield from task_problems(config)
    yield from _heads(config.model)
    yield from _patches(config.model, config.data)
    yield from memo.of(data_problems, config.data, config.task)
    yield from target_problems(config)
    yield from resume_from_problems(config.checkpoint)
    yield from effect_problems(config)


def _tracker(tracker: TrackerConfig) -> Iterator[str]:
    if "@" in (tracker.uri or "").partition("://")[2].partition("/")[0]:
        yield (
            "tracker.uri must hold no user and password: it is stored in files that others may read. Set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where you run hpc-trainer sync."
        )
    for key in ("project", "entity", "uri"):
        if script_words.has_control(getattr(tracker, key) or ""):
            yield f"tracker.{key}={getattr(tracker, key)!r} must hold no control characters."


def _general(config: TrainConfig) -> Iterator[str]:
    yield from retention_problems(config.checkpoint)
    yield from monitor_problems(config.monitor, config.cluster.executor)
    yield from notify_problems(config.notify, config.cluster.executor)
    if script_words.has_control(config.paths.runs_dir or ""):
        yield f"paths.runs_dir={config.paths.runs_dir!r} must hold no control characters."
    yield from home_problems("paths.runs_dir", config.paths.runs_dir)
    yield from _tracker(config.tracker)
    for key, text in (("hardware.name", config.hardware.name), ("cluster.name", config.cluster.name)):
        if script_words.has_control(text):  # the name is printed
            usable = script_words.plain(text) or "mine"
            yield f"{key}={text!r} must be one line without control characters. Use {usable}."
    for key in ("sweep_name", "experiment_name"):
        name = getattr(config, key)
        if name is not None and not script_words.NAME.fits(name):
            nearest = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100] or "my-sweep"
            yield f"{key}={name!r} names a folder: letters, digits and ._- only, at most 100. Use {nearest}."


def _heads(model: ModelConfig) -> Iterator[str]:
    if not isinstance(model, (GptConfig, VitConfig)) or model.num_heads < 1:
        return
    if model.embed_dim % model.num_heads:
        nearest = max(1, round(model.embed_dim / model.num_heads)) * model.num_heads
        yield (
            f"model.embed_dim={model.embed_dim} must be a multiple of model.num_heads={model.num_heads}. Use {nearest}."
        )
    elif isinstance(model, GptConfig) and (model.num_kv_heads is None or model.num_kv_heads >= 1):
        problem = model.heads_problem()
        if problem is not None:
            yield problem


def _patches(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    """Yield the problem with `model.patch_size`, if the configuration gives the size of images."""
    side = _DIGIT_PIXELS if isinstance(data, DigitsConfig) else getattr(data, "image_size", None)
    if isinstance(model, VitConfig) and isinstance(side, int) and side >= 1 and model.patch_size >= 1:
        problem = model.patch_problem(side, side)
        if problem is not None:
            yield problem


def _snapshot(snapshot: SnapshotConfig) -> Iterator[str]:
    for name in snapshot.packages:
        if not name.isidentifier():
            yield f"snapshot.packages holds {name!r}: each entry is a top-level package, such as my_lab."
    for key in ("include", "exclude"):
        for pattern in getattr(snapshot, key):
            if not pattern.strip("/") or pattern.startswith("/") or ".." in pattern.split("/"):
                yield f"snapshot.{key} holds {pattern!r}: each entry is a name (*.so) or a path from the top (a/b)."


def resume_from_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield each problem with `resume_from`, and with the names in `allow_changes`."""
    for name in checkpoint.allow_changes:
        if not name.strip() or "=" in name or " " in name:
            yield f"checkpoint.allow_changes holds {name!r}: it takes only keys, as checkpoint.allow_changes=[seed]."
    if checkpoint.resume_from is None:
        return
    unknown = list(home_problems("checkpoint.resume_from", checkpoint.resume_from))
    if unknown:
        yield from unknown
        return
    path = Path(checkpoint.resume_from).expanduser()
    if not is_folder(path / "checkpoints") and not is_file(path / "manifest.json"):
        yield (
            f"checkpoint.resume_from={checkpoint.resume_from} must be the folder of a run (it holds checkpoints/) or "
            "of one checkpoint (it holds manifest.json). `hpc-trainer status --json` has the run ids; a run's folder "
            "is RUNS_DIR/SWEEP/RUN_ID."
        )


def with_absolute_origin(checkpoint: CheckpointConfig) -> CheckpointConfig:
    """Return the section with an absolute `resume_from`: the worker's working folder may be another one."""
    if checkpoint.resume_from is None:
        return checkpoint
    return dataclasses.replace(checkpoint, resume_from=str(Path(checkpoint.resume_from).expanduser().absolute()))


_LARGE_IS_GOOD = re.compile(r"acc|score|f1|auc|map|iou|bleu|precision|recall|reward|psnr|ssim|r2|mfu")


def retention_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield the problem with `checkpoint.keep_best`, if the name does not show which values are better."""
    name = checkpoint.keep_best
    if name is None or checkpoint.best_mode is not BestMode.auto:
        return
    if small_is_better(name) == bool(_LARGE_IS_GOOD.search(name.lower())):
        yield (
            f"checkpoint.keep_best={name}: the name does not show whether small or large values are better. Set "
            "checkpoint.best_mode=min or checkpoint.best_mode=max."
        )
