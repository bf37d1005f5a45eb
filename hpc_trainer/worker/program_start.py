"""Start of a user's program (`train.command`): its command line, environment and processes. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import select
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.program import (
    OWN_CHECKPOINTS,
    PYTHON,
    code_folder,
    fill,
    is_of_run,
    is_one_a_node,
    place_of_text,
    resume_files,
    resumed,
    runs_of,
    script_files,
    values_of,
)
from hpc_trainer.config.schema.train import CommandEnv, LoopConfig, TrainConfig
from hpc_trainer.errors import ConfigError, RankEnvError
from hpc_trainer.record.chain import read_decision
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.metrics import VARIABLE
from hpc_trainer.record.processes import open_pidfd
from hpc_trainer.record.reading import names_in, read_json
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.runtime.rank_env import TORCHRUN_NAMES, RankEnv
from hpc_trainer.runtime.start import FROZEN_CODE

_LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # prctl(2)
_SLOWEST_LOOK_S = 1.0

T = TypeVar("T")


class Place(NamedTuple):
    """Address at which the programs of all ranks meet, and their files to resume from; rank 0 decides both."""

    address: str
    port: int
    """Port on rank 0's node; it was free when rank 0 chose it."""
    holding: frozenset[str] = frozenset()
    """Files named by `{run.resume[FILE]:..}` that are not empty (`config/program.py`)."""
    workers: tuple[str, ...] = ()
    """ADDRESS:PORT of each rank's program, in the order of the ranks; empty unless `train.command_env=tensorflow`."""


def words_of(
    config: TrainConfig, paths: RunPaths, environ: Mapping[str, str] = os.environ, holding: Container[str] = (),
) -> list[str]:  # fmt: skip
    """Return the arguments of the run's command, with every placeholder filled in.

    If the code was frozen, the user's scripts are the frozen copies, also in the text of `sh -c`. `python -m` then
    finds modules in the frozen code too, and not in the folder that the program starts in.

    Args:
        holding: files of `{run.resume[FILE]:..}` that are not empty.
    """
    value_of = _value_of(config, paths)
    raw = shlex.split(resumed(config.train.command or "", lambda name: name in holding))
    scripts, text = set(script_files(raw)), place_of_text(raw)
    code = _Code(config.train, json.loads(environ.get(FROZEN_CODE, "{}")))
    arguments = [
        fill(code.in_shell(word), value_of) if place == text
        else code.file(word) if word in scripts else fill(word, value_of)
        for place, word in enumerate(raw)
    ]  # fmt: skip
    if code.is_safe:
        for place, (word, after) in enumerate(itertools.pairwise(arguments)):
            if after == "-m" and PYTHON.fullmatch(Path(word).name):
                arguments.insert(place + 1, "-P")
                break
    return arguments


def _places(paths: RunPaths) -> dict[str, str]:
    followed: Mapping[str, str] = read_decision(paths).get("places") or {}
    return {
        "run.id": paths.run_id, "run.dir": str(paths.output), "run.checkpoints": str(paths.own_checkpoints),
        **followed,
    }  # fmt: skip


def _value_of(config: TrainConfig, paths: RunPaths) -> Callable[[str], str]:
    """Return a function that maps a placeholder to its value.

    The configuration is made plain only for a placeholder that needs it, because that takes a tenth of a program's
    start.
    """
    places = _places(paths)
    plain = functools.cache(lambda: to_plain(config))
    return lambda name: values_of({} if name in places else plain(), places)(name)


def folder_of(config: TrainConfig, paths: RunPaths) -> str:
    """Return the folder that the program starts in, with its placeholders filled in."""
    return fill(config.train.command_dir or os.curdir, _value_of(config, paths))


def files_that_hold(config: TrainConfig, paths: RunPaths) -> frozenset[str]:
    """Return the files of `{run.resume..}` in the command that are not empty; a folder counts if it has a file."""
    value_of = _value_of(config, paths)
    return frozenset(
        name for name in resume_files(config.train.command or "")
        if _holds_something(paths.own_checkpoints if name == OWN_CHECKPOINTS else paths.output / fill(name, value_of))
    )  # fmt: skip


