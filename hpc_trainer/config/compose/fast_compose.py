"""Fast composition of a grid: files are composed once for each choice of groups, values are set on copies.

Each point is composed in one of two ways, which are counted:

    fast       Hydra's functions once for each choice of groups, and once for each value of a key; sections are shared
               by all points that agree on them, and keys with an interpolation by those that agree on what it names
    hydra      Hydra's own compose: overrides of Hydra itself, and points for which the fast way failed

Both give the same result; `tests/unit/config/compose/test_fast_compose.py` compares them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.default_element import ResultDefault
from omegaconf import DictConfig, ListConfig, OmegaConf

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.hydra_parts import Defaults, HydraParts, leaf_of, section_of
from hpc_trainer.config.compose.overrides import Line, UnusualOverrideError, named_in, read_line
from hpc_trainer.config.load import ROOT_KEYS, to_typed
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS

_Lines = tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """One composed point. Its sections may be shared with other points: change copies only."""

    config: TrainConfig
    choices: Mapping[str, str | None] | None = None
    """Group -> its choice, defaults included; None after Hydra's own compose: see `Composer.choices_made`."""
    is_seed_alone: bool = False
    """True if certainly nothing but `seed` itself depends on the seed."""


class _DeclinedError(Exception):
    """Error for overrides that are left to Hydra's own compose."""


class GridComposer(Composer):
    """A `Composer` for the many points of a grid: it remembers files, choices of groups and sections."""

    def __init__(self, config_dirs: Sequence[Path] = ()) -> None:
        super().__init__(config_dirs)
        self.counts: Counter[str] = Counter()
        """Points by the way they were composed: fast, hydra."""

    def __enter__(self) -> GridComposer:
        super().__enter__()
        self._lines: dict[str, Line | None] = {}
        self._parts = HydraParts(self.root, self.search_path())
        self._bases = _Bases(self, self._parts)
        return self

    def is_group(self, key: str) -> bool:
        """Return True if Hydra treats an override of `key` as the choice of a group."""
        return self._parts.is_group(key)

    def compose_point(self, overrides: Sequence[str], num_fixed: int = 0) -> Composed:
        """Return the configuration that `compose` makes of the same overrides, and the choices of groups.

        Args:
            overrides: all overrides of the point.
            num_fixed: number of overrides, at the beginning, that are the same for many points.

        Raises:
            ConfigError: an override is wrong, as in `compose`.
        """
        try:
            made, way = self._compose_fast(overrides, num_fixed), "fast"
        except Exception:
            # Hydra's own way meets any such error again, and its error is the one that is explained.
            made, way = Composed(config=self.compose(overrides)), "hydra"
        self.counts[way] += 1
        return made

    def _compose_fast(self, overrides: Sequence[str], num_fixed: int) -> Composed:
        lines = [self._line(text) for text in overrides]
        groups = tuple([line for line in lines if line.is_group])
        if not all(line.is_swappable for line in groups) and any(line.override.is_add() for line in lines):
            raise _DeclinedError  # our rule about `+` checks plain choices only
        fixed = tuple([line for line in lines[:num_fixed] if not line.is_group])
        values = [line for line in lines[num_fixed:] if not line.is_group]
        if not all(line.is_local for line in values):
            raise _DeclinedError
        base = self._bases.get(groups, fixed)
        config, open_keys, followed = copy.copy(base.config), base.open_keys, base.followed
        by_section: dict[str, list[Line]] = {}
        for line in values:
            by_section.setdefault(line.section, []).append(line)
            if line.follows:
                open_keys, followed = open_keys | {line.section}, followed | line.follows
        for name, of_section in by_section.items():
            if name not in open_keys:
                setattr(config, name, base.parts[name].with_lines(tuple(of_section)))
        if open_keys:
            for name, value in self._bases.resolved(base, values, open_keys, followed).items():
                setattr(config, name, value)
        return Composed(config=config, choices=base.choices, is_seed_alone="seed" not in followed)

    def _line(self, text: str) -> Line:
        if text not in self._lines:
            try:
                line = read_line(text, self.parse, self._parts.is_group)
                is_wrong = line.is_group and self._problem_of_choice(line.override) is not None
                self._lines[text] = None if is_wrong else line
            except UnusualOverrideError:
                self._lines[text] = None
        known = self._lines[text]
        if known is None:
            raise _DeclinedError
        return known


