"""Command-line input of the commands that take a grid. No slow imports before they are needed."""

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
    from hpc_trainer.record.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Given:
    """Overrides and folders of the command line; None if they were not given."""

    overrides: list[str] | None
    config_dirs: list[Path] | None
    trust: list[str] | None
    app: str | None = None
    """Hydra app and its arguments as a shell command (`--app`)."""

    @classmethod
    def of_grid(
        cls, overrides: list[str] | None, command: str | None, app: str | None, config_dirs: list[Path] | None,
        trust: list[str] | None,
    ) -> Given:  # fmt: skip
        """Return the input of a grid; `--command` or `--app` name the user's own program instead of a training."""
        if command is None:
            return cls(overrides, config_dirs, trust, app)
        if app is not None:
            raise ConfigError("--command and --app are two programs for one run. Keep one.")
        from hpc_trainer.config.compose.overrides import override_value

        # ${NAME} belongs to the program; OmegaConf must not resolve it.
        kept = override_value(command.replace("${", "\\${"))
        return cls([*(overrides or ()), f"train.command={kept}"], config_dirs, trust)

    @property
    def places(self) -> dict[str, list[Any]]:
        """Allowed sources of configuration and code: the arguments of `freeze_grid` besides overrides."""
        return {"config_dirs": self.config_dirs or [], "trust": self.trust or []}

    def here(self, verb: str, without: tuple[str, ...] = ()) -> Given:
        """Return the input for this machine, without the overrides that begin with one of `without`."""
        from hpc_trainer.config.compose.overrides import overrides_for_here

        local = overrides_for_here(self.overrides or (), verb)
        return dataclasses.replace(self, overrides=[override for override in local if not override.startswith(without)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Choice of the grid's runs to submit, and of their starting points."""

    retry_failed: bool
    fresh: bool
    extend: bool

    def of(self, grid: Grid) -> Grid:
        """Return the grid; with `extend`, its runs start from the ends of shorter runs."""
        if not self.extend:
            return grid
        from hpc_trainer.launch.extend import extend_grid

        return extend_grid(grid)


def resolve_runs_dir(option: Path | None) -> Path:
    """Return the folder of --runs-dir, else the configured folder."""
    from hpc_trainer.operate.find import configured_runs_dir

    return configured_runs_dir(option)


def one_sweep(positional: str | None, option: str | None) -> str | None:
    """Return the sweep of a command that takes its name as an argument or as --sweep; None if neither is given.

    Raises:
        ConfigError: both are given, and differ.
    """
    if positional is not None and option is not None and positional != option:
        raise ConfigError(
            f"{positional} and --sweep {option} are two sweeps, and this takes one. Leave one of them out."
        )
    return positional if option is None else option


def tell_notes(notes: Sequence[str]) -> None:
    """Print notes on standard error."""
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)


def only_point(grid: Grid, takes: str, use: str) -> RunSpec:
    """Return the single point of a grid.

    Args:
        grid: the grid.
        takes: the start of the message, as `train runs`.
        use: the message's last sentence: what to use instead.

    Raises:
        ConfigError: the grid has another number of points than one.
    """
    if len(grid.specs) != 1:
        raise ConfigError(f"{takes} one configuration, and this is a grid of {len(grid.specs)}. {use}")
    return grid.specs[0]


def at_defaults(section: str, fresh: Any) -> Iterator[str]:
    """Yield overrides that reset a section that a command does not use: choices there would be refused as useless.

    Args:
        section: the section.
        fresh: the section's dataclass with its defaults.
    """
    from hpc_trainer.config.compose.overrides import override_value

    for field in dataclasses.fields(fresh):
        value = getattr(fresh, field.name)
        yield f"{section}.{field.name}={override_value(value.name if isinstance(value, enum.Enum) else value)}"
