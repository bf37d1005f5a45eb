"""Request of a rank whose device is too hot or fails that the run leave the node (`monitor.on_overheat=move`).

Rank 0 does the rest once all ranks have saved (`worker/conclude.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hpc_trainer.errors import NoRoomError, SlurmError
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.monitoring.moves import MAX_MOVES, Move, write_move
from hpc_trainer.runs.monitoring.warnings import DeviceWarning
from hpc_trainer.runtime.counters.notes import Notes
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import DEVICE, StopFlag
from hpc_trainer.slurm.jobs import read_script, show_job
from hpc_trainer.slurm.sbatch import estimate_start
from hpc_trainer.state.journal import num_moves

# A node that was drained or busy may be free by then.
_ASK_AGAIN_S = 600.0


class Mover:
    """Requests of one rank in one attempt to leave the node; for the sampler's thread alone."""

    def __init__(
        self, paths: RunPaths, env: RankEnv, attempt: int, flag: StopFlag, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths, self._env, self._attempt, self._flag, self._clock = paths, env, attempt, flag, clock
        self._asked_s: float | None = None
        self._notes = Notes()

    def __call__(self, warning: DeviceWarning) -> None:
        """Ask the run to stop, if it may and can go to another node; else log once why it stays.

        Raises:
            OSError: the request could not be written; the next sample tries again.
        """
        now = self._clock()
        if self._flag.is_set or (self._asked_s is not None and now - self._asked_s < _ASK_AGAIN_S):
            return
        stays = self._stays(warning.node)
        if stays is not None:
            self._asked_s = now
            self._notes.tell(stays, f"{warning.text}. The run goes on here: {stays}")
            return
        write_move(self._paths, self._attempt, Move.of(warning))
        self._notes.tell("move", f"{warning.text}. The run is asked to save, and to leave {warning.node}.")
        self._flag.request(DEVICE)

    def _stays(self, node: str) -> str | None:
        """Return why the run cannot leave this node; None if it can."""
        job_id = self._env.job_id
        if not job_id[:1].isdecimal():
            return "it is no Slurm job, and nobody would give it another node."
        if num_moves(self._paths) >= MAX_MOVES:
            return f"it has left {MAX_MOVES} nodes since it was submitted, and leaves no more."
        without = node
        try:
            without = ",".join(filter(None, (show_job(job_id).excluded, node)))
            # One element: a limit on the number of jobs says nothing against this one.
            estimate_start(read_script(job_id), ["--array=0", f"--exclude={without}"])
        except NoRoomError:  # the job has its place in the queue
            return None
        except SlurmError as error:
            return f"without {without} Slurm would not start it: {error}"
        return None
