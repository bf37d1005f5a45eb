"""Identity of a run: a short readable label and a hash of everything that changes the result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hpc_trainer.config.load import Memo, plain_value
from hpc_trainer.config.program import is_of_shell, program_name
from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.key import Identity, is_secret_value
from hpc_trainer.config.schema.model import ModelConfig
from hpc_trainer.config.schema.task import TaskConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import ALL_KEYS

# Section ("" for the root) -> its fields that never count; and first defaults of its fields that count once set.
_LEFT_OUT: dict[str, set[str]] = {}
_DEFAULTS: dict[str, dict[str, Any]] = {}
for _declared in ALL_KEYS:
    _section, _, _name = _declared.name.rpartition(".")
    if _declared.key.identity is Identity.apart:
        _LEFT_OUT.setdefault(_section, set()).add(_name)
    if _declared.key.identity is Identity.once_set:
        _DEFAULTS.setdefault(_section, {})[_name] = _declared.default
_NOT_SET: dict[str, dict[str, Any]] = plain_value(_DEFAULTS)
_CUSTOM = "custom"
_EXPONENT = re.compile(r"e[+]?(-?)0*(?=\d)")
_LARGE = 1e5
_TYPED_DIGITS = 10
# Keys of `hardware` that count for a run that may resume with another number of ranks. Another type of GPU rounds
# differently.
_OF_ANY_WORLD = ("device", "gpu_type", "gpu_types")
# The digest is computed from this text: keys sorted, no spaces. A change gives every run another name.
_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_NOTHING = _text({})


def config_digest(plain: Mapping[str, Any], memo: Memo | None = None) -> str:
    """Return the SHA-256 (64 hex digits) of the part of a resolved configuration that decides the result.

    The digest does not depend on key order. With a `memo`, a section that several configurations share is serialized
    once. If a run may resume with another number of ranks (`parallel.elastic`, `train.logical_ranks`), that number does
    not count.
    """
    return hashlib.sha256(f"{{{','.join(_parts(plain, memo or Memo()).values())}}}".encode()).hexdigest()


class SeedDigests:
    """`config_digest` of configurations that differ only in their seed; everything else is serialized once."""

    def __init__(self, plain: Mapping[str, Any], memo: Memo) -> None:
        parts = _parts(plain, memo)
        place = list(parts).index("seed")
        before, after = list(parts.values())[:place], list(parts.values())[place + 1 :]
        self._before = hashlib.sha256("".join(["{", *(f"{part}," for part in before)]).encode())
        self._after = "".join([*(f",{part}" for part in after), "}"])

    def of(self, seed: int) -> str:
        """Return the digest of the configuration with this seed."""
        digest = self._before.copy()
        digest.update(f'"seed":{seed}{self._after}'.encode())
        return digest.hexdigest()


def _parts(plain: Mapping[str, Any], memo: Memo) -> dict[str, str]:
    """Return for each key of the root the text of the key and its value, as it is hashed."""
    write: dict[str, Callable[[str, Mapping[str, Any]], str]] = dict.fromkeys(plain, _section_text)
    if plain["train"].get("logical_ranks") or plain["parallel"].get("elastic"):
        write["hardware"] = _any_hardware_text
        if not plain["train"].get("logical_ranks"):
            write["train"] = _any_train_text
    texts = {
        name: memo.of(write[name], name, value) if isinstance(value, dict) else _text(value)
        for name, value in sorted(plain.items())
        if name not in _LEFT_OUT[""] and value != _NOT_SET[""].get(name, ...)
    }
    # A section that a later version added is left out if no value that counts is set in it.
    parts = {name: f'"{name}":{text}' for name, text in texts.items() if text != _NOTHING or name not in _NOT_SET[""]}
    origin = plain.get("checkpoint", {}).get("resume_from")
    if origin is not None:  # the only key of its section that counts
        parts["resume_from"] = f'"resume_from":{_text(origin)}'
    return parts


def _section_text(name: str, section: Mapping[str, Any]) -> str:
    left_out, not_set = _LEFT_OUT.get(name, ()), _NOT_SET.get(name, {})
    return _text(
        {key: value for key, value in section.items() if key not in left_out and value != not_set.get(key, ...)}
    )


def _any_hardware_text(name: str, hardware: Mapping[str, Any]) -> str:
    device = hardware["device"]
    if device == "auto":
        device = "cuda" if hardware["gpus_per_node"] else "cpu"
    counted = {key: value for key, value in hardware.items() if key in _OF_ANY_WORLD} | {"device": device}
    if counted.get("gpu_types"):  # the run may start on any of them
        counted["gpu_type"] = None
    return _section_text(name, counted)


def _any_train_text(name: str, train: Mapping[str, Any]) -> str:
    # Both follow from the number of ranks.
    return _section_text(name, {**train, "micro_batch_size": None, "grad_accum_steps": None})


def build_run_id(config: TrainConfig, digest: str) -> str:
    """Build the id of a run: `<label>-s<seed>-<10 hex digits>`.

    The label is `<model>-<data>-lr<lr>`, with `-<task>` after the data if the task is not classification;
    `<train.main>` for a user's own loop; `<program>-<params>` for a program.

    The label depends on the configuration alone, never on the other points of the grid: a grid that grows by an axis or
    a value keeps its runs. With ten digits, two of 10,000 points with the same label share an id with probability 5e-5.
    """
    return run_id_of(run_label(config), config.seed, digest)


def run_label(config: TrainConfig) -> str:
    """Return the part of a run's id before its seed."""
    task = "" if config.task == TaskConfig() else f"-{_named(config.task)}"
    label = f"{_named(config.model)}-{_named(config.data)}{task}-lr{_number(config.optim.lr)}"
    if config.train.main is not None:
        label = config.train.main.removesuffix(".main")
    if config.train.command is not None:
        given = [
            name if is_secret_value(name, value) else f"{name}{_value(value)}"
            for name, value in config.params.items()
            if isinstance(value, (int, float, str))
        ]
        label = "-".join([program_name(config.train.command), *given])
    return re.sub(r"[^A-Za-z0-9._-]", "_", label)