def _holds_something(path: Path) -> bool:
    try:
        info = path.stat()
        return any(path.iterdir()) if stat.S_ISDIR(info.st_mode) else info.st_size > 0
    except OSError:
        return False


class _Code:
    """Location of the scripts of a command: in the frozen code, if the code is frozen."""

    def __init__(self, train: LoopConfig, copies: Mapping[str, str]) -> None:
        self._folder, self._copies = code_folder(train), copies
        self._is_elsewhere = is_of_run(train.command_dir)
        # Python 3.10 has no -P: with -m the current folder comes first there
        self.is_safe = bool(copies) and sys.version_info >= (3, 11)

    def file(self, word: str) -> str:
        """Return the path of a script that a command names."""
        path = os.path.normpath(Path(self._folder, word))
        for real in (path, os.path.realpath(path)):
            for source, copy in self._copies.items():
                if real.startswith(f"{source}{os.sep}"):
                    candidate = Path(copy, os.path.relpath(real, source))
                    if candidate.is_file():
                        return str(candidate)
        return path if self._is_elsewhere and Path(path).is_file() else word

    def in_shell(self, text: str) -> str:
        """Return the text of `sh -c` with the paths of its scripts, in which braces are doubled as in placeholders."""
        runs = runs_of(text)
        changes = [(end, end, " -P") for end in runs.pythons if self.is_safe]
        for begin, end, word in runs.scripts:
            path = self.file(word)
            if path != word:
                changes.append((begin, end, shlex.quote(path).replace("{", "{{").replace("}", "}}")))
        for begin, end, new in sorted(changes, reverse=True):
            text = text[:begin] + new + text[end:]
        return text


def one_line(arguments: Sequence[str]) -> str:
    """Return the arguments as one line for a shell; line breaks in a value are escaped."""
    return r"\n".join(shlex.join(arguments).splitlines())