class _Part:
    """One key of the root without interpolations: a section or a value, independent of all others."""

    def __init__(self, name: str, cfg: DictConfig, bare: DictConfig, owner: _Bases) -> None:
        value = cfg[name]
        self.typed: Any = OmegaConf.to_object(value) if isinstance(value, (DictConfig, ListConfig)) else value
        self._name, self._cfg, self._bare, self._owner = name, cfg, bare, owner
        self._fields: dict[_Lines, Any] = {}
        self._made: dict[_Lines, Any] = {}

    def with_lines(self, lines: _Lines) -> Any:
        """Return the section or value with these overrides applied."""
        if lines not in self._made:
            self._made[lines] = self._make(lines)
        return self._made[lines]

    def _make(self, lines: _Lines) -> Any:
        by_field: dict[str, list[Line]] = {}
        for line in lines:
            by_field.setdefault(line.field, []).append(line)
        if "" in by_field:
            return self._set(self._cfg, self._name, lines)
        if self._name in FREE_KEYS:  # a single value under a plain name is always legal
            are_plain = all(line.is_scalar for line in lines)
            return {**self.typed, **_values(lines)} if are_plain else self._through_omegaconf(lines)
        section = copy.copy(self.typed)
        for field, of_field in by_field.items():
            key = tuple(of_field)
            if key not in self._fields:
                self._fields[key] = self._set(self._cfg[self._name], field, key)
            setattr(section, field, self._fields[key])
        return section

    def _set(self, owner: DictConfig, name: str, lines: _Lines) -> Any:
        """Return the value of a key of `owner` with overrides of that key applied."""
        leaf = leaf_of(owner, name)
        if leaf is not None and all(line.is_scalar for line in lines):
            # Each value must be legal; the last one stays.
            return [leaf.validate_and_convert(line.override.value()) for line in lines][-1]
        made = self._through_omegaconf(lines)
        return made if owner is self._cfg else getattr(made, name)

    def _through_omegaconf(self, lines: _Lines) -> Any:
        root = OmegaConf.create({})
        root[self._name] = self._cfg._get_node(self._name)  # OmegaConf copies it
        OmegaConf.set_struct(root, True)
        self._owner.apply(lines, root, self._bare)
        made = root[self._name]
        if not isinstance(made, DictConfig) or _is_open(OmegaConf.to_container(made, resolve=False)):
            raise _DeclinedError
        return OmegaConf.to_object(made)


def _values(lines: _Lines) -> dict[str, Any]:
    return {line.field: line.override.value() for line in lines}


