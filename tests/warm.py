"""Starts Python programs as forks of a process that has imported torch and whatever else takes long.

A start of Python with torch, Hydra and scikit-learn takes 2 to 4 s of a core, a fork of a process that has them a
fiftieth. `Popen` and `run` are those of subprocess. The program finds what `python ...` would give it: its arguments
(also in /proc, where `hpc-trainer status` looks), environment, folder, descriptors, ignored signals, process group, and
the caller as its parent. Nothing of hpc_trainer is imported before the fork. What it starts itself is forked too.

A start that asks for more than a fork can give (an option of Python, a user, a variable that torch reads when it is
imported) is a real one, and so is every start where the kernel is another than Linux. Tests about starting do not use
this file: what is imported, in which order, and from where. What only real starts differ in is played on a real Slurm:
each rank's own order of sets (forks of one process have one seed of hashes), a module that was never imported.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.metadata
import io
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

_HEAVY = (
    "torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.nn.parallel", "torch.utils.data", "torch.utils.flop_counter",
    "torch.nn.attention", "torch.testing", "safetensors.torch", "sklearn.datasets", "hydra", "omegaconf",
    "submitit.local._local", "submitit.slurm.slurm", "rich.table", "rich.console", "typer", "yaml",
    "psutil", "unittest.mock", "coverage",
)  # fmt: skip
# Programs that start others: each of them gets a parent of its own to fork from.
_STARTERS = ("hpc_trainer", "hpc_trainer.launch.local_queue", "submitit.local._local")
# Read when Python or torch starts, not later; TORCHELASTIC_RUN_ID and its like are.
_READ_AT_START = ("PYTHON", "TORCH", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOMP_", "LD_", "LC_", "LANG")
_READ_LATER = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONWARNINGS",
    "TORCHELASTIC_",
    "OMP_NUM_THREADS",
    # Set by scikit-learn and by torch's compiler when they are imported: in a test's own process too, and without these
    # lines every start of the tests after it would be a real one.
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
)
# A newer optuna than the environment has (hydra-optuna-sweeper needs the old one): first on a search's path.
OPTUNA = Path(str(importlib.metadata.distribution("numpy").locate_file(""))).parents[2] / "optuna5"
_PYTHON = os.path.realpath(sys.executable)  # a test may name another one
_PR_SET_CHILD_SUBREAPER, _PR_SET_MM, _PR_SET_MM_MAP = 36, 35, 14
_COVERAGE = "COVERAGE_PROCESS_CONFIG"
_end_now = os._exit  # coverage's own would save once more
_DONE, _FAILED, _GONE = 0, -1, -2  # what a nursery says after a fork


@dataclass(kw_only=True)
class Program:
    """What a start of Python is told."""

    argv: list[str]
    mode: str = ""
    """`-c`, `-m`, or "" for a file or an archive."""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    is_unbuffered: bool = False
    is_safe: bool = False
    """With -P, or a program that begins itself anew with it (hpc_trainer/runtime/start.py)."""
    environ: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    umask: int = 0o022
    group: int | None = None
    """The process group; None for a session of its own."""
    ignored: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    """The numbers that the handed over descriptors get."""


def _read_command(argv: Sequence[str]) -> Program | None:
    """The command of a Python without options that change how it starts; None for another one."""
    if os.path.realpath(argv[0]) != _PYTHON:
        return None
    program = Program(argv=list(argv))
    for place, word in enumerate(argv[1:], 1):
        if word == "-u":
            program.is_unbuffered = True
        elif word == "-P" and sys.version_info >= (3, 11):
            program.is_safe = True
        elif word in ("-c", "-m"):
            program.is_safe |= word == "-c" and '"-P"' in argv[place + 1]
            program.mode, program.name, program.arguments = word, argv[place + 1], list(argv[place + 2 :])
            return program
        elif word.startswith("-"):
            return None
        else:
            program.name, program.arguments = word, list(argv[place + 1 :])
            return program
    return None


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    named = {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}
    return {name: value for name, value in named.items() if not name.startswith(_READ_LATER)}


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, which forks where it can."""

    def _execute_child(self, args: Any, *others: Any) -> None:  # type: ignore[override]
        _start(self, _COLD, args, *others)


