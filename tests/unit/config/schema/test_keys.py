"""Every key says what hangs on it, what it says of its limits holds, and docs/reference/keys.md is made of it.

HPC_TRAINER_UPDATE_GOLDEN=1 writes the page anew.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import os
import pkgutil
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config import schema
from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.key import Declared, Identity, Key, declared, declared_keys, keys_class
from hpc_trainer.config.schema.optim import OptimConfig
from hpc_trainer.config.schema.parallel import ParallelConfig
from hpc_trainer.config.schema.train import LoopConfig, TrainConfig
from hpc_trainer.config.store import ALL_KEYS, KEYS, VARIANTS

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "keys.md"
LEAVES = [each for each in ALL_KEYS if each.section is None]
LIMITED = [each for each in LEAVES if each.key.limits]
NUMBERS = (int, float)
UNITS = {"s": "s", "min": "min", "gb": "GB", "mb": "MB", "steps": "steps", "hours": "h"}


def _schemas() -> Iterator[type]:
    for module in pkgutil.walk_packages(schema.__path__, f"{schema.__name__}."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module.name:
                yield kind
    # A domain declares its choices itself (hpc_trainer/domains.py), a feature its sections.
    yield from (kind for variants in VARIANTS.values() for kind in variants.values())
    yield from (each.kind for each in ALL_KEYS)


def test_every_field_of_every_schema_says_what_hangs_on_it() -> None:
    kinds = {kind for kind in _schemas() if kind is not Key}
    assert len(kinds) > 50
    for kind in kinds:
        silent = [each.name for each in dataclasses.fields(kind) if declared(kind, each.name) is None]
        assert not silent, f"declare {kind.__name__}.{silent[0]} with key(...), config/schema/key.py"


def test_a_key_says_all_of_it() -> None:
    assert len(LEAVES) > 200
    for each in LEAVES:
        said, name = each.key, f"{each.kind.__name__}.{each.name}"
        assert said.identity is not None, f"{name}: does another value make another run? COUNTS, ONCE_SET or APART"
        assert said.resume is not None, f"{name}: may a run go on with another value? SAFE, SCHEDULE or INCOMPATIBLE"
        assert said.in_graph is not None, f"{name}: may another value be another compiled graph? in_graph="
        assert said.limits or not _is_number(each), f"{name} is a number: say which are legal, limits="


def test_a_new_key_that_says_nothing_is_named() -> None:
    silent = dataclasses.make_dataclass("Silent", [("speed", int, 3)])
    root = dataclasses.make_dataclass("Root", [("train", silent, dataclasses.field(default_factory=silent))])
    for kind, name in ((silent, r"Silent\.speed"), (root, r"Root\.train")):
        with pytest.raises(TypeError, match=f"{name} must say what depends on it"):
            declared_keys(kind)


def test_variants_of_a_group_agree_on_a_key_that_they_share() -> None:
    for each in LEAVES:
        said, other = each.key, KEYS[each.name]
        assert (said.identity, said.resume, said.in_graph) == (other.identity, other.resume, other.in_graph), each.name


def test_what_came_later_is_left_out_at_its_default_and_nothing_else_is() -> None:
    for each in LEAVES:
        if each.name.count(".") != 1:
            continue
        section, name = each.name.split(".")
        plain = to_plain(_with_variant(each))
        without = {**plain, section: {key: value for key, value in plain[section].items() if key != name}}
        is_same = config_digest(without) == config_digest(plain)
        assert is_same is (each.key.identity is not Identity.counts), each.name


def test_what_is_said_of_limits_is_what_is_checked() -> None:
    """The values just outside are refused by name, and those just inside are not refused for their size."""
    assert len(LIMITED) > 100
    for each in LIMITED:
        _check_limits(each)


def _check_limits(each: Declared) -> None:
    inside, outside = _around(str(each.key.limits), is_int=int in _kinds(each))
    for value in (*inside, *outside):
        config = _with_variant(each)
        owner = functools.reduce(getattr, each.name.split(".")[:-1], config)
        several = {list: [value, value], dict: {"a": value}}
        setattr(owner, each.field.name, several.get(type(each.default), value))
        told = [line for line in find_problems(config) if line.startswith((f"{each.name}=", f"{each.name}["))]
        of_size = [line for line in told if re.search("must be (at|in|between|greater|more|a power|≥|[0-9(])", line)]
        assert of_size if value in outside else not of_size, (each.name, value, told)


def test_the_page_of_keys_is_made_of_the_schemas() -> None:
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN") == "1":
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == _page(), "HPC_TRAINER_UPDATE_GOLDEN=1 writes it anew: read what changed"


def _with_variant(each: Declared) -> TrainConfig:
    section = each.name.partition(".")[0]
    return TrainConfig(**({section: each.kind()} if section in VARIANTS else {}))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _kinds(each: Declared) -> tuple[Any, ...]:
    hint = _hints(each.kind)[each.field.name]
    return typing.get_args(hint) or (hint,)


def _is_number(each: Declared) -> bool:
    return any(kind in NUMBERS for kind in _kinds(each))


def _around(limits: str, is_int: bool) -> tuple[list[float], list[float]]:
    little = 1 if is_int else 1e-3
    digits = re.sub(r"(\d),(\d)", r"\1\2", limits)
    numbers = [(int if is_int else float)(text) for text in re.findall(r"[\d.]+", digits)]
    if limits.startswith("0 or ≥"):
        return [0, numbers[1]], [numbers[1] - little, -little]
    if limits[0] == "≥":
        return [numbers[0]], [numbers[0] - little]
    if limits[0] == ">":
        return [numbers[0] + little], [numbers[0]]
    if " or " in limits:
        return numbers, [each + 1 for each in numbers]
    low, high = numbers
    inside = [low if limits[0] != "(" else low + little, high if limits[-1] != ")" else high - little]
    return inside, [low if limits[0] == "(" else low - little, high if limits[-1] == ")" else high + little]


def _page() -> str:
    lines = [
        "# Every key", "",
        "This page lists every key of the configuration, with its legal values and its default. It is generated from",
        "the schemas in `hpc_trainer/config/schema/`; `HPC_TRAINER_UPDATE_GOLDEN=1 make unit` writes it again. The",
        "columns are:",
        "",
        "- *run*: does the key belong to [the run id](../concepts.md#identity)? yes: another value gives another run.",
        "  no: the run stays the same. once set: another value gives another run, but the default is not in the id.",
        "- *resume*: what happens if a run continues from a checkpoint with another value",
        "  ([the resume contract](../checkpoint_and_requeue.md#the-resume-contract)).",
        "- *graph*: another value may give another graph of `train.compile`.",
        "- *counts with*: the choices with which the key has an effect; with others only the default is accepted.",
        "  (rule): [what goes with what](what_goes_with_what.md), or `plan`, states the condition.",
    ]  # fmt: skip
    seen, part = set(), None
    for each in sorted(ALL_KEYS, key=lambda each: "." in each.name):  # the root's own keys together
        group = each.name.partition(".")[0] if "." in each.name else ""
        if each.section is not None or (each.name, each.field.name, each.kind) in seen:
            continue
        seen.add((each.name, each.field.name, each.kind))
        title = _title(each, group)
        if title != part:
            part = title
            lines += ["", f"## {title}", "", "| key | legal | default | run | resume | graph | counts with | |",
                      "|---|---|---|---|---|---|---|---|"]  # fmt: skip
        lines.append(_row(each))
    return "\n".join(lines) + "\n"


def _title(each: Declared, group: str) -> str:
    if not group:
        return "The root"
    variant = next((name for name, kind in VARIANTS.get(group, {}).items() if kind is each.kind), None)
    return group if variant is None else f"{group}={variant}"


def _row(each: Declared) -> str:
    said = each.key
    assert said.identity is not None
    assert said.resume is not None
    needs = "(rule)" if said.needs is None else ", ".join(f"`{need}`" for need in said.needs)
    cells = (
        f"`{each.name}`", _legal(each), f"`{_shown(each.default)}`", said.identity.value,
        said.resume.value, "yes" if said.in_graph else "", needs, _doc(each).replace("|", "\\|"),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _legal(each: Declared) -> str:
    words = []
    for kind in _kinds(each):
        if isinstance(kind, enum.EnumMeta):
            words += list(kind.__members__)
        elif kind is bool:
            words.append("true, false")
    if each.key.limits:
        unit = UNITS.get(each.field.name.rpartition("_")[2], "") if "_" in each.field.name else ""
        words.append(f"{each.key.limits} {unit}".rstrip())
    if type(None) in _kinds(each):
        words.append("null")
    return ", ".join(words)


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _doc(each: Declared) -> str:
    """The text below the field, its own or that of a class that it overrides."""
    for kind in each.kind.__mro__:
        text = _docs(kind).get(each.field.name) if dataclasses.is_dataclass(kind) else None
        if text:
            return " ".join(text.split())
    return ""


@functools.cache
def _docs(kind: Any) -> dict[str, str]:
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    docs = {
        field.target.id: below.value.value
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }  # fmt: skip
    for name, feature in _of_features(node).items():
        docs[name] = _docs(keys_class(feature)).get(name, "")
    return docs


def _of_features(node: ast.ClassDef) -> dict[str, str]:
    """Features by the keys of a section that they declare."""
    return {
        field.target.id: field.value.args[0].value
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call)
        and ast.unparse(field.value.func) == "of_feature"
    }  # fmt: skip


@pytest.mark.parametrize("kind", [TrainConfig, LoopConfig, ParallelConfig, OptimConfig])
def test_a_section_and_a_feature_give_a_key_the_same_type(kind: Any) -> None:
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    types = {
        ast.unparse(field.target): ast.unparse(field.annotation)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }
    found = {name: keys_class(feature).__annotations__[name] for name, feature in _of_features(node).items()}
    assert found
    assert {name: types[name] for name in found} == found
