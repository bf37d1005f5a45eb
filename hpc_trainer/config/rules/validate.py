"""Rules between fields that types cannot express.

Each problem names the key, the rule, the value and a legal choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hpc_trainer.config import script_words as words
from hpc_trainer.config.batch import with_batch
from hpc_trainer.config.checks import within
from hpc_trainer.config.load import BUT_SEED, but_seed
from hpc_trainer.config.memo import Memo
from hpc_trainer.config.rules.checkpoint_rules import resume_from_problems, retention_problems, with_absolute_origin
from hpc_trainer.config.rules.cluster_rules import monitor_problems, sbatch_problems
from hpc_trainer.config.rules.code_rules import command_problems, param_problems, target_problems, with_command
from hpc_trainer.config.rules.data_rules import data_problems, metric_problems, task_problems, with_absolute_paths
from hpc_trainer.config.rules.declared_rules import effect_problems, item_problems, limit_problems
from hpc_trainer.config.rules.optim_rules import optim_problems, with_schedule
from hpc_trainer.config.rules.step_rules import batch_problems, mesh_problems, step_problems
from hpc_trainer.config.schema.data import DataConfig, DigitsConfig
from hpc_trainer.config.schema.hardware import HardwareConfig
from hpc_trainer.config.schema.model.shipped import GptConfig, ModelConfig
from hpc_trainer.config.schema.model.vision import VitConfig
from hpc_trainer.config.schema.snapshot import SnapshotConfig
from hpc_trainer.config.schema.tracker import TrackerConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.declarations import feature_problems, fill_in
from hpc_trainer.config.user_files import home_problems
from hpc_trainer.errors import ConfigError

_DIGIT_PIXELS = 8  # a side of data=digits
_MEMORY_KEYS = ("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu")
MAX_SEED = 2**32 - 1
# sbatch's --signal keeps the lead in 16 bits.
_LONGEST_LEAD_S = 2**16 - 1


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
    wrong = list(item_problems(config, memo))
    if wrong:  # the rules below rely on types
        yield from wrong
        return
    yield from limit_problems(config, memo)
    yield from _general(config)
    yield from memo.of(_hardware_problems, config.hardware)
    yield from _cluster(config)
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
            "tracker.uri must hold no user and password: it stands in files that others may read. Set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where you run hpc-trainer sync."
        )
    for key in ("project", "entity", "uri"):
        if words.has_control(getattr(tracker, key) or ""):
            yield f"tracker.{key}={getattr(tracker, key)!r} must hold no control characters."


def _general(config: TrainConfig) -> Iterator[str]:
    yield from retention_problems(config.checkpoint)
    yield from monitor_problems(config.monitor, config.cluster.executor)
    if words.has_control(config.paths.runs_dir or ""):
        yield f"paths.runs_dir={config.paths.runs_dir!r} must hold no control characters."
    yield from home_problems("paths.runs_dir", config.paths.runs_dir)
    yield from _tracker(config.tracker)
    for key, text in (("hardware.name", config.hardware.name), ("cluster.name", config.cluster.name)):
        if words.has_control(text):  # the name is printed
            yield f"{key}={text!r} must be one line without control characters. Use {words.plain(text) or 'mine'}."
    for key in ("sweep_name", "experiment_name"):
        name = getattr(config, key)
        if name is not None and not words.NAME.fits(name):
            nearest = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100] or "my-sweep"
            yield f"{key}={name!r} names a folder: letters, digits and ._- only, at most 100. Use {nearest}."


def _hardware_problems(hardware: HardwareConfig) -> tuple[str, ...]:
    return tuple(_hardware(hardware))


def _hardware(hardware: HardwareConfig) -> Iterator[str]:
    memory = {f"hardware.{key}": getattr(hardware, key) for key in _MEMORY_KEYS}
    chosen = {key: value for key, value in memory.items() if value is not None}
    for key, value in chosen.items():
        if 0 < value < 1 / 1024:  # rounded to 0 MB it would be sbatch's --mem=0: all memory of the node
            yield f"{key}={value:g} is less than 1 MB, and Slurm counts in MB. Use {key}=1."
    if len(chosen) > 1:
        listed = ", ".join(f"{key}={value:g}" for key, value in chosen.items())
        first, *others = chosen
        unset = " ".join(f"{key}=null" for key in others)
        yield f"{listed}: Slurm takes one memory flag. Keep one of them, for example {first}: add {unset}."
    if not hardware.gpus_per_node:
        for key in ("cpus_per_gpu", "mem_gb_per_gpu"):
            if getattr(hardware, key) is not None:
                other = key.replace("_per_gpu", "_per_task" if key.startswith("cpus") else "_per_node")
                yield f"hardware.{key}={getattr(hardware, key):g} needs gpus_per_node ≥ 1. Use hardware.{other}."
    elif hardware.tasks_per_node not in (None, hardware.gpus_per_node):
        yield (
            f"hardware.tasks_per_node={hardware.tasks_per_node} must equal gpus_per_node={hardware.gpus_per_node}: "
            f"one rank a GPU. Use {hardware.gpus_per_node} or null."
        )
    if hardware.cpus_per_gpu is not None and hardware.cpus_per_task is not None:
        yield "hardware.cpus_per_gpu and hardware.cpus_per_task both name the cores of a rank. Keep one of them."
    yield from words.word_problem("hardware.partition", hardware.partition, words.PARTITION)
    yield from words.word_problem("hardware.qos", hardware.qos, words.QOS)
    yield from words.word_problem("hardware.constraint", hardware.constraint, words.CONSTRAINT)
    yield from words.word_problem("hardware.exclude", hardware.exclude, words.HOSTS)
    yield from words.word_problem("hardware.gpu_type", hardware.gpu_type, words.GPU_TYPE)


def _cluster(config: TrainConfig) -> Iterator[str]:
    cluster, hardware = config.cluster, config.hardware
    yield from words.word_problem("cluster.account", cluster.account, words.ACCOUNT)
    yield from words.word_problem("cluster.top_up_partition", cluster.top_up_partition, words.PARTITION)
    yield from words.word_problem("cluster.master_addr", cluster.master_addr, words.ADDRESS)
    if cluster.signal_lead_s is not None:
        longest = min(hardware.time_limit_min * 60 - 1, _LONGEST_LEAD_S)
        yield from within("cluster.signal_lead_s", cluster.signal_lead_s, f"[1, {longest}]")
    for name, value in cluster.env.items():
        if not words.ENV_NAME.fits(name) or words.has_control(value):
            yield f"cluster.env.{name}={value!r}: a variable is a name (letters, digits, _) and one line of text."
    for line in cluster.setup:
        yield from words.setup_problem(line)
    yield from sbatch_problems(cluster.sbatch)
    for argument in cluster.srun_args:
        yield from words.srun_problem(argument)
    if cluster.python is not None:
        yield from words.python_problem(cluster.python)


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
    """Yield the problem with the patches, if the configuration gives the size of images."""
    side = _DIGIT_PIXELS if isinstance(data, DigitsConfig) else getattr(data, "image_size", None)
    if isinstance(model, VitConfig) and isinstance(side, int) and side >= 1 and model.patch_size >= 1:
        problem = model.patch_problem(side, side)
        if problem is not None:
            yield problem


def _snapshot(snapshot: SnapshotConfig) -> Iterator[str]:
    for name in snapshot.packages:
        if not name.isidentifier():
            yield f"snapshot.packages holds {name!r}: a top-level package, as my_lab."
    for key in ("include", "exclude"):
        for pattern in getattr(snapshot, key):
            if not pattern.strip("/") or pattern.startswith("/") or ".." in pattern.split("/"):
                yield f"snapshot.{key} holds {pattern!r}: a name (*.so), or a path from the top (data/raw)."
