"""The points of a grid, composed without composing each: files once a choice of groups, values on copies.

Three ways, tried in this order, and counted for each point:

    plain      every value goes into a typed leaf; sections are shared by all points that agree on them
    omegaconf  some value needs OmegaConf: a list, a mapping, `+`, `++`, `~`, an interpolation
    hydra      Hydra's own compose: overrides of Hydra itself, and whatever went wrong on the other ways

The result is the same on each; `tests/unit/config/compose/test_fast_compose.py` holds them against each other.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.default_element import ResultDefault
from omegaconf import DictConfig, OmegaConf

from hpc_trainer.config.compose.hydra_parts import Defaults, HydraParts, leaf_of, section_of
from hpc_trainer.config.compose.override_lines import Line, UnusualOverrideError, read_line
from hpc_trainer.config.load import ROOT_KEYS, to_typed
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import FREE_KEYS

if TYPE_CHECKING:
    from hpc_trainer.config.compose.composer import Composer

_SECTIONS = frozenset(name for name, is_section in ROOT_KEYS.items() if is_section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """One composed point. Its sections may be shared with other points: change copies only."""

    config: TrainConfig
    choices: Mapping[str, str | None] | None
    """Group -> what was chosen of it, defaults included; None on the way `hydra`: see `Composer.choices_made`."""
    way: str
    """plain, omegaconf or hydra."""


class _DeclinedError(Exception):
    """Left to the next way."""


class FastComposer:
    """Composes points; remembers files, choices of groups and sections. Belongs to one open `Composer`."""

    def __init__(self, composer: Composer, parts: HydraParts) -> None:
        self.counts: Counter[str] = Counter()
        self._composer = composer
        self._parts = parts
        self._lines: dict[str, Line | None] = {}
        self._bases = _Bases(composer, parts)

    def is_group(self, key: str) -> bool:
        """Whether Hydra takes an override of `key` for a choice of a group."""
        return self._parts.is_group(key)

    def compose(self, overrides: Sequence[str], num_fixed: int = 0) -> Composed:
        """What `Composer.compose` makes of the same overrides, and the choices made.

        Args:
            num_fixed: so many overrides, at the beginning, are the same for many points.

        Raises:
            ConfigError: as `Composer.compose` says it.
        """
        try:
            made = self._compose(overrides, num_fixed)
        except Exception:
            # Whatever it is: Hydra's own way meets it again, and its error is the one that is explained.
            made = Composed(config=self._composer.compose(overrides), choices=None, way="hydra")
        self.counts[made.way] += 1
        return made

    def compose_untyped(self, overrides: Sequence[str]) -> DictConfig:
        """What `Composer.compose_untyped` makes of the same overrides, if they need no part of Hydra that is left out.

        Raises:
            Exception: they do, or something is wrong with them; `Composer.compose_untyped` says what.
        """
        lines, groups = self._read(overrides)
        return self._bases.whole(self._bases.get(groups, ()), [line for line in lines if not line.is_group])

    def _read(self, overrides: Sequence[str]) -> tuple[list[Line], tuple[Line, ...]]:
        lines = [self._line(text) for text in overrides]
        groups = tuple([line for line in lines if line.is_group])
        if not all(line.is_swappable for line in groups) and any(line.override.is_add() for line in lines):
            raise _DeclinedError  # our rule about `+` looks at the plain choices alone
        return lines, groups

    def _compose(self, overrides: Sequence[str], num_fixed: int) -> Composed:
        lines, groups = self._read(overrides)
        fixed = tuple([line for line in lines[:num_fixed] if not line.is_group])
        base = self._bases.get(groups, fixed)
        values = [line for line in lines[num_fixed:] if not line.is_group]
        if base.typed is None or not all(line.is_local for line in values):
            return Composed(config=to_typed(self._bases.whole(base, values)), choices=base.choices, way="omegaconf")
        by_section: dict[str, list[Line]] = {}
        for line in values:
            by_section.setdefault(line.section, []).append(line)
        config, is_plain = copy.copy(base.typed), True
        for name, of_section in by_section.items():
            section = base.sections.get(name)
            if section is None:
                setattr(config, name, base.root_value(of_section))
            else:
                typed, was_plain = section.with_lines(tuple(of_section))
                setattr(config, name, typed)
                is_plain = is_plain and was_plain
        return Composed(config=config, choices=base.choices, way="plain" if is_plain else "omegaconf")

    def _line(self, text: str) -> Line:
        if text not in self._lines:
            try:
                self._lines[text] = read_line(text, self._composer.parse, self._parts.is_group)
            except UnusualOverrideError:
                self._lines[text] = None
        line = self._lines[text]
        if line is None:
            raise _DeclinedError
        return line


class _Section:
    """One section of a base without interpolations: independent of all others."""

    def __init__(self, name: str, typed: Any, bare: DictConfig, cfg: DictConfig, owner: _Bases) -> None:
        self.typed = typed
        self._name = name
        self._bare = bare
        self._node: DictConfig = cfg[name]
        self._owner = owner
        self._fields: dict[tuple[Line, ...], tuple[Any, bool]] = {}
        self._made: dict[tuple[Line, ...], tuple[Any, bool]] = {}

    def with_lines(self, lines: tuple[Line, ...]) -> tuple[Any, bool]:
        """The section as a dataclass after these lines, and whether no value needed OmegaConf."""
        if lines not in self._made:
            self._made[lines] = self._make(lines)
        return self._made[lines]

    def _make(self, lines: tuple[Line, ...]) -> tuple[Any, bool]:
        if any(not line.field for line in lines):
            return self._through_omegaconf(lines), False
        by_field: dict[str, list[Line]] = {}
        for line in lines:
            by_field.setdefault(line.field, []).append(line)
        section, is_plain = copy.copy(self.typed), True
        for field, of_field in by_field.items():
            key = tuple(of_field)
            if key not in self._fields:
                self._fields[key] = self._field_value(field, key)
            value, was_plain = self._fields[key]
            setattr(section, field, value)
            is_plain = is_plain and was_plain
        return section, is_plain

    def _field_value(self, field: str, lines: tuple[Line, ...]) -> tuple[Any, bool]:
        leaf = leaf_of(self._node, field)
        if leaf is not None and all(line.is_scalar for line in lines):
            # Each must be legal, the last one stays.
            return [leaf.validate_and_convert(line.override.value()) for line in lines][-1], True
        return getattr(self._through_omegaconf(lines), field), False

    def _through_omegaconf(self, lines: tuple[Line, ...]) -> Any:
        root = OmegaConf.create({})
        root[self._name] = self._node  # OmegaConf copies it
        OmegaConf.set_struct(root, True)
        self._owner.apply(lines, root, self._bare)
        return _typed_section(root, self._name)


class _FreeSection(_Section):
    """A mapping that takes any name: a single value under a plain name needs nobody's leave."""

    def _make(self, lines: tuple[Line, ...]) -> tuple[Any, bool]:
        if not all(line.is_scalar and line.field for line in lines):
            return self._through_omegaconf(lines), False
        return {**self.typed, **{line.field: line.override.value() for line in lines}}, True


