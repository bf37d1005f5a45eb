"""Stop that cannot reach the end of a step (a data wait, a compilation): the run leaves without a save."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable

from hpc_trainer.errors import SlurmError
from hpc_trainer.runtime.pace import job_end_time, last_moment
from hpc_trainer.slurm.jobs import show_job
from hpc_trainer.slurm.preemption import DEFAULT_KILL_WAIT_S, show_preemption
from hpc_trainer.slurm.states import AT_WORK
from hpc_trainer.worker.conclude import Stop, conclude_start

# After this many seconds of silence in a step or a batch, Slurm is asked, once, for the time when it ends the job.
_SILENT_S = 8.0


class LateStop:
    """End of this rank shortly before Slurm kills it, if it was asked to stop and has shown no sign of life since.

    Work since the last checkpoint is lost. The run itself is brought back, and its end has a cause in the journal. All
    ranks are silent then, because those that are not stuck wait for the one that is: each of them leaves by itself.
    This works only on Slurm: nothing else kills at a known time.

    Args:
        saved_step: returns the step that is saved by now.
        leave: ends work of this rank outside this process, before the run is brought back.
    """

    def __init__(
        self, stop: Stop, saved_step: Callable[[], int | None], leave: Callable[[], None] = lambda: None
    ) -> None:
        self._stop, self._saved_step, self._leave = stop, saved_step, leave
        self._is_on_slurm = stop.env.job_id[:1].isdecimal()
        self._last_moment: float | None = None
        self._has_asked = False

    def look(self, silent_s: float) -> None:
        """Leave if it is time, and then do not return. For the watchdog's thread."""
        flag = self._stop.flag
        flag.look()
        if not self._is_on_slurm or flag.time is None or min(silent_s, flag.age_s) < _SILENT_S:
            return
        if not self._has_asked:
            self._has_asked, self._last_moment = True, self._ask(flag.time)
        if self._last_moment is None or time.time() < self._last_moment:
            return
        self._leave()
        saved_step = self._saved_step()
        kept = "no checkpoint" if saved_step is None else f"the checkpoint of step {saved_step}"
        print(
            f"no end of a step for {flag.age_s:.0f} s after {flag.signal_name}, and Slurm ends this job soon: "
            f"it leaves with {kept}."
        )
        code = 1
        try:
            code = conclude_start(dataclasses.replace(self._stop, saved_step=saved_step))
            sys.stdout.flush()
        finally:
            os._exit(int(code))

    def _ask(self, signal_time: float) -> float | None:
        end_time = job_end_time(self._stop.config.hardware.time_limit_min)
        try:
            job = show_job(self._stop.env.job_id)
            preemption = show_preemption(job.partition)
        except SlurmError as error:
            print(f"Slurm did not say when it ends this job: {error}")
            return last_moment(
                signal_time=signal_time, end_time=end_time, is_at_work=True, kill_wait_s=DEFAULT_KILL_WAIT_S
            )
        return last_moment(
            signal_time=signal_time,
            end_time=end_time if job.end_time is None else job.end_time,
            is_at_work=job.state in AT_WORK,
            preempt_time=job.preempt_time,
            grace_s=0.0 if preemption is None else preemption.grace_s,
            kill_wait_s=DEFAULT_KILL_WAIT_S if preemption is None else preemption.kill_wait_s,
        )