_COLD = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_NAMES = _COLD.__code__.co_varnames[1 : _COLD.__code__.co_argcount]


class _RealPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A real start, also where a test has put `execute_child` into the base: that would wait for this very start."""

    _execute_child = _COLD


def execute_child(process: Any, *values: Any) -> None:
    """In place of `subprocess.Popen._execute_child`, where code under test starts programs."""
    _start(process, _COLD, *values)


def run(argv: Sequence[Any], *, timeout: float | None = None, check: bool = False, **options: Any) -> Any:
    """`subprocess.run` with its output captured."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with Popen(argv, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(argv, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _start(process: Any, cold: Any, *values: Any) -> None:
    given = dict(zip(_NAMES, values, strict=True))
    if (program := _program(given)) is None or (nursery := _nursery()) is None or not nursery.fits(program):
        cold(process, *values)
        return
    pipes = [(given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2)]
    sources = [source if source != -1 else own for source, own in pipes] + sorted(given["pass_fds"])
    program.descriptors = [0, 1, 2, *sorted(given["pass_fds"])]
    process.pid = nursery.fork(program, sources)
    process._child_created = True
    process._close_pipe_fds(
        *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _program(given: Mapping[str, Any]) -> Program | None:
    """The program of `Popen`'s arguments, if a fork can be it."""
    args = given["args"]
    plain = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")
    if isinstance(args, (str, bytes, os.PathLike)) or any(given[name] for name in plain) or not given["close_fds"]:
        return None
    if given["umask"] >= 0 or given.get("process_group", -1) not in (-1, None):
        return None
    program = _read_command([os.fsdecode(word) for word in args])
    if program is None:
        return None
    environ = os.environ if given["env"] is None else given["env"]
    program.environ = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    program.folder = str(Path(os.fsdecode(given["cwd"] or ".")).absolute())
    program.group = None if given["start_new_session"] else os.getpgid(0)
    program.umask = os.umask(0)
    os.umask(program.umask)
    kept = (signal.SIGPIPE, signal.SIGXFSZ)
    program.ignored = [
        each for each in signal.valid_signals() if each not in kept and signal.getsignal(each) is signal.SIG_IGN
    ]
    return program if Path(program.folder).is_dir() else None


class Nursery:
    """The near end of a process that has imported what is heavy, and forks."""

    def __init__(self, channel: socket.socket, at_start: Mapping[str, str]) -> None:
        self._channel, self._at_start, self._owner = channel, at_start, os.getpid()
        self._lock = threading.Lock()

    @property
    def is_mine(self) -> bool:
        """False in a fork of the process that it belongs to: what it forks would be another one's child."""
        return self._owner == os.getpid()

    def fits(self, program: Program) -> bool:
        """True if what is read at a start has the values that it had at ours."""
        return (
            _at_start(program.environ) == self._at_start and program.environ.get("PYTHONWARNINGS", "ignore") == "ignore"
        )

    def fork(self, program: Program, descriptors: Sequence[int]) -> int:
        """Starts the program as a child of this process; its process id.

        The nursery forks twice, and the one between ends at once: then the program is a child of the nearest ancestor
        that asked for such orphans.
        """
        libc = ctypes.CDLL(None)
        with self._lock:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                fds = array.array("i", descriptors).tobytes()
                self._channel.sendmsg([pickle.dumps(vars(program))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                pid = int(self._channel.recv(64) or _GONE)
                said = int(self._channel.recv(64) or _GONE) if pid > 0 else pid
            except (BrokenPipeError, ConnectionResetError):
                said = _GONE
            finally:
                libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if said == _GONE:
            raise ChildProcessError(f"the process that forks test programs (tests/warm.py) has ended{_how_it_ended()}")
        if said != _DONE:
            raise ChildProcessError("the process that forks test programs (tests/warm.py) could not fork")
        return pid


def _how_it_ended() -> str:
    """Of this process' own nursery, in words that follow "has ended"."""
    try:
        code = _process.wait(timeout=5)
    except (AttributeError, subprocess.TimeoutExpired):  # another process' own, or it is about to end
        return ""
    return f", by {signal.Signals(-code).name}" if code < 0 else f", with exit code {code}"


_the_nursery: Nursery | None = None
_process: Any = None
_beginning = threading.Lock()


def _nursery() -> Nursery | None:
    """This process' own; None where none can be: then starts are real ones."""
    with _beginning:
        if _process is None and __name__ != "__main__":
            _begin()
    return _the_nursery if _the_nursery is not None and _the_nursery.is_mine else None


def _begin() -> None:
    global _the_nursery, _process
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    options = ["-P"] if sys.version_info >= (3, 11) else []
    left_out = ("PYTHONPATH", "PYTHONWARNINGS", _COVERAGE)
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    with far:
        _process = _RealPopen(
            [sys.executable, *options, __file__, str(far.fileno())], pass_fds=[far.fileno()], env=environ,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    owner = os.getpid()
    atexit.register(lambda: _end(near) if os.getpid() == owner else None)
    said = near.recv(64)
    if said == b"ready":
        _the_nursery = Nursery(near, _at_start(environ))
    elif not said:
        _process.wait()
        raise ChildProcessError(f"the process that forks test programs (tests/warm.py) has ended{_how_it_ended()}")


def _end(near: socket.socket) -> None:
    """A program that outlives this process may hold its own end open, so the nursery would not see that nobody asks."""
    near.close()
    _process.kill()
    _process.wait()


# What follows runs in the nursery and in what it forks.


def _serve(channel: socket.socket) -> tuple[Program, list[int]]:
    """Forks programs until nobody can ask any more; returns in each of them alone."""
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 1 << 20, 64)
        if not data:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            try:
                pid = os.fork()
            except OSError:
                traceback.print_exc()
                os._exit(1)
            if pid:
                channel.send(str(pid).encode())
                os._exit(0)
            channel.close()
            while os.getppid() == between:
                time.sleep(0.0002)
            return Program(**pickle.loads(data)), fds
        _, status = os.waitpid(between, 0)
        for each in fds:
            os.close(each)
        channel.send(str(_FAILED if status else _DONE).encode())


def _become(program: Program, descriptors: Sequence[int], base_path: Sequence[str]) -> None:
    """Makes this fork what a start of Python would be."""
    if program.group is None:
        os.setsid()
    else:
        os.setpgid(0, program.group)
    os.umask(program.umask)
    os.chdir(program.folder)
    for each in program.ignored:
        signal.signal(each, signal.SIG_IGN)
    _take_descriptors(descriptors, program.descriptors)
    os.environ.clear()
    os.environ.update(program.environ)
    _show_in_proc(program)
    is_unbuffered = program.is_unbuffered or bool(program.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout = sys.__stdout__ = _stream(1, "strict", is_unbuffered)
    sys.stderr = sys.__stderr__ = _stream(2, "backslashreplace", is_unbuffered)
    sys.dont_write_bytecode = bool(program.environ.get("PYTHONDONTWRITEBYTECODE"))
    if "PYTHONWARNINGS" in program.environ:
        warnings.simplefilter("ignore")
    if threads := program.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    sys.modules["numpy"].random.seed()
    tempfile.tempdir = None  # an import may have asked for it: TMPDIR may be another one here
    more = program.environ.get("PYTHONPATH", "")
    sys.path[:] = [*(str(Path(entry).absolute()) for entry in more.split(os.pathsep) if more), *base_path]
    sys.orig_argv[:] = program.argv


def _take_descriptors(handed: Sequence[int], numbers: Sequence[int]) -> None:
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 512) for each in handed]
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number)
    kept = set(numbers)
    for entry in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if entry not in kept:
            with contextlib.suppress(OSError):
                os.close(entry)


def _stream(descriptor: int, errors: str, is_unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw), encoding="utf-8", errors=errors,
        line_buffering=descriptor == 2 or raw.isatty(), write_through=is_unbuffered,
    )  # type: ignore[type-var]  # fmt: skip