def _section(name: str, typed: Any, bare: DictConfig, cfg: DictConfig, owner: _Bases) -> _Section:
    return (_FreeSection if name in FREE_KEYS else _Section)(name, typed, bare, cfg, owner)


@dataclass(slots=True, kw_only=True)
class _Base:
    """One choice of groups with the fixed values."""

    groups: tuple[Line, ...]
    fixed: tuple[Line, ...]
    entries: tuple[ResultDefault, ...] = ()
    choices: Mapping[str, str | None]
    bare: DictConfig | None = None
    """The groups alone; None for a base that was put together from others."""
    cfg: DictConfig | None = None
    typed: TrainConfig | None = None
    """None where it holds an interpolation or a missing value: its points are composed whole."""
    sections: dict[str, _Section] = dataclasses.field(default_factory=dict)
    root_values: dict[tuple[Line, ...], Any] = dataclasses.field(default_factory=dict)
    root_cfg: DictConfig | None = None

    def root_value(self, lines: list[Line]) -> Any:
        """The value of a key of the root after these lines."""
        key = tuple(lines)
        if key not in self.root_values:
            assert self.root_cfg is not None
            leaf = leaf_of(self.root_cfg, lines[0].section)
            if leaf is None or not all(line.is_scalar for line in lines):
                raise _DeclinedError
            self.root_values[key] = [leaf.validate_and_convert(line.override.value()) for line in lines][-1]
        return self.root_values[key]


