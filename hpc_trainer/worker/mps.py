"""NVIDIA's Multi-Process Service (MPS) in a slot of a pool whose runs share GPUs (`pool.per_gpu`, `pool.mps`).

Without the service the driver lets the processes on a GPU take turns; with it their kernels run at the same time. A
slot starts the service's control daemon for its own job, with its own folder of pipes, and gives the variables that
name the folder to its runs. A small shell process, the keeper, ends the daemon when the slot and its runs have ended:
it reads from a pipe that only they hold open, so it also learns of a slot that was killed.

CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is never set: it changes the number of multiprocessors that kernel libraries see, and
so perhaps the bits of results. No torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.config.schema.cluster import Mps
from hpc_trainer.errors import ConfigError, HpcTrainerError

CONTROL = "nvidia-cuda-mps-control"
"""NVIDIA's program that is the control daemon (`-d`), and that sends commands to it (read from its input)."""
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Always on the node's own disk or memory, and short: the path of a socket has at most 107 characters.
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  (a private folder is made there)
_COMMAND_S, _SERVER_S, _STOP_S = 30.0, 20.0, 40.0
# Slurm sends stop signals to every process of the job, but the runs need the service until they have saved.
_DEAF = 'trap "" HUP INT TERM USR1 USR2'
_START = f'{_DEAF}; exec "$0" -d'
_KEEP = f'{_DEAF}; cat > /dev/null; echo quit | timeout -k 5 30 "$0" > /dev/null 2>&1; rm -rf "$1"'


class NoServiceError(HpcTrainerError):
    """The node has no MPS, or the service does not start."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """The service of one slot at work.

    Attributes:
        variables: variables by which the runs find the service.
        names: name of each of the slot's GPUs -> its name for the runs (CUDA_VISIBLE_DEVICES).
    """

    variables: Mapping[str, str]
    names: Mapping[str, str]
    keeper: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End the daemon, now that no run uses it, and remove its folder."""
        assert self.keeper.stdin is not None
        with contextlib.suppress(OSError):
            self.keeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.keeper.wait(_STOP_S)


def start_service(mode: Mps, gpus: Sequence[str]) -> Service | None:
    """Start the service for the GPUs of a slot; None if it starts none.

    A site may have started a daemon of its own for the job: then CUDA_MPS_PIPE_DIRECTORY is set, and the runs use it.

    Args:
        mode: value of `pool.mps`.
        gpus: the slot's GPUs, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ConfigError: `pool.mps=on`, and there is no service.
    """
    if mode is Mps.off or PIPES in os.environ:
        return None
    try:
        return _start(gpus)
    except (NoServiceError, OSError) as error:
        if mode is Mps.on:
            raise ConfigError(
                f"pool.mps=on: {os.uname().nodename} cannot give its runs NVIDIA's Multi-Process Service: {error}. Use "
                "pool.mps=auto, with which they take turns on the GPU there, or nodes that have it."
            ) from error
        print(f"runs take turns on their GPU, without NVIDIA's Multi-Process Service: {error}.", flush=True)
        return None


def _start(gpus: Sequence[str]) -> Service:
    program = shutil.which(CONTROL)
    if program is None:
        raise NoServiceError(f"there is no {CONTROL} on PATH")
    names = _names(gpus)
    folder = _private_folder()
    pipes, logs = folder / "pipe", folder / "log"
    pipes.mkdir(mode=0o700)
    logs.mkdir(mode=0o700)
    variables = {PIPES: str(pipes), LOGS: str(logs)}
    # The runs see the GPUs of the daemon: without this list it would take all GPUs of the node.
    environ = {**os.environ, **variables, _VISIBLE: ",".join(names.values())}
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEP, program, str(folder)], stdin=subprocess.PIPE, env=environ, start_new_session=True
    )
    service = Service(variables=variables, names=names, keeper=keeper)
    try:
        _start_daemon(program, folder, environ)
        _await_server(program, environ)
    except BaseException:
        service.stop()
        raise
    print(f"runs share GPU {environ[_VISIBLE]} by NVIDIA's Multi-Process Service ({pipes}).", flush=True)
    return service


def _private_folder() -> Path:
    """Return a new folder of this node with mode 700.

    Raises:
        NoServiceError: no folder of the node can be written.
    """
    reasons = []
    for place in _PLACES:
        try:
            return Path(tempfile.mkdtemp(prefix="mps-", dir=place))
        except OSError as error:  # noqa: PERF203  (another place may do)
            reasons.append(str(error))
    raise NoServiceError(f"no folder for its pipes: {'; '.join(reasons)}")


def _start_daemon(program: str, folder: Path, environ: Mapping[str, str]) -> None:
    # Not pipes: a daemon that kept them open would never let their reader end.
    output = folder / "output"
    with output.open("wb") as file:
        try:
            code = subprocess.run(
                ["/bin/sh", "-c", _START, program], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ,
                start_new_session=True, check=False, timeout=_COMMAND_S,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NoServiceError(f"{CONTROL} -d did not return within {_COMMAND_S:.0f} s") from error
    if code:
        said = output.read_text(errors="replace").strip().splitlines()
        raise NoServiceError(f"{CONTROL} -d ended with exit code {code}{f' ({said[-1][:200]})' if said else ''}")


def _await_server(program: str, environ: Mapping[str, str]) -> None:
    """Start the server, and wait until the daemon lists it: with a daemon alone, each run would fail.

    Raises:
        NoServiceError: there is none after `_SERVER_S`.
    """
    _ask(program, f"start_server -uid {os.getuid()}", environ)
    deadline = time.monotonic() + _SERVER_S
    while not any(line.strip().isdecimal() for line in _ask(program, "get_server_list", environ).splitlines()):
        if time.monotonic() > deadline:
            raise NoServiceError(f"its server did not start within {_SERVER_S:.0f} s (for the reason, run it by hand)")
        time.sleep(0.2)


def _ask(program: str, command: str, environ: Mapping[str, str]) -> str:
    """Return the daemon's answer to a command.

    Raises:
        NoServiceError: the daemon did not take the command.
    """
    try:
        done = subprocess.run(
            [program], input=f"{command}\n", capture_output=True, text=True, errors="replace", env=dict(environ),
            check=False, timeout=_COMMAND_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NoServiceError(f"its daemon did not answer `{command}` within {_COMMAND_S:.0f} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[:200]
        raise NoServiceError(f"its daemon did not take `{command}`: {said or f'exit code {done.returncode}'}")
    return done.stdout


def _names(gpus: Sequence[str]) -> dict[str, str]:
    """Return name -> name under the service of each GPU.

    The service numbers the GPUs that its daemon sees from 0 anew. So a number stays right only if the slot has the
    first GPUs; else NVIDIA advises UUIDs, which nvidia-smi knows.

    Raises:
        NoServiceError: the UUID of a GPU is not known.
    """
    unique = list(dict.fromkeys(gpus))
    numbers = [str(index) for index in range(len(unique))]
    if sorted(unique) == sorted(numbers) or not any(name.isdecimal() for name in unique):
        return {name: name for name in unique}
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMMAND_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoServiceError(f"the UUIDs of GPUs {', '.join(unique)} are not known: {error}") from error
    pairs = (line.partition(",") for line in told.splitlines())
    uuids = {index.strip(): uuid.strip() for index, _, uuid in pairs}
    missing = [name for name in unique if name.isdecimal() and not uuids.get(name)]
    if missing:
        raise NoServiceError(f"nvidia-smi knows no UUID of GPU {', '.join(missing)}")
    return {name: uuids.get(name, name) for name in unique}