_kept_for_proc: list[Any] = []


def _show_in_proc(program: Program) -> bool:
    """Makes /proc/self/cmdline and environ those of the program; False where the kernel does not let us."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_long]
    words = b"".join(os.fsencode(word) + b"\0" for word in program.argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in program.environ.items())
    texts = [ctypes.create_string_buffer(text, len(text)) for text in (words, variables)]
    _kept_for_proc[:] = texts
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_code, end_code, stack, start_data, end_data, brk = (
        int(stat[place - 3]) for place in (26, 27, 28, 45, 46, 47)
    )
    edges = [edge for text in texts for edge in (ctypes.addressof(text), ctypes.addressof(text) + len(text))]
    now = libc.sbrk(0)
    shape = struct.pack("=12QIi", start_code, end_code, start_data, end_data, brk, now, stack, *edges, 0, 0, -1)
    buffer = ctypes.create_string_buffer(shape, len(shape))
    place, size = ctypes.c_ulong(ctypes.addressof(buffer)), ctypes.c_ulong(len(shape))
    return bool(libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, place, size, 0) == 0)


def _own_nursery(at_start: Mapping[str, str]) -> tuple[Program, list[int]] | None:
    """A nursery for what this program starts; in what that forks: the next program."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        near.close()
        nowhere = os.open(os.devnull, os.O_RDWR)
        _take_descriptors([nowhere] * 3 + [far.fileno()], [0, 1, 2, far.fileno()])
        _show_in_proc(Program(argv=["nursery"]))
        return _serve(far)
    far.close()
    global _the_nursery
    _the_nursery = Nursery(near, at_start)
    return None