class _Bases:
    """Bases by choice of groups. Of many groups, not every combination is composed: see `_assembled`."""

    def __init__(self, composer: Composer, parts: HydraParts) -> None:
        self._composer = composer
        self._parts = parts
        self._made: dict[tuple[tuple[Line, ...], tuple[Line, ...]], _Base | None] = {}
        self._bares: dict[tuple[Line, ...], tuple[Defaults, DictConfig]] = {}
        self._references: dict[tuple[Any, ...], _Base] = {}
        self._swaps: dict[tuple[int, int, Line], _Swap | None] = {}
        self._pinned: set[str] = set()

    def get(self, groups: tuple[Line, ...], fixed: tuple[Line, ...]) -> _Base:
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

    def whole(self, base: _Base, values: Sequence[Line]) -> DictConfig:
        """A point whose values depend on each other: a copy of the whole base, then OmegaConf."""
        if base.bare is None or base.cfg is None:
            composed = self._composed(base.groups, base.fixed)
            base.bare, base.cfg = composed.bare, composed.cfg
        assert base.bare is not None
        cfg = copy.deepcopy(base.cfg)
        assert isinstance(cfg, DictConfig)
        self.apply(values, cfg, base.bare)
        return cfg

    def apply(self, lines: Sequence[Line], cfg: DictConfig, bare: DictConfig) -> None:
        """Hydra's own way to set values, after our own rule about `+`."""
        for line in lines:
            if line.override.is_add() and self._composer.problem_of_key(line.override, lambda: bare):
                raise _DeclinedError
        self._parts.apply([line.override for line in lines], cfg)

    def _composed(self, groups: tuple[Line, ...], fixed: tuple[Line, ...]) -> _Base:
        defaults, bare = self._bare(groups)
        cfg = self._with_fixed(bare, fixed)
        base = _Base(
            groups=groups, fixed=fixed, entries=defaults.entries, choices=defaults.choices, bare=bare, cfg=cfg,
            root_cfg=cfg,
        )  # fmt: skip
        if not _is_open(cfg):
            typed = OmegaConf.to_object(cfg)
            assert isinstance(typed, TrainConfig)
            base.typed = typed
            base.sections = {name: _section(name, getattr(typed, name), bare, cfg, self) for name in sorted(_SECTIONS)}
        return base

    def _bare(self, groups: tuple[Line, ...]) -> tuple[Defaults, DictConfig]:
        if groups not in self._bares:
            defaults = self._defaults(groups)
            self._bares[groups] = defaults, self._parts.compose(defaults.entries)
        return self._bares[groups]

    def _with_fixed(self, bare: DictConfig, fixed: Sequence[Line]) -> DictConfig:
        if not fixed:
            return bare
        cfg = copy.deepcopy(bare)
        self.apply(fixed, cfg, bare)
        return cfg

    def _defaults(self, groups: Sequence[Line]) -> Defaults:
        return self._parts.defaults([line.override for line in groups])

    def _assembled(self, groups: tuple[Line, ...], fixed: tuple[Line, ...]) -> _Base | None:
        """A base put together from those that differ from a reference in one group; None where that is not certain.

        Of eight groups with three choices, 17 bases are composed instead of 6,561.
        """
        reference = self._reference(groups, fixed)
        if reference is None or reference.typed is None:
            return None
        swaps = []
        for index, (theirs, ours) in enumerate(zip(reference.groups, groups, strict=True)):
            if theirs is not ours:
                swap = self._swap(reference, index, ours)
                if swap is None:
                    self._pinned.add(ours.override.key_or_group)
                    return None
                swaps.append(swap)
        names = [name for swap in swaps for name in swap.sections]
        if len(set(names)) != len(names):
            return None
        sections = dict(reference.sections)
        choices = dict(reference.choices)
        typed = copy.copy(reference.typed)
        for swap in swaps:
            choices.update(swap.choices)
            for name, section in swap.sections.items():
                sections[name] = section
                setattr(typed, name, section.typed)
        return _Base(
            groups=groups, fixed=fixed, choices=choices, typed=typed, sections=sections, root_cfg=reference.root_cfg
        )

    def _reference(self, groups: tuple[Line, ...], fixed: tuple[Line, ...]) -> _Base | None:
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
        if touched is None or not touched <= _SECTIONS:
            return None
        bare = self._parts.compose(
            [each for each in defaults.entries if section_of(each) in touched or not section_of(each)]
        )
        cfg = self._with_fixed(bare, [each for each in reference.fixed if each.section in touched])
        sections = {name: _section(name, _typed_section(cfg, name), bare, cfg, self) for name in sorted(touched)}
        changed = {
            group: choice
            for group, choice in defaults.choices.items()
            if group not in reference.choices or reference.choices[group] != choice
        }
        return _Swap(sections=sections, choices=changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swap:
    """What changes when one group takes another choice."""

    sections: Mapping[str, _Section]
    choices: Mapping[str, str | None]


def _typed_section(cfg: DictConfig, name: str) -> Any:
    if _is_open(cfg[name]):
        raise _DeclinedError
    return OmegaConf.to_object(cfg[name])


def _is_open(cfg: DictConfig) -> bool:
    """Whether some value is an interpolation or missing."""
    return _has_open(OmegaConf.to_container(cfg, resolve=False))


def _has_open(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_open(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_open(item) for item in value)
    return isinstance(value, str) and ("${" in value or value == "???")
