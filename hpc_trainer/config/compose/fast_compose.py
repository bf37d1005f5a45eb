"""The points of a grid, composed without composing each: files once a choice of groups, values on copies.

Two ways, and counted for each point:

    fast       Hydra's functions once for each choice of groups, and once for each value of a key; sections are shared
               by all points that agree on them, and what holds an interpolation by those that agree on what it names
    hydra      Hydra's own compose: overrides of Hydra itself, and whatever went wrong on the fast way

The result is the same on both; `tests/unit/config/compose/test_fast_compose.py` holds them against each other.
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

from hpc_trainer.config.compose.composer import ROOT, Composer
from hpc_trainer.config.compose.hydra_parts import Defaults, HydraParts, leaf_of, section_of
from hpc_trainer.config.compose.override_lines import Line, UnusualOverrideError, named_in, read_line
from hpc_trainer.config.load import ROOT_KEYS, to_typed
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS

_Lines = tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """One composed point. Its sections may be shared with other points: change copies only."""

    config: TrainConfig
    choices: Mapping[str, str | None] | None = None
    """Group -> what was chosen of it, defaults included; None on the way `hydra`: see `Composer.choices_made`."""
    is_seed_alone: bool = False
    """It is certain that nothing but `seed` itself hangs on the seed."""


class _DeclinedError(Exception):
    """Left to Hydra's own compose."""


class GridComposer(Composer):
    """A `Composer` for the many points of a grid: it remembers files, choices of groups and sections."""

    def __init__(self, config_dirs: Sequence[Path] = ()) -> None:
        super().__init__(config_dirs)
        self.counts: Counter[str] = Counter()
        """Points by the way they were composed: fast, hydra."""

    def __enter__(self) -> GridComposer:
        super().__enter__()
        self._lines: dict[str, Line | None] = {}
        self._parts = HydraParts(ROOT, self.search_path())
        self._bases = _Bases(self, self._parts)
        return self

    def is_group(self, key: str) -> bool:
        """Whether Hydra takes an override of `key` for a choice of a group."""
        return self._parts.is_group(key)

    def compose_point(self, overrides: Sequence[str], num_fixed: int = 0) -> Composed:
        """What `compose` makes of the same overrides, and the choices made.

        Args:
            num_fixed: so many overrides, at the beginning, are the same for many points.

        Raises:
            ConfigError: as `compose` says it.
        """
        try:
            made, way = self._compose_fast(overrides, num_fixed), "fast"
        except Exception:
            # Whatever it is: Hydra's own way meets it again, and its error is the one that is explained.
            made, way = Composed(config=self.compose(overrides)), "hydra"
        self.counts[way] += 1
        return made

    def _compose_fast(self, overrides: Sequence[str], num_fixed: int) -> Composed:
        lines = [self._line(text) for text in overrides]
        groups = tuple([line for line in lines if line.is_group])
        if not all(line.is_swappable for line in groups) and any(line.override.is_add() for line in lines):
            raise _DeclinedError  # our rule about `+` looks at the plain choices alone
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
                self._lines[text] = read_line(text, self.parse, self._parts.is_group)
            except UnusualOverrideError:
                self._lines[text] = None
        line = self._lines[text]
        if line is None:
            raise _DeclinedError
        return line


class _Part:
    """One key of the root without interpolations: a section or a value, independent of all others."""

    def __init__(self, name: str, cfg: DictConfig, bare: DictConfig, owner: _Bases) -> None:
        value = cfg[name]
        self.typed: Any = OmegaConf.to_object(value) if isinstance(value, (DictConfig, ListConfig)) else value
        self._name, self._cfg, self._bare, self._owner = name, cfg, bare, owner
        self._fields: dict[_Lines, Any] = {}
        self._made: dict[_Lines, Any] = {}

    def with_lines(self, lines: _Lines) -> Any:
        """What it is after these lines."""
        if lines not in self._made:
            self._made[lines] = self._make(lines)
        return self._made[lines]

    def _make(self, lines: _Lines) -> Any:
        by_field: dict[str, list[Line]] = {}
        for line in lines:
            by_field.setdefault(line.field, []).append(line)
        if "" in by_field:
            return self._set(self._cfg, self._name, lines)
        if self._name in FREE_KEYS:  # a single value under a plain name needs nobody's leave
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
        """The value of a key of `owner` after lines about nothing else."""
        leaf = leaf_of(owner, name)
        if leaf is not None and all(line.is_scalar for line in lines):
            # Each must be legal, the last one stays.
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
    """Without the open keys."""
    parts: Mapping[str, _Part]
    """All but the open keys."""
    entries: tuple[ResultDefault, ...] = ()
    """The files; none of a base that was put together from others, as of `whole`."""
    whole: tuple[DictConfig, DictConfig] | None = None
    """As composed: with the fixed values, and without."""
    open_keys: frozenset[str] = frozenset()
    """Keys of the root that hold an interpolation or a missing value."""
    followed: frozenset[str] = frozenset()
    """Keys of the root that those may depend on."""
    resolved: dict[tuple[frozenset[str], _Lines], Mapping[str, Any]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swap:
    """What changes when one group takes another choice."""

    parts: Mapping[str, _Part]
    choices: Mapping[str, str | None]


class _Bases:
    """Bases by choice of groups. Of many groups, not every combination is composed: see `_assembled`."""

    def __init__(self, composer: Composer, parts: HydraParts) -> None:
        self._composer = composer
        self._parts = parts
        self._made: dict[tuple[_Lines, _Lines], _Base | None] = {}
        self._bares: dict[_Lines, tuple[Defaults, DictConfig]] = {}
        self._references: dict[tuple[Any, ...], _Base] = {}
        self._swaps: dict[tuple[int, int, Line], _Swap | None] = {}
        self._pinned: set[str] = set()

    def get(self, groups: _Lines, fixed: _Lines) -> _Base:
        """The base of these groups and fixed values. Raises what Hydra raises."""
        key = (groups, fixed)
        if key not in self._made:
            self._made[key] = None  # what fails once is left to Hydra from then on
            try:
                assembled = self._assembled(groups, fixed)
            except Exception:  # of a base that no point may ask for; this one is composed, and says what is wrong
                assembled = None
            self._made[key] = assembled or self._composed(groups, fixed)
        base = self._made[key]
        if base is None:
            raise _DeclinedError
        return base

    def resolved(
        self, base: _Base, values: Sequence[Line], keys: frozenset[str], followed: frozenset[str]
    ) -> Mapping[str, Any]:
        """These keys after the values of a point. Made once for all points that agree on what they depend on."""
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
        """Hydra's own way to set values, after our own rule about `+`."""
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
        """A base put together from those that differ from a reference in one group; None where that is not certain.

        Of eight groups with three choices, 17 bases are composed instead of 6,561.
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
            [each for each in defaults.entries if section_of(each) in touched or not section_of(each)]
        )
        cfg = self._with_fixed(bare, [each for each in reference.fixed if each.section in touched])
        if any(_is_open(OmegaConf.to_container(cfg[name], resolve=False)) for name in touched):
            return None
        changed = {
            group: choice
            for group, choice in defaults.choices.items()
            if group not in reference.choices or reference.choices[group] != choice
        }
        return _Swap(parts={name: _Part(name, cfg, bare, self) for name in sorted(touched)}, choices=changed)


def _is_open(plain: Any) -> bool:
    """Whether it may hold an interpolation or a missing value."""
    text = str(plain)
    return "${" in text or "???" in text
