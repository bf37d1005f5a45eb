"""Hydra apps drawn at random: files that meet in all ways that Hydra knows, and overrides for them."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

GROUPS = ("model", "data", "optim", "extra")
CHOICES = ("a", "b", "c")
_KEYS = ("x", "y", "z", "deep", "items", "name")
_INTERPOLATIONS = (
    "${seed}", "${model.x}", "pre_${data.y}", "${optim}", "${data.deep}", "${.x}", "${..seed}", "${oc.env:HOME,none}",
    "${twice:${seed}}", "${now:%Y}", "${data.deep.x}/${seed}", "${hydra.job.name}", "${oc.select:model.deep,null}",
    "${section:3}",
)  # fmt: skip
_HEADERS = (*[""] * 8, "# @package _global_\n", "# @package other.place\n", "# @package data\n")


class Color(enum.Enum):
    """A type that a file cannot hold."""

    RED = 1
    BLUE = 2


@dataclass
class Inner:
    """A section within a typed section."""

    name: str = MISSING
    size: int = 3
    x: float | None = None
    table: dict[str, int] = field(default_factory=dict)
    color: Color = Color.RED


@dataclass
class Typed:
    """A typed section, with one of each kind of type."""

    x: int = 1
    y: float | None = None
    name: str = MISSING
    deep: Inner = field(default_factory=Inner)
    items: list[int] = field(default_factory=lambda: [1, 2])
    table: dict[str, float] = field(default_factory=lambda: {"a": 1.0})
    colors: dict[Color, int] = field(default_factory=lambda: {Color.BLUE: 2})
    either: int | str = 1


@dataclass
class Root:
    """A typed root, as an app has it whose configuration is made in Python."""

    defaults: list[Any] = field(default_factory=lambda: [{"model": "typed"}, "_self_"])
    seed: int = 0
    model: Any = MISSING
    data: Any = None
    optim: Typed = field(default_factory=Typed)
    z: Any = None


def register() -> None:
    """Make the typed sections and the resolvers known to Hydra."""
    store = ConfigStore.instance()
    store.store(group="model", name="typed", node=Typed)
    store.store(group="optim", name="typed", node=Typed)
    store.store(group="model", name="typed_base", node=Inner)
    store.store(name="typed_root", node=Root)
    OmegaConf.register_new_resolver("twice", lambda value: f"{value}{value}", replace=True)
    OmegaConf.register_new_resolver("section", lambda value: OmegaConf.create({"x": value}), replace=True)


class RandomApp:
    """The folder of an app, and overrides that fit it more often than not."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self.folder = folder
        self.config_name = self._random.choice([*["config"] * 6, "typed_root", "typed_config"])
        self._write("config", {"defaults": self._root_defaults(), **self._section(), "seed": 1, **self._of_hydra()})
        typed = {"defaults": ["typed_root", *self._root_defaults()[1:]], "seed": 4}
        self._write("typed_config", typed)
        for group in GROUPS:
            for choice in CHOICES:
                is_typed = self.config_name.startswith("typed")
                content = {"x": self._leaf(), "y": self._leaf()} if is_typed else self._of_group(group)
                self._write(f"{group}/{choice}", content, "" if is_typed else self._random.choice(_HEADERS))
        for choice in CHOICES:
            self._write(f"experiment/{choice}", self._experiment(), "# @package _global_\n")
        self._write("model/sub/a", self._section())

    def points(self, number: int, known: Any) -> list[list[str]]:
        """Return the overrides of some points: a few groups and keys, in all choices.

        Args:
            number: how many points.
            known: a configuration of the app as plain values; most overrides are of its keys.
        """
        self._known = [".".join(path) for path in paths_of(known) if path[0] != "hydra"]
        axes = [self._axis() for _ in range(self._random.randint(1, 4))]
        fixed = [self._value() for _ in range(self._random.randint(0, 2))]
        return [[*(self._random.choice(axis) for axis in axes), *fixed] for _ in range(number)]

    def _axis(self) -> list[str]:
        draw = self._random
        if draw.random() < 0.5:
            group = draw.choice([*GROUPS[:3], *GROUPS, "experiment", "experiment", "model@other", "model/sub"])
            is_new = group not in self._known
            choices = [*CHOICES, "typed"] if group in ("model", "optim") and draw.random() < 0.2 else CHOICES
            return [f"{'+' if is_new else ''}{group}={choice}" for choice in choices]
        if draw.random() < 0.1:
            return [f"~{draw.choice(GROUPS[:3])}", f"~{draw.choice(GROUPS)}=a"]
        key, sign = self._key()
        return [f"{sign}{key}={self._text()}" for _ in range(3)]

    def _value(self) -> str:
        (key, sign), draw = self._key(), self._random.random()
        if draw < 0.15:
            return f"~{key}"
        if draw < 0.2:
            return f"~{key}={self._text()}"
        if draw < 0.25:
            return f"hydra.job.name={self._text()}"
        return f"{sign}{key}={self._text()}"

    def _key(self) -> tuple[str, str]:
        """Return a key and the sign that it needs."""
        draw = self._random
        if draw.random() < 0.7 and self._known:
            return draw.choice(self._known), draw.choice(["", "", "++"])
        section = draw.choice([*GROUPS, "other.place", "fresh", "fresh.deep"])
        inner = draw.choice([*_KEYS, "new", "deep.new", "deep.x", "deep.color", "items.0", "table.a"])
        return draw.choice(["new", section, f"{section}.{inner}", f"{section}.{inner}"]), draw.choice(["+", "++", "++"])

    def _text(self) -> str:
        return self._random.choice(
            ["1", "2", "0.5", "1e-3", "null", "true", "word", "'two words'", "[1,2]", "[]", "{x:1}", "{deep:{x:7}}",
             "RED", "BLUE", "???", "'${seed}'", "'${data.x}'", "a_${seed}", "{y:'${seed}'}"]
        )  # fmt: skip

    def _root_defaults(self) -> list[Any]:
        listed: list[Any] = [{group: self._random.choice(CHOICES)} for group in GROUPS[:3]]
        draw = self._random.random()
        if draw < 0.2:
            listed[1] = {"data": ["a", "c"]}
        elif draw < 0.3:
            listed[0] = {"model": "typed"}
        elif draw < 0.4:
            listed.append({"extra": "${model}"})
        elif draw < 0.5:
            listed.append({"optional extra": "nowhere"})
        elif draw < 0.6:
            listed.append({"model@other.model": "b"})
        listed.insert(self._random.randint(1, len(listed)), "_self_")
        return [*listed, *([{"override hydra/job_logging": "disabled"}] if self._random.random() < 0.3 else [])]

    def _of_group(self, group: str) -> Any:
        content: dict[str, Any] = self._section()
        draw = self._random.random()
        if draw < 0.1:
            return {"defaults": ["typed" if group in GROUPS[::2] else "_self_"], "x": 5}
        if draw < 0.2 and group == "model":
            return {"defaults": ["sub/a", "_self_"], **content}
        if draw < 0.25:
            return {group: content, **content}
        return content

    def _experiment(self) -> dict[str, Any]:
        group = self._random.choice(GROUPS[:3])
        content: dict[str, Any] = {group: self._section(), **self._section()}
        if self._random.random() < 0.6:
            content["defaults"] = [{f"override /{group}": self._random.choice(CHOICES)}, "_self_"]
            content["defaults"].reverse()
        if self._random.random() < 0.3:
            content |= self._of_hydra()
        return content

    def _of_hydra(self) -> dict[str, Any]:
        job = self._random.choice(
            [{}, {"name": "${seed}"}, {"env_copy": ["HOME"]}, {"config": {"override_dirname": {"kv_sep": "${z}"}}}]
        )
        subdir = self._random.choice(["${hydra.job.num}", "a/${seed}", "${model}"])
        return {"hydra": {"job": job, "sweep": {"subdir": subdir}}} if self._random.random() < 0.4 else {}

    def _section(self) -> dict[str, Any]:
        names = self._random.sample(_KEYS, self._random.randint(1, 4))
        return {name: self._content(name) for name in names}

    def _content(self, name: str) -> Any:
        draw = self._random
        if name == "deep" and draw.random() < 0.8:
            return {each: self._leaf() for each in draw.sample(_KEYS, 2)}
        if name == "items" and draw.random() < 0.8:
            return [self._leaf() for _ in range(draw.randint(0, 3))]
        return self._leaf()

    def _leaf(self) -> Any:
        draw = self._random
        if draw.random() < 0.25:
            return draw.choice(_INTERPOLATIONS)
        return draw.choice([1, 2.5, True, None, "text", "???", {"x": 1, "y": {"z": 2}}, [1, {"x": 2}], {1: "one"}])

    def _write(self, name: str, content: Any, header: str = "") -> None:
        path = self.folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + yaml.safe_dump(content, sort_keys=False))


def paths_of(plain: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value of a plain configuration."""
    if path:
        yield path
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield from paths_of(value, (*path, str(name)))
