"""The one task of a node with `hardware.launcher=torchrun`: torch.distributed.run starts and watches the node's ranks.

torchrun never restarts a rank here (--max-restarts=0): a run restarts by a requeue, as with srun. Its own way to end is
to give the ranks 30 s after a SIGTERM, and it does not know SIGUSR2 at all. So torchrun runs in a second thread, where
it installs no handlers, and this process passes each stop signal on. The ranks then agree, save and exit as they do
under srun, however long the site's grace is.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ExitCode
from hpc_trainer.record.files import make_folder, write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import read_json
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.runtime.rank_env import BY_OUR_TORCHRUN, RankEnv
from hpc_trainer.runtime.stop import STOP_SIGNALS, StopFlag
from hpc_trainer.worker.program_start import free_port, wait_for

OPTION = "--torchrun"
_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1  # prctl(2)


def run_agent(config: TrainConfig, paths: RunPaths, env: RankEnv, stop: StopFlag, ranks: int) -> int:
    """Start the ranks of this node, wait for their end, and return the exit code of the first one that failed.

    Args:
        config: configuration of the run.
        paths: paths of the run.
        env: place of this task among the tasks of the job, one a node.
        stop: flag of this process.
        ranks: number of ranks of each node.
    """
    make_folder(paths.folder)
    place = _meeting_place(config, paths, env)
    os.environ[BY_OUR_TORCHRUN] = "1"
    # Else torchrun sets 1 for several ranks. It is the number of threads that each rank sets for itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.hardware.cpus_per_rank))
    result: list[int] = []
    arguments = [*_options(env, place, ranks), *rank_command(sys.executable, sys.orig_argv)]
    thread = threading.Thread(target=lambda: result.append(_launch(arguments)), name="torchrun", daemon=True)
    passing_on = _PassingOn(stop)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        passing_on.look()
    return result[0] if result else ExitCode.FAILED


def end_with_agent() -> None:
    """Have this rank killed if its agent dies: torchrun starts it in another session, which some sites do not track."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def rank_command(python: str, command: Sequence[str]) -> list[str]:
    """Return the command of each rank: that of this process, without the option that made it the node's agent."""
    place = len(command) - 1 - list(reversed(command)).index(OPTION)
    return [python, *command[1:place], *command[place + 2 :]]


def _options(env: RankEnv, place: tuple[str, int], ranks: int) -> list[str]:
    address, port = place
    return [
        f"--nnodes={env.num_nodes}", f"--nproc-per-node={ranks}", f"--node-rank={env.rank}",
        "--rdzv-backend=static", f"--master-addr={address}", f"--master-port={port}",
        f"--rdzv-id={env.incarnation}", "--max-restarts=0", "--no-python",
    ]  # fmt: skip


def _launch(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments, and return the exit code."""
    try:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args
        from torch.distributed.run import run as torchrun

        # It warns that it handles no signals in this thread, which is what the thread is for.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
        try:
            torchrun(parse_args(list(arguments)))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            code = int(failure.exitcode)
            print(f"torchrun: rank {failure.local_rank} of this node ended with {code}.", flush=True)
            return code if code >= 0 else 128 - code
    except BaseException:  # SystemExit too, of torchrun's parser: a thread must not end without a code
        traceback.print_exc()
        return ExitCode.FAILED
    return ExitCode.OK


def _meeting_place(config: TrainConfig, paths: RunPaths, env: RankEnv) -> tuple[str, int]:
    """Return address and port at which the agents meet.

    The agent of the first node chooses the port, so that array elements on one node cannot collide, and writes both
    into the run's folder. A stop does not end the wait: only ranks, which come next, can conclude the attempt.

    Raises:
        RankEnvError: the first node's agent did not start within `parallel.timeout_s` seconds.
    """
    if env.rank != 0:
        timeout_s = config.parallel.timeout_s
        place = wait_for(lambda: _place_of_first(paths, env), timeout_s, env, lambda: False, lambda: "node 0")
        assert place is not None
        return place
    address = config.cluster.master_addr or (_LOOPBACK if env.num_nodes == 1 else socket.gethostname())
    with free_port() as port:
        pass  # nobody else gets it for a minute
    if env.num_nodes > 1:
        record = {"address": address, "port": port, "incarnation": env.incarnation}
        write_json(paths.agents, record, sync=False)
    return address, port


def _place_of_first(paths: RunPaths, env: RankEnv) -> tuple[str, int] | None:
    with contextlib.suppress(OSError):
        look_anew(paths.agents.parent, parents=0)
    record = read_json(paths.agents) or {}
    return (str(record["address"]), int(record["port"])) if record.get("incarnation") == env.incarnation else None


class _PassingOn:
    """Stop signals of this process; each is passed on to a rank once the rank has a handler, or the rank would die."""

    def __init__(self, stop: StopFlag) -> None:
        self._came: list[int] = [number for number in STOP_SIGNALS if number.name == stop.signal_name]
        self._sent: set[tuple[int, int]] = set()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._came.append(number)

    def look(self) -> None:
        """Pass on the signals that came."""
        import psutil

        for number in dict.fromkeys(self._came):
            for child in psutil.Process().children():
                if (number, child.pid) not in self._sent and _handles(child.pid, number):
                    self._sent.add((number, child.pid))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, number)


def _handles(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal, or holds the signal back until it has one."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, mask = line.partition(":")
            if name in ("SigBlk", "SigCgt") and int(mask, 16) >> (number - 1) & 1:
                return True
    return False