@dataclass(slots=True, kw_only=True)
class _Base:
    """One choice of groups with the fixed values."""

    groups: _Lines
    fixed: _Lines
    choices: Mapping[str, str | None]
    config: TrainConfig
    """Configuration without the open keys."""
    parts: Mapping[str, _Part]
    """Every key of the root except the open keys."""
    entries: tuple[ResultDefault, ...] = ()
    """Files of the base; empty, as `whole` is None, if the base was assembled from others."""
    whole: tuple[DictConfig, DictConfig] | None = None
    """Composed configuration: with the fixed values, and without."""
    open_keys: frozenset[str] = frozenset()
    """Keys of the root that hold an interpolation or a missing value."""
    followed: frozenset[str] = frozenset()
    """Keys of the root on which the open keys may depend."""
    resolved: dict[tuple[frozenset[str], _Lines], Mapping[str, Any]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swap:
    """Change that results when one group takes another choice."""

    parts: Mapping[str, _Part]
    choices: Mapping[str, str | None]


class _Bases:
    """Bases by choice of groups. With many groups, not every combination is composed: see `_assembled`."""

    def __init__(self, composer: Composer, parts: HydraParts) -> None:
        self._composer = composer
        self._parts = parts
        self._made: dict[tuple[_Lines, _Lines], _Base | None] = {}
        self._bares: dict[_Lines, tuple[Defaults, DictConfig]] = {}
        self._references: dict[tuple[Any, ...], _Base] = {}
        self._swaps: dict[tuple[int, int, Line], _Swap | None] = {}
        self._pinned: set[str] = set()

    def get(self, groups: _Lines, fixed: _Lines) -> _Base:
        """Return the base of these groups and fixed values. Raises what Hydra raises."""
        key = (groups, fixed)
        if key not in self._made:
            self._made[key] = None  # groups that fail once are left to Hydra from then on
            try:
                assembled = self._assembled(groups, fixed)
            except Exception:  # about a base that no point may use; this one is composed, and has its own error
                assembled = None
            self._made[key] = assembled or self._composed(groups, fixed)
        base = self._made[key]
        if base is None:
            raise _DeclinedError
        return base

    def resolved(
        self, base: _Base, values: Sequence[Line], keys: frozenset[str], followed: frozenset[str]
    ) -> Mapping[str, Any]:
        """Return these keys after the values of a point.

        They are computed once for all points that agree on the values that the keys depend on.
        """
        lines = tuple(line for line in values if line.section in keys | followed)
        if (keys, lines) not in base.resolved:
            if base.whole is None:
                base.whole = self._composed(base.groups, base.fixed).whole
            assert base.whole is not None
            cfg, bare = copy.deepcopy(base.whole[0]), base.whole[1]
            self.apply(lines, cfg, bare)
            config = to_typed(cfg)
            base.resolved[keys, lines] = {name: getattr(config, name) for name in keys}
        return base.resolved[keys, lines]

    def apply(self, lines: Sequence[Line], cfg: DictConfig, bare: DictConfig) -> None:
        """Set values as Hydra does, after our own rule about `+`."""
        for line in lines:
            if line.override.is_add() and self._composer.problem_of_key(line.override, lambda: bare):
                raise _DeclinedError
        self._parts.apply([line.override for line in lines], cfg)

    def _composed(self, groups: _Lines, fixed: _Lines) -> _Base:
        if groups not in self._bares:
            defaults = self._defaults(groups)
            self._bares[groups] = defaults, self._parts.compose(defaults.entries)
        defaults, bare = self._bares[groups]
        cfg = self._with_fixed(bare, fixed)
        plain: Any = OmegaConf.to_container(cfg, resolve=False)
        if plain.keys() != ROOT_KEYS.keys():
            raise _DeclinedError
        open_keys = frozenset(name for name, value in plain.items() if _is_open(value))
        parts = {name: _Part(name, cfg, bare, self) for name in ROOT_KEYS if name not in open_keys}
        typed: dict[str, Any] = {name: parts[name].typed if name in parts else None for name in ROOT_KEYS}
        return _Base(
            groups=groups, fixed=fixed, entries=defaults.entries, choices=defaults.choices, whole=(cfg, bare),
            config=TrainConfig(**typed), parts=parts, open_keys=open_keys,
            followed=frozenset[str]().union(*(named_in(plain[name]) for name in open_keys)),
        )  # fmt: skip

    def _with_fixed(self, bare: DictConfig, fixed: Sequence[Line]) -> DictConfig:
        if not fixed:
            return bare
        cfg = copy.deepcopy(bare)
        self.apply(fixed, cfg, bare)
        return cfg

    def _defaults(self, groups: Sequence[Line]) -> Defaults:
        return self._parts.defaults([line.override for line in groups])

    def _assembled(self, groups: _Lines, fixed: _Lines) -> _Base | None:
        """Assemble a base from bases that differ from a reference in one group; None if the result is uncertain.

        With eight groups of three choices, 17 bases are composed instead of 6,561.
        """
        reference = self._reference(groups, fixed)
        if reference is None or reference.open_keys:
            return None
        parts, choices, config = dict(reference.parts), dict(reference.choices), copy.copy(reference.config)
        swapped: set[str] = set()
        for index, (theirs, ours) in enumerate(zip(reference.groups, groups, strict=True)):
            if theirs is ours:
                continue
            swap = self._swap(reference, index, ours)
            if swap is None:
                self._pinned.add(ours.override.key_or_group)
            if swap is None or not swapped.isdisjoint(swap.parts):
                return None
            swapped |= swap.parts.keys()
            choices |= swap.choices
            parts |= swap.parts
            for name, part in swap.parts.items():
                setattr(config, name, part.typed)
        return _Base(groups=groups, fixed=fixed, choices=choices, config=config, parts=parts)

    def _reference(self, groups: _Lines, fixed: _Lines) -> _Base | None:
        if not all(line.is_local for line in fixed):
            return None
        shape = tuple(
            line.override.key_or_group if line.is_swappable and line.override.key_or_group not in self._pinned else line
            for line in groups
        )
        key = (shape, fixed)
        if key not in self._references:
            base = self._composed(groups, fixed)
            self._references[key] = base
            self._made[(groups, fixed)] = base
        return self._references[key]

    def _swap(self, reference: _Base, index: int, line: Line) -> _Swap | None:
        key = (id(reference), index, line)
        if key not in self._swaps:
            self._swaps[key] = None
            self._swaps[key] = self._make_swap(reference, index, line)
        return self._swaps[key]

    def _make_swap(self, reference: _Base, index: int, line: Line) -> _Swap | None:
        groups = (*reference.groups[:index], line, *reference.groups[index + 1 :])
        defaults = self._defaults(groups)
        touched = self._parts.sections_touched(reference.entries, defaults.entries)
        if touched is None or not all(ROOT_KEYS.get(name) for name in touched):
            return None
        bare = self._parts.compose(
            [entry for entry in defaults.entries if section_of(entry) in touched or not section_of(entry)]
        )
        cfg = self._with_fixed(bare, [fixed for fixed in reference.fixed if fixed.section in touched])
        if any(_is_open(OmegaConf.to_container(cfg[name], resolve=False)) for name in touched):
            return None
        changed = {
            group: choice
            for group, choice in defaults.choices.items()
            if group not in reference.choices or reference.choices[group] != choice
        }
        return _Swap(parts={name: _Part(name, cfg, bare, self) for name in sorted(touched)}, choices=changed)


def _is_open(plain: Any) -> bool:
    """Return True if a value may hold an interpolation or a missing value."""
    text = str(plain)
    return "${" in text or "???" in text
