"""Hardware profiles as their files have them: names, figures and sources, read without Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.completion import choices_in, conf_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One file of `hardware/`."""

    name: str
    """Name as a user types it: `hardware=NAME`."""
    path: Path
    values: dict[str, Any]
    """Keys of the file, with those of the files that its defaults list names."""


def profile_names(config_dirs: Sequence[Path] = ()) -> list[str]:
    """Return the names of all profiles, sorted."""
    return choices_in("hardware", [conf_dir(), *config_dirs])
