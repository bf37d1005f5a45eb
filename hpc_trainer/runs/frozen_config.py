"""Configuration of a frozen run, parsed only on demand: a command uses few of 10,000 lines of specs.jsonl."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.errors import RunStateError
from hpc_trainer.runs.reading import parse_record


class LateConfig(Mapping[str, Any]):
    """Configuration in a line with a valid checksum, parsed at the first access.

    10,000 parsed configurations would take 190 MB and 1.1 s; their lines in the file take nothing.
    """

    __slots__ = ("_found", "_offset", "_path", "_size")

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._path, self._offset, self._size = path, offset, size
        self._found: Mapping[str, Any] | None = None

    def __getitem__(self, key: str) -> Any:
        return self._content()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content())

    def __len__(self) -> int:
        return len(self._content())

    def _content(self) -> Mapping[str, Any]:
        """Return the parsed configuration.

        Raises:
            RunStateError: since the line was read, the file was removed or replaced.
        """
        if self._found is None:
            try:
                with self._path.open("rb") as file:
                    config = parse_record(os.pread(file.fileno(), self._size, self._offset))["config"]
            except (OSError, ValueError, KeyError) as error:
                raise RunStateError(f"{self._path} was changed while it was read ({error}). Try again.") from error
            self._found = dict(config)
        return self._found