def environment_of(config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, place: Place) -> dict[str, str]:
    """Return the environment of the program (docs/any_program.md).

    Returns:
        All variables of this process and those of the run. A program of one rank gets none of torchrun's variables,
        unless `train.command_env=torchrun` or `cluster.env` sets them.
    """
    address, port = place.address, place.port
    own = {
        "HPC_TRAINER_RUN_ID": paths.run_id,
        "HPC_TRAINER_RUN_DIR": str(paths.output),
        "HPC_TRAINER_CHECKPOINTS": str(paths.own_checkpoints),
        "HPC_TRAINER_ATTEMPT": str(attempt),
        VARIABLE: str(paths.logged_metrics(attempt)),
    }
    left_out: set[str] = set()
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if is_one_a_node(config):
        # Defaults for options of torchrun, so that a bare `torchrun train.py` is right on any hardware profile.
        ranks = config.hardware.ranks_per_node
        own |= meeting | {
            "NODE_RANK": str(env.node_rank),
            "PET_NODE_RANK": str(env.node_rank),
            "PET_NNODES": str(env.num_nodes),
        }
        own |= {"PET_NPROC_PER_NODE": str(ranks), "PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(port)}
    elif env.world_size == 1 and config.train.command_env is not CommandEnv.torchrun:
        # Many programs take `"RANK" in os.environ` to mean that there are several ranks.
        left_out = {*TORCHRUN_NAMES, "NODE_RANK"} - set(config.cluster.env)
    else:
        own |= meeting | {
            "RANK": str(env.rank), "LOCAL_RANK": str(env.local_rank), "WORLD_SIZE": str(env.world_size),
            "LOCAL_WORLD_SIZE": str(env.local_world_size), "GROUP_RANK": str(env.node_rank),
            "NODE_RANK": str(env.node_rank),
        }  # fmt: skip
    if config.train.command_env is CommandEnv.tensorflow:
        task = {"type": "worker", "index": env.rank}
        own["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(place.workers)}, "task": task})
    inherited = {key: value for key, value in os.environ.items() if key not in {FROZEN_CODE, *left_out}}
    # `python`, `torchrun`, `accelerate` are those beside the Python that runs us: cluster.python, or the submit's own.
    path = [str(Path(sys.executable).parent), *inherited.get("PATH", os.defpath).split(os.pathsep)]
    if is_of_run(config.train.command_dir) and FROZEN_CODE not in os.environ:
        # As with frozen code: `python -m` finds modules as if the code folder were the current folder.
        given = inherited.get("PYTHONPATH", "").split(os.pathsep)
        own["PYTHONPATH"] = os.pathsep.join([code_folder(config.train), *filter(None, given)])
    return {
        "PYTHONUNBUFFERED": "1",  # else the last lines of a program that is killed are lost
        "HYDRA_FULL_ERROR": "1",  # else Hydra leaves out the error that caused an error
        **inherited,
        "PATH": os.pathsep.join(dict.fromkeys(path)),
        **own,
    }


def meeting_place(
    config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, should_stop: Callable[[], bool]
) -> Place | None:
    """Return the place where the programs of all ranks meet; None if a stop came first.

    Rank 0 chooses the place and writes it to a file. Rank 0 also decides whether there is a checkpoint to resume from:
    ranks that start later could already see a new one.

    Raises:
        RankEnvError: rank 0, or with `train.command_env=tensorflow` any other rank, did not start within
            `parallel.timeout_s` seconds.
    """
    of_tensorflow = config.train.command_env is CommandEnv.tensorflow
    address = _LOOPBACK if env.num_nodes == 1 else socket.gethostname()
    with free_port() as port:
        if env.rank == 0:
            address = config.cluster.master_addr or address
            others = _other_workers(config, paths, env, attempt, should_stop) if of_tensorflow else ()
            if others is None:
                return None
            workers = (_worker(address, port), *others) if of_tensorflow else ()
            place = Place(address, port, files_that_hold(config, paths), workers)
            if env.world_size > 1:
                record = {**place._asdict(), "holding": sorted(place.holding), "incarnation": env.incarnation}
                write_json(paths.rendezvous, record, sync=False)
            return place
        if of_tensorflow:
            own = {"worker": _worker(address, port), "incarnation": env.incarnation}
            write_json(paths.program_worker(attempt, env.rank), own, sync=False)
        # Rank 0 itself waits for the slowest rank, and only rank 0 can name that rank in its error.
        timeout_s = config.parallel.timeout_s * (2 if of_tensorflow else 1)
        return wait_for(lambda: _place_of_rank_0(paths, env), timeout_s, env, should_stop, lambda: "rank 0")


def _place_of_rank_0(paths: RunPaths, env: RankEnv) -> Place | None:
    with contextlib.suppress(OSError):
        look_anew(paths.rendezvous.parent, parents=0)
    record = read_json(paths.rendezvous) or {}
    if record.get("incarnation") != env.incarnation:
        return None
    holding, workers = (map(str, record.get(name) or ()) for name in ("holding", "workers"))
    return Place(str(record["address"]), int(record["port"]), frozenset(holding), tuple(workers))


def _other_workers(
    config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, should_stop: Callable[[], bool]
) -> list[str] | None:
    """Return where the program of every other rank will listen, in the order of ranks; None if a stop came first."""
    workers: dict[int, str] = {}

    def missing() -> list[int]:
        return [rank for rank in range(1, env.world_size) if rank not in workers]

    def complete() -> list[str] | None:
        present = set(names_in(paths.logs) or ())
        for rank in missing():
            path = paths.program_worker(attempt, rank)
            record = (read_json(path) or {}) if path.name in present else {}
            if record.get("incarnation") == env.incarnation:
                workers[rank] = str(record["worker"])
        return None if missing() else [workers[rank] for rank in range(1, env.world_size)]

    def named() -> str:
        return f"{'rank' if len(missing()) == 1 else 'ranks'} {', '.join(map(str, missing()))}"

    return wait_for(complete, config.parallel.timeout_s, env, should_stop, named)


def wait_for(
    look: Callable[[], T | None],
    timeout_s: float,
    env: RankEnv,
    should_stop: Callable[[], bool],
    awaited: Callable[[], str],
) -> T | None:
    """Call `look` until it returns a value, and return that value; None if a stop came first.

    Raises:
        RankEnvError: `timeout_s` seconds have passed.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.1
    while (value := look()) is None:
        if should_stop():
            return None
        if time.monotonic() > deadline:
            raise RankEnvError(
                f"rank {env.rank} waited {timeout_s} s for {awaited()} in vain (parallel.timeout_s): not started, or "
                "on a node that does not see the folder of runs."
            )
        time.sleep(pause_s)
        # Hundreds of waiting ranks must not send the file server thousands of requests a second.
        pause_s = min(1.5 * pause_s, _SLOWEST_LOOK_S)
    return value


def _worker(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address and not address.startswith("[") else f"{address}:{port}"


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Hold a free port during a `with` block, and keep it reserved for the program for a minute afterwards.

    A connection over the port is made and closed, which leaves the port in TIME_WAIT. The kernel then gives it only to
    a process that asks for this port with SO_REUSEADDR, as servers do. Without the reservation, two programs that start
    at the same moment would sometimes get the same port.
    """
    with socket.socket() as server:
        server.bind(("", 0))
        port: int = server.getsockname()[1]
        yield port
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.listen()
        with socket.create_connection((_LOOPBACK, port)) as client:
            server.accept()[0].close()  # the side that closes first enters TIME_WAIT
            client.recv(1)


class Program:
    """The program and all processes that it starts, as one process group.

    A signal reaches the whole group, and the program has ended when the group has. If this process dies, the program
    gets SIGTERM, because no process would be left to restart or stop it.
    """

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], folder: str | None) -> None:
        """Start the program. Raises ConfigError if it does not exist or cannot be started."""
        libc = ctypes.CDLL(None)

        def in_own_group() -> None:
            os.setpgid(0, 0)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self.arguments = list(arguments)
        try:
            self._process = subprocess.Popen(
                arguments, env=environ, cwd=folder, stdin=subprocess.DEVNULL,
                preexec_fn=in_own_group,  # noqa: PLW1509  (no other thread runs yet)
            )  # fmt: skip
        except OSError as error:
            advice = (
                f"It is looked for in PATH={environ['PATH']}. Name it by its whole path, or put it on PATH by "
                "cluster.setup or cluster.env."
            )
            if "/" in arguments[0]:
                advice = "It must be there on the node, executable (chmod +x FILE), and a script begins with #!."
            why = error.strerror or str(error)
            raise ConfigError(
                f"train.command: {arguments[0]} cannot be started in {folder}: {why}. {advice}"
            ) from error
        # subprocess itself looks again and again, up to 50 ms after the end.
        self._pidfd = open_pidfd(self._process.pid)

    @property
    def code(self) -> int | None:
        """Exit code of the program itself, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, most_s: float) -> None:
        """Wait until the program has ended, or `most_s` seconds; all of them if only other processes of it are left."""
        if self.code is not None:
            if self.is_alive():
                time.sleep(most_s)
            return
        if self._pidfd >= 0:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            ended.poll(1000 * most_s)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(most_s)

    def is_alive(self) -> bool:
        """Return True while the program, or a process of its group, runs."""
        if self._process.poll() is None:
            return True
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return _has_living(self._process.pid)

    def send(self, number: int) -> None:
        """Send a signal to all processes of the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _has_living(group: int) -> bool:
    """Return True if a process of the group is not a zombie; in a container orphaned zombies may never be reaped."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, _, its_group, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False
