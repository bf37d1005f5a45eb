"""Identity: what makes two points the same run. A short readable label and a hash of what changes the result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hpc_trainer.config.keys import all_keys
from hpc_trainer.config.load import plain_value
from hpc_trainer.config.memo import Memo
from hpc_trainer.config.program import is_of_shell, program_name
from hpc_trainer.config.schema.data.shipped import DataConfig
from hpc_trainer.config.schema.key import Identity
from hpc_trainer.config.schema.model.shipped import ModelConfig
from hpc_trainer.config.schema.task import TaskConfig
from hpc_trainer.config.schema.train import TrainConfig

# Section, or "" for the root -> its fields that do not count, and first defaults of those that count once they are set.
_LEFT_OUT: dict[str, set[str]] = {}
_NOT_SET: dict[str, dict[str, Any]] = {}
for _each in all_keys():
    _section, _, _name = _each.name.rpartition(".")
    if _each.key.identity is Identity.apart:
        _LEFT_OUT.setdefault(_section, set()).add(_name)
    if _each.key.identity is Identity.once_set:
        _NOT_SET.setdefault(_section, {})[_name] = plain_value(_each.default)
_CUSTOM = "custom"
_EXPONENT = re.compile(r"e[+]?(-?)0*(?=\d)")
_LARGE = 1e5
_OF_KEYS = (
    "api", "access", "private", "secret", "wandb", "hf", "openai", "anthropic", "ssh", "signing", "encryption", "aws",
    "azure", "comet", "service", "account", "client",
)  # fmt: skip
SECRET_NAME_ENDS = (
    "token", "secret", "passwd", "password", "passphrase", "pwd", "credential", "credentials", "auth",
    *(f"{each}{sign}key" for each in _OF_KEYS for sign in ("", "_")),
)  # fmt: skip
"""Ends of names that hold a secret, so that `num_tokens`, `tokenizer`, `token_dim` and `image_key` are none. Upper and
lower case are alike, and `_` stands for a point and a hyphen too."""
_SECRET_NAME = re.compile(rf"(?:.*[^A-Za-z])?(?:{'|'.join(SECRET_NAME_ENDS).replace('_', '[_.-]')})", re.IGNORECASE)
# Of this form a value is a secret under any name, as tokens of Hugging Face, GitHub, GitLab, OpenAI and AWS.
_SECRET_VALUE = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|AKIA|ASIA)[\w-]{16,}")
# A number, a truth value and a path are none, as in `redaction`: `max_token=16`.
_NO_SECRET = re.compile(r"|[-+]?[\d.]+(?:e[-+]?\d+)?|true|false|null|none|yes|no|\.?/.*|~/.*", re.IGNORECASE)
# What is left of a section of a run that may go on with another number of ranks. Another type of GPU rounds otherwise.
_OF_ANY_WORLD = ("device", "gpu_type")
# The digest is taken of this text: keys sorted, no spaces. Changing it gives every run another name.
_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_NOTHING = _text({})


def config_digest(plain: Mapping[str, Any], memo: Memo | None = None) -> str:
    """SHA-256 (64 hex digits) over the part of a resolved configuration that decides the result.

    Independent of key order. With a `memo`, a section that several configurations share is written once. Of a run that
    may go on with another number of ranks (`parallel.elastic`, `train.logical_ranks`) that number decides nothing.
    """
    return hashlib.sha256(f"{{{','.join(_parts(plain, memo or Memo()).values())}}}".encode()).hexdigest()


class SeedDigests:
    """`config_digest` of configurations that are alike in all but their seed: all else is written once."""

    def __init__(self, plain: Mapping[str, Any], memo: Memo) -> None:
        parts = _parts(plain, memo)
        place = list(parts).index("seed")
        before, after = list(parts.values())[:place], list(parts.values())[place + 1 :]
        self._before = hashlib.sha256("".join(["{", *(f"{part}," for part in before)]).encode())
        self._after = "".join([*(f",{part}" for part in after), "}"])

    def of(self, seed: int) -> str:
        """The digest of the one with this seed."""
        digest = self._before.copy()
        digest.update(f'"seed":{seed}{self._after}'.encode())
        return digest.hexdigest()


def _parts(plain: Mapping[str, Any], memo: Memo) -> dict[str, str]:
    """Key of the root -> the key and its value, as they stand in the text."""
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
    # Of a section that came later nothing is left where all that is set does not count.
    parts = {name: f'"{name}":{text}' for name, text in texts.items() if text != _NOTHING or name not in _NOT_SET[""]}
    origin = plain.get("checkpoint", {}).get("resume_from")
    if origin is not None:  # of a section that does not count, the one key that does
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
    return _section_text(
        name, {key: value for key, value in hardware.items() if key in _OF_ANY_WORLD} | {"device": device}
    )


def _any_train_text(name: str, train: Mapping[str, Any]) -> str:
    # These two are filled in from the number of ranks.
    return _section_text(name, {**train, "micro_batch_size": None, "grad_accum_steps": None})


def build_run_id(config: TrainConfig, digest: str) -> str:
    """`<model>-<data>-lr<lr>-s<seed>-<10 hex digits>`, with `-<task>` after the data where it is no classification;
    `<train.main>-s<seed>-<10 hex digits>` of a person's own loop, `<program>-<params>-s<seed>-<10 hex digits>` of a
    program.

    The label depends on the configuration alone, never on the other points of the grid: a grid that grows by an
    axis or a value keeps the runs it has. Ten digits: two of 10,000 points
    of one label share an id with probability 5e-5.
    """
    return run_id_of(run_label(config), config.seed, digest)


def run_label(config: TrainConfig) -> str:
    """What a run's id begins with: the words before its seed."""
    task = "" if config.task == TaskConfig() else f"-{_named(config.task)}"
    label = f"{_named(config.model)}-{_named(config.data)}{task}-lr{_number(config.optim.lr)}"
    if config.train.main is not None:
        label = config.train.main.removesuffix(".main")
    if config.train.command is not None:
        given = [
            name if is_secret_value(name, each) else f"{name}{_value(each)}"
            for name, each in config.params.items()
            if isinstance(each, (int, float, str))
        ]
        label = "-".join([program_name(config.train.command), *given])
    return re.sub(r"[^A-Za-z0-9._-]", "_", label)


