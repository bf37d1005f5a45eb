"""What the verbs of a grid are given on the command line. Imports nothing heavy before it is used."""

from __future__ import annotations

import dataclasses
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

    def freeze(self, *forced: str) -> Grid:
        """The grid of the overrides, and of those that a verb forces."""
        from hpc_trainer.launch.freeze import freeze_grid
        from hpc_trainer.launch.hydra_app import freeze_app, read_app

        words = [*(self.overrides or ()), *forced]
        if self.app is not None:
            return freeze_app(read_app(self.app), words, **self.places)
        return freeze_grid(words, **self.places)

    @property
    def places(self) -> dict[str, list[Any]]:
        """Where configuration and code may come from: what `freeze_grid` takes besides overrides."""
        return {"config_dirs": self.config_dirs or [], "trust": self.trust or []}

    def here(self, verb: str, without: tuple[str, ...] = ()) -> Given:
        """The same on this machine, less the overrides that begin so."""
        from hpc_trainer.config.compose.composer import overrides_for_here

        local = overrides_for_here(self.overrides or (), verb)
        return dataclasses.replace(self, overrides=[each for each in local if not each.startswith(without)])


def only_point(grid: Grid, takes: str, use: str) -> RunSpec:
    """The one point of a grid. Raises ConfigError if there are more, with what to use instead."""
    if len(grid.specs) != 1:
        raise ConfigError(f"{takes} one configuration, and this is a grid of {len(grid.specs)}. {use}")
    return grid.specs[0]
