"""The checkpoint that a run begins from: its own newest one, else that of `checkpoint.resume_from`."""

from __future__ import annotations

from pathlib import Path

from hpc_trainer.errors import CheckpointError, ConfigError
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint import folders
from hpc_trainer.training.checkpoint.store import CheckpointInfo, CheckpointStore


def find_start(
    own: CheckpointStore, resume_from: str | None, run_id: str, num_steps: int, group: RankGroup
) -> tuple[CheckpointStore, CheckpointInfo | None]:
    """The store to load from and the checkpoint in it, or None for a fresh start. Collective.

    Another run's folder is only read: nothing in it is renamed or deleted, also if it is damaged.

    Raises:
        CheckpointError: the run's own checkpoint was saved by another run, or `resume_from` has no valid one.
        ConfigError: `num_steps` leaves nothing to do after the checkpoint of `resume_from`.
        UntrustedFileError: another user owns a file, or others may write it.
    """
    newest = own.newest_valid()
    if newest is not None:
        _check_owner(newest, run_id)
    if newest is not None or resume_from is None:
        return own, newest
    store, step = _open(Path(resume_from), group)
    found = store.newest_valid(only=step)
    if found is None:
        raise CheckpointError(
            f"checkpoint.resume_from={resume_from} holds no valid checkpoint (any more). Name another, or leave it out "
            "to begin at step 0."
        )
    if found.step >= num_steps:
        raise ConfigError(
            f"train.num_steps={num_steps} must be more than {found.step}, the step at which "
            f"checkpoint.resume_from={resume_from} begins: it counts all steps from 0. Use {2 * found.step}, say."
        )
    return store, found


def _open(path: Path, group: RankGroup) -> tuple[CheckpointStore, int | None]:
    """The store at `path` and the one step in it that is meant; None: the newest."""
    step = folders.step_of(path)
    folder = path / "checkpoints" if step is None else path.parent
    return CheckpointStore(folder, group=group, keep_last=1, attempt=0, read_only=True), step


def _check_owner(checkpoint: CheckpointInfo, run_id: str) -> None:
    saved_by = checkpoint.meta.get("run_id", run_id)
    if saved_by != run_id:
        raise CheckpointError(
            f"{checkpoint.path} was saved by {saved_by}, and this run is {run_id}: another configuration. "
            "Remove it from this run's folder, or start anew with --fresh. To begin another run from it: "
            "checkpoint.resume_from."
        )
