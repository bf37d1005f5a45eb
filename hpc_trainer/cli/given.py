"""What the verbs of a grid are given on the command line. Imports nothing heavy before it is used."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_trainer.errors import ConfigError

if TYPE_CHECKING:
    from hpc_trainer.launch.freeze import Grid
    from hpc_trainer.runs.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Given:
    """None: nothing was given."""

    overrides: list[str] | None
    config_dirs: list[Path] | None
    trust: list[str] | None
    app: str | None = None
    """A Hydra app and its words, as a shell would cut them (`--app`)."""

    @classmethod
    def of_grid(
        cls, overrides: list[str] | None, command: str | None, app: str | None, config_dirs: list[Path] | None,
        trust: list[str] | None,
    ) -> Given:  # fmt: skip
        """With a program of a person's own in place of a training (`--command`, `--app`)."""
        if command is None:
            return cls(overrides, config_dirs, trust, app)
        if app is not None:
            raise ConfigError("--command and --app are two programs for one run. Keep one.")
        from hpc_trainer.config.compose.composer import override_value

        # OmegaConf would look for what ${NAME} names; it is the program's.
        kept = override_value(command.replace("${", "\\${"))
        return cls([*(overrides or ()), f"train.command={kept}"], config_dirs, trust)

    @property
    def places(self) -> dict[str, list[Any]]:
        """Where configuration and code may come from: what `freeze_grid` takes besides overrides."""
        return {"config_dirs": self.config_dirs or [], "trust": self.trust or []}

    def here(self, verb: str, without: tuple[str, ...] = ()) -> Given:
        """The same on this machine, less the overrides that begin so."""
        from hpc_trainer.config.compose.composer import overrides_for_here

        local = overrides_for_here(self.overrides or (), verb)
        return dataclasses.replace(self, overrides=[each for each in local if not each.startswith(without)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which runs of a grid are submitted, and where they begin."""

    retry_failed: bool
    fresh: bool
    extend: bool

    def of(self, grid: Grid) -> Grid:
        """The grid; with `extend` its runs begin where shorter ones have ended."""
        if not self.extend:
            return grid
        from hpc_trainer.launch.extend import extend_grid

        return extend_grid(grid)


def resolve_runs_dir(option: Path | None) -> Path:
    """--runs-dir, else what is configured."""
    from hpc_trainer.operate.find import configured_runs_dir

    return configured_runs_dir() if option is None else option


def tell_notes(notes: Sequence[str]) -> None:
    """On standard error."""
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)


def only_point(grid: Grid, takes: str, use: str) -> RunSpec:
    """The one point of a grid. Raises ConfigError if there are more, with what to use instead."""
    if len(grid.specs) != 1:
        raise ConfigError(f"{takes} one configuration, and this is a grid of {len(grid.specs)}. {use}")
    return grid.specs[0]


def at_defaults(section: str, fresh: Any) -> Iterator[str]:
    """Overrides for a section that a verb has no use for: what was chosen there would have no effect, and be refused.

    Args:
        fresh: the section's dataclass, with nothing set.
    """
    from hpc_trainer.config.compose.composer import override_value

    for each in dataclasses.fields(fresh):
        value = getattr(fresh, each.name)
        yield f"{section}.{each.name}={override_value(value.name if isinstance(value, enum.Enum) else value)}"
