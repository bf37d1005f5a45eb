"""Rank of a process, and the folders of its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hpc_trainer.runs.files import check_trusted
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.tensor_files import FOLDER_MODE


@dataclass(slots=True, kw_only=True)
class RankView:
    """Part of a RunContext that does not change during training."""

    paths: RunPaths
    env: RankEnv
    group: RankGroup

    @property
    def device(self) -> torch.device:
        """Device of this rank's tensors."""
        return self.group.device

    @property
    def rank(self) -> int:
        """Number of this rank, 0 to world_size - 1."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of this run, ≥ 1."""
        return self.group.world_size

    @property
    def is_rank_zero(self) -> bool:
        """True on the one rank that writes metrics and results."""
        return self.group.is_rank_zero

    @property
    def output_dir(self) -> Path:
        """Folder for files that a loop writes by itself, the same in each attempt; it is created at the first access.

        hpc_trainer keeps no file in this folder, and neither reads nor deletes files in it.

        Raises:
            UntrustedFileError: another user owns the folder or may write to it, or it is a symbolic link.
        """
        return _made(self.paths.output)

    @property
    def checkpoint_dir(self) -> Path:
        """Folder in `output_dir` for frameworks that write checkpoints themselves.

        hpc_trainer neither reads nor deletes files in this folder. `save` writes to another folder.

        Raises:
            UntrustedFileError: as for `output_dir`.
        """
        _made(self.paths.output)
        return _made(self.paths.own_checkpoints)


def _made(folder: Path) -> Path:
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    check_trusted(folder)
    return folder