def _execute(program: Program) -> None:
    """Runs the program as Python's own start does."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    importlib.invalidate_caches()
    sys.argv[:] = [program.mode or program.name, *program.arguments]
    if program.mode == "-c":
        sys.path[:0] = [] if program.is_safe else [""]
        exec(compile(program.name, "<string>", "exec", dont_inherit=True), main.__dict__)
    elif program.mode == "-m":
        sys.path[:0] = [] if program.is_safe else [program.folder]
        runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]
    elif Path(program.name).suffix == ".py":
        main.__file__ = program.name
        sys.path[:0] = [] if program.is_safe else [str(Path(program.name).resolve().parent)]
        exec(compile(Path(program.name).read_bytes(), program.name, "exec", dont_inherit=True), main.__dict__)
    else:
        sys.path[:0] = [program.name]
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]


def _measure() -> None:
    """Begins to count lines where coverage asks for it; a start of Python does so through coverage's .pth file."""
    if _COVERAGE in os.environ:
        importlib.import_module("coverage").process_startup()


def _leave(error: BaseException | None) -> NoReturn:
    """Ends as Python does, but for taking the interpreter apart: with torch that takes 0.3 s of a core."""
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code != error.code and error.code is not None:
            print(error.code, file=sys.stderr)
    elif error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    _end_now(code & 0xFF)


def _main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    at_start = _at_start(os.environ)  # libraries set some when they are imported
    for name in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    base_path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]  # Python 3.10 knows no -P
    if not _show_in_proc(Program(argv=sys.orig_argv[:], environ=dict(os.environ))):
        channel.send(b"starts are real ones here")
        os._exit(0)
    gc.freeze()
    channel.send(b"ready")
    started = _serve(channel)
    while started is not None:
        program, descriptors = started
        _become(program, descriptors, base_path)
        started = _own_nursery(at_start) if set(program.argv) & set(_STARTERS) else None
    if _the_nursery is not None:
        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    _measure()
    try:
        _execute(program)
    except BaseException as error:
        _leave(error)
    _leave(None)


if __name__ == "__main__":
    _main()
