"""Identity: what makes two points the same run. A short readable label and a hash of what changes the result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hpc_trainer.config.memo import Memo
from hpc_trainer.config.schema.train import TrainConfig

# Where, when and how loudly a run runs does not change what it computes.
_OTHER_SECTIONS = frozenset((
    "experiment_name", "sweep_name", "cluster", "checkpoint", "monitor", "tracker", "local", "paths", "snapshot",
    "sweep", "budget", "trust",
))  # fmt: skip
_OTHER_KEYS = {
    "hardware": (
        "name", "partition", "qos", "constraint", "exclude", "time_limit_min", "source", "checked",
        "gpu_request",
        "mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu",
    ),
    "data": ("num_workers", "keep_in_memory"),
    "parallel": ("timeout_s",),
}  # fmt: skip
# Keys that came later count from the moment they are set: runs of before keep their ids.
_NOT_SET: dict[str, Any] = {
    "params": {},
    "train": {
        "main": None, "compile": False, "compile_scope": "model", "compile_mode": "default",
        "logical_ranks": None, "ema_decay": None,
        "early_stop": {"metric": "eval_loss", "mode": "min", "patience": None},
        "label_smoothing": 0.0, "max_skipped_steps": 10, "recompute": "none", "channels_last": False,
        "recompute_budget": 0.5, "memory_margin": 0.1,
        "loss_chunk_size": None,
        "guard": {
            "on_spike": "none", "spike_factor": 10.0, "spike_window": 100, "on_divergence": "stop", "max_rollbacks": 3,
        },
        "batch_per_rank": False,
    },
    "schedule": {"decay_steps": None, "every_steps": None, "gamma": 0.1, "cycle_momentum": None},
    "parallel": {
        "zero1": False, "elastic": False,
        "tensor_parallel": 1, "pipeline_parallel": 1, "pipeline_schedule": "1f1b",
        "data_parallel_replicate": 1, "bucket_cap_mb": None,
        "param_dtype": "fp32", "reduce_dtype": "fp32", "reshard_after_forward": True,
        "comm_hook": "none", "powersgd_rank": 1,
        "powersgd_start_step": 1000, "powersgd_error_feedback": True, "sync": "every_step", "sync_every_steps": 16,
        "sync_warmup_steps": 0, "outer_lr": 0.7, "outer_momentum": 0.9,
    },
    "model": {"vocab_multiple": 1},
    "data": {"max_shift": 0},
    "optim": {"lr_scaling": "none", "lr_base_batch": None, "in_backward": False, "offload": False},
}  # fmt: skip
# What is left of a section of a run that may go on with another number of ranks. Another type of GPU rounds otherwise.
_OF_ANY_WORLD = ("device", "gpu_type")
# The digest is taken of this text: keys sorted, no spaces. Changing it gives every run another name.
_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def config_digest(plain: Mapping[str, Any], memo: Memo | None = None) -> str:
    """SHA-256 (64 hex digits) over the part of a resolved configuration that decides the result.

    Independent of key order. With a `memo`, a section that several configurations share is written once. Of a run that
    may go on with another number of ranks (`parallel.elastic`, `train.logical_ranks`) that number decides nothing.
    """
    of = (memo or Memo()).of
    write: dict[str, Callable[[str, Mapping[str, Any]], str]] = dict.fromkeys(plain, _section_text)
    if plain["train"].get("logical_ranks") or plain["parallel"].get("elastic"):
        write["hardware"] = _any_hardware_text
        if not plain["train"].get("logical_ranks"):
            write["train"] = _any_train_text
    parts = [
        f'"{name}":{of(write[name], name, value) if isinstance(value, dict) else _text(value)}'
        for name, value in sorted(plain.items())
        if name not in _OTHER_SECTIONS and value != _NOT_SET.get(name, ...)
    ]
    origin = plain.get("checkpoint", {}).get("resume_from")
    if origin is not None:  # of a section that does not count, the one key that does
        parts.append(f'"resume_from":{_text(origin)}')
    return hashlib.sha256(f"{{{','.join(parts)}}}".encode()).hexdigest()


def _section_text(name: str, section: Mapping[str, Any]) -> str:
    left_out, not_set = _OTHER_KEYS.get(name, ()), _NOT_SET.get(name, {})
    return _text(
        {key: value for key, value in section.items() if key not in left_out and value != not_set.get(key, ...)}
    )


def _any_hardware_text(name: str, hardware: Mapping[str, Any]) -> str:
    device = hardware["device"]
    if device == "auto":
        device = "cuda" if hardware["gpus_per_node"] else "cpu"
    return _section_text(
        name, {key: value for key, value in hardware.items() if key in _OF_ANY_WORLD} | {"device": device}
    )


def _any_train_text(name: str, train: Mapping[str, Any]) -> str:
    # These two are filled in from the number of ranks.
    return _section_text(name, {**train, "micro_batch_size": None, "grad_accum_steps": None})


def build_run_id(config: TrainConfig, digest: str) -> str:
    """`<model>-<data>-lr<lr>-s<seed>-<10 hex digits>`; `<train.main>-s<seed>-<10 hex digits>` of a person's own loop.

    The label depends on the configuration alone, never on the other points of the grid: a grid that grows by an
    axis or a value keeps the runs it has. Ten digits: two of 10,000 points
    of one label share an id with probability 5e-5.
    """
    label = f"{config.model.name}-{config.data.name}-lr{config.optim.lr:g}-s{config.seed}"
    if config.train.main is not None:
        label = f"{config.train.main.removesuffix('.main')}-s{config.seed}"
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', label)[:80]}-{digest[:10]}"