def _number(value: float) -> str:
    """As a person types it: 1e-5 and 1e9, not 1e-05 and 1e+09."""
    return _EXPONENT.sub(lambda found: f"e{found[1]}", f"{value:g}")


def _value(value: float | str) -> str:
    """Of `params`; a number that `_number` would round keeps its digits."""
    is_long = isinstance(value, float) and ("e" in str(value) or abs(value) >= _LARGE)
    return _number(value) if is_long and float(f"{value:g}") == value else str(value)


def is_secret_value(name: str, value: object) -> bool:
    """Return whether a value may stand in no name: a text whose key is named as secrets are, or that looks like one.

    Names of runs are names of folders and jobs, and stand in command lines that every user of a node can list.
    """
    if not isinstance(value, str) or _NO_SECRET.fullmatch(value):
        return False
    return _SECRET_NAME.fullmatch(name) is not None or _SECRET_VALUE.search(value) is not None


def _has_secrets(params: Mapping[str, Any]) -> bool:
    return any(
        _has_secrets(value) if isinstance(value, Mapping) else is_secret_value(name, value)
        for name, value in params.items()
    )


def had_another_name(plain: Mapping[str, Any]) -> bool:
    """True if another version called the run of this configuration otherwise, or may have: its digest tells."""
    if any(plain[group]["name"] == _CUSTOM for group in ("model", "data")):
        return True
    if plain["train"].get("command") is not None:
        params = plain["params"]
        return (
            is_of_shell(plain["train"]["command"])
            or _has_secrets(params)
            or any(_value(each) != str(each) for each in params.values() if isinstance(each, float))
        )
    return "e" in f"{plain['optim']['lr']:g}"


def _named(section: ModelConfig | DataConfig | TaskConfig) -> str:
    """As a person calls it: of their own class its name, of a function `build` its module's."""
    if section.name != _CUSTOM:
        return section.name
    *path, name = section._target_.split(".")
    return path[-1] if name == "build" and path else name


def run_id_of(label: str, seed: int, digest: str) -> str:
    """`build_run_id`, by what it is made of."""
    return f"{f'{label}-s{seed}'[:80]}-{digest[:10]}"