def _number(value: float) -> str:
    """Return a number as a user types it: 1e-5 and 1e9, not 1e-05 and 1e+09."""
    return _EXPONENT.sub(lambda match: f"e{match[1]}", f"{value:g}")


def _value(value: float | str) -> str:
    """Return a value of `params` as text. A number with more digits than a user types, as a draw has, has six."""
    if not isinstance(value, float):
        return str(value)
    is_drawn = float(f"{value:.{_TYPED_DIGITS}g}") != value
    is_long = "e" in str(value) or abs(value) >= _LARGE
    return _number(value) if is_drawn or (is_long and float(f"{value:g}") == value) else str(value)


def _has_secrets(params: Mapping[str, Any]) -> bool:
    return any(
        _has_secrets(value) if isinstance(value, Mapping) else is_secret_value(name, value)
        for name, value in params.items()
    )


def had_another_name(plain: Mapping[str, Any]) -> bool:
    """Return True if another version named the run of this configuration differently, or may have.

    The digest shows whether a name belongs to the same run.
    """
    if any(plain[group]["name"] == _CUSTOM for group in ("model", "data")):
        return True
    if plain["train"].get("command") is not None:
        params = plain["params"]
        return (
            is_of_shell(plain["train"]["command"])
            or _has_secrets(params)
            or any(_value(value) != str(value) for value in params.values() if isinstance(value, float))
        )
    return "e" in f"{plain['optim']['lr']:g}"


def _named(section: ModelConfig | DataConfig | TaskConfig) -> str:
    """Return a section's name as a user says it: a custom class by its name, a function `build` by its module's."""
    if section.name != _CUSTOM:
        return section.name
    *path, name = section._target_.split(".")
    return path[-1] if name == "build" and path else name


def run_id_of(label: str, seed: int, digest: str) -> str:
    """Return a run's id from its label, seed and digest, as `build_run_id` does.

    Label and seed are cut to 80 characters.
    """
    return f"{f'{label}-s{seed}'[:80]}-{digest[:10]}"
