"""For all tests: no Slurm of the machine, one thread of torch a process, Ctrl-C as in a terminal, equal draws.

A login node has a live Slurm. The PATH of tests has none of its commands. Tests on Slurms of their own
(tests/slurm/testbed) take the PATH of before from $HPC_TRAINER_TESTS_PATH.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SLURM = frozenset(
    {"sbatch", "squeue", "sacct", "sacctmgr", "scontrol", "sinfo", "scancel", "srun", "salloc", "sstat", "sprio"}
)
_CALLS = "HPC_TRAINER_SLURM_CALLS"
_CPU = "HPC_TRAINER_TESTS_CPU"


def without_slurm(path: str) -> str:
    """Return a PATH with all commands of `path` but Slurm's: a folder that has some is replaced by one of links."""
    folders = []
    for folder in path.split(os.pathsep):
        names = os.listdir(folder) if folder and os.path.isdir(folder) else []  # noqa: PTH112, PTH208
        if _SLURM.isdisjoint(names):
            folders.append(folder)
            continue
        links = Path(tempfile.mkdtemp(prefix="no-slurm-"))
        links.chmod(0o755)  # tests become other users
        atexit.register(_remove, links, os.getpid())
        for name in set(names) - _SLURM:
            (links / name).symlink_to(Path(folder, name).absolute())
        folders.append(str(links))
    return os.pathsep.join(folders)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # tests fork
        shutil.rmtree(folder, ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which a planted Slurm command was called (tests/no_slurm)."""
    calls = Path(os.environ.get(_CALLS, "/nonexistent"))
    if not hasattr(session.config, "workerinput") and calls.is_file() and calls.read_text():
        print(f"\nTests have called the machine's Slurm:\n{calls.read_text()}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Iterator[Any]:
    """Mark as long the cases of a test that its mark `few(COUNT)` leaves out: of those that are not long, all but
    COUNT at equal distances.

    Here a test's cases are complete, whichever of them the command line names.
    """
    made = yield
    functions = [each for each in made if isinstance(each, pytest.Function)] if isinstance(made, list) else []
    cases = [each for each in functions if not each.get_closest_marker("long")]
    for place, case in enumerate(cases):
        few = case.get_closest_marker("few")
        if few and place * few.args[0] % len(cases) >= few.args[0]:
            case.add_marker(pytest.mark.long)
    return made


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Add the CPU seconds of each test to the file $HPC_TRAINER_TESTS_CPU; a clock tells of other processes too.

    Those of the processes that it started and waited for are in it; what a fixture of several tests costs is the
    first one's.
    """
    before = _cpu_s()
    try:
        return (yield)
    finally:
        if _CPU in os.environ:
            with Path(os.environ[_CPU]).open("a") as table:
                table.write(f"{_cpu_s() - before:.3f} {item.nodeid}\n")


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# Collecting makes 11,000 tests, all of which stay: looking for garbage among them, at each of many passes, took 8 s of
# 27 s of collection, and of what a twelfth of the test files takes afterwards 12 % (n=2).
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what collection made out of the collector's later passes, and let those begin."""
    gc.freeze()
    gc.enable()


# Once: workers of pytest-xdist inherit both.
if "HPC_TRAINER_TESTS_PATH" not in os.environ:
    os.environ["HPC_TRAINER_TESTS_PATH"] = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = without_slurm(os.environ["HPC_TRAINER_TESTS_PATH"])


# Profiles of a site, or of `make slurm-up`, would be among the choices that tests expect.
os.environ.pop("HPC_TRAINER_CONFIG_DIR", None)
# Before torch is imported. As many processes as cores are at work, and threads that wait for each other turn idly.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what it leaves in the background (`make test &` in a script) with SIGINT ignored, and all that is
# started from there would ignore it too: tests that interrupt a command wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # the environment of torch-xla has none
    from hypothesis import settings

    # Its own deadline is 0.2 s an example: a busy machine takes that now and then.
    settings.register_profile("same", derandomize=True, deadline=None)
    settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def node_disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A place for frozen code that goes with the session's other files; else its copies stay in /tmp for a week."""
    os.environ["SLURM_TMPDIR"] = str(tmp_path_factory.mktemp("node"))
