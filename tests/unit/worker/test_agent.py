"""The agent of a node: its ranks' command, and stop signals that reach only ranks that have a handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hpc_trainer.runtime.rank_env import BY_OUR_TORCHRUN, read_rank_env
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker.agent import _handles, _PassingOn, rank_command

_OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "7_0.0.0", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_JOB_ID": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURMD_NODENAME": "n2", "SLURM_RESTART_COUNT": "2",
}  # fmt: skip


def test_a_rank_of_the_agent_is_a_rank_of_its_job() -> None:
    env = read_rank_env({**_OF_TORCHRUN, BY_OUR_TORCHRUN: "1"})
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (3, 1, 4, 2)
    assert (env.launcher, env.job_id, env.incarnation, env.node) == ("slurm", "7_0", "7_0.2.0", "n2")
    assert read_rank_env(_OF_TORCHRUN).launcher == "torchrun"


def test_the_command_of_a_rank_lacks_the_agents_option() -> None:
    words = ["python", "-P", "-u", "/x.zip", "--sweep-dir", "/a b", "--run", "r", "--torchrun", "4"]
    assert rank_command("/env/python", words) == ["/env/python", *words[1:-2]]


_CHILD = """
import signal, sys, time
time.sleep(1.5)
signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(7))
print("ready", flush=True)
time.sleep(20)
"""


def test_a_signal_waits_until_a_rank_has_a_handler() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    child = subprocess.Popen([sys.executable, "-c", _CHILD])
    try:
        passing_on = _PassingOn(StopFlag())
        assert not _handles(child.pid, signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + 20
        while child.poll() is None and time.monotonic() < deadline:
            passing_on.look()
            time.sleep(0.05)
        assert child.returncode == 7
    finally:
        child.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_stop_that_came_before_the_ranks_is_passed_on() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        stop = StopFlag()
        stop.request("SIGUSR2")
        assert _PassingOn(stop)._came == [signal.SIGUSR2]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
