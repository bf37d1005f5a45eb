"""A program that is forked from the warm process finds what a start of Python gives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

_SHOW = """
from __main__ import __dict__ as names

import json, os, signal, sys, tempfile
print("told", file=sys.stderr)
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "parent": os.getppid(), "group": os.getpgid(0),
    "session": os.getsid(0), "word": os.environ.get("WORD"), "home": os.environ.get("HOME"), "input": sys.stdin.read(),
    "command": open("/proc/self/cmdline").read().split(chr(0)), "name": __name__, "names": sorted(names),
    "ours": [name for name in sys.modules if name.startswith(("hpc_trainer", "tests"))],
    "open": len(os.listdir("/proc/self/fd")), "hup": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,
    "umask": os.umask(0), "temporary": tempfile.gettempdir(), "unbuffered": type(sys.stdout.buffer).__name__,
}))
sys.exit(3)
"""


def _shown(start: Any, folder: Path, argv: list[str], **options: Any) -> dict[str, Any]:
    environ = {key: value for key, value in os.environ.items() if key not in ("HOME", "PYTHONUNBUFFERED")}
    process = start(
        argv, cwd=folder, env={**environ, "WORD": "ä b", "TMPDIR": str(folder)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    output, errors = process.communicate("given", timeout=100)
    assert (process.returncode, errors) == (3, "told\n")
    said: dict[str, Any] = json.loads(output)
    if options.get("start_new_session"):
        assert said.pop("session") == said.pop("group") == process.pid
    return said


@pytest.mark.parametrize("how", ["file", "code", "code -P -u", "module", "session"])
def test_a_fork_is_as_a_start(tmp_path: Path, how: str) -> None:
    (tmp_path / "shows.py").write_text(_SHOW)
    words = {"file": ["shows.py", "-x"], "module": ["-m", "shows", "a"], "code -P -u": ["-P", "-u", "-c", _SHOW]}
    argv = [sys.executable, *words.get(how, ["-c", _SHOW, "a", "-b"])]
    options = {"start_new_session": True} if how == "session" else {}
    before, mask = signal.signal(signal.SIGHUP, signal.SIG_IGN), os.umask(0o031)
    try:
        forked, started = (_shown(start, tmp_path, argv, **options) for start in (warm.Popen, subprocess.Popen))
    finally:
        signal.signal(signal.SIGHUP, before)
        os.umask(mask)
    assert set(forked.pop("names")) <= set(started.pop("names"))
    assert forked == started
    assert (forked["parent"], forked["home"], forked["input"]) == (os.getpid(), None, "given")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_a_child_that_a_signal_ends(number: signal.Signals) -> None:
    with warm.Popen([sys.executable, "-c", "print('here', flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout.readline() == b"here\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == -number


def test_what_it_starts_is_forked_too_and_outlives_it(tmp_path: Path) -> None:
    """Only programs of ours that start others; the child of one that has ended is nobody's, as ever."""
    (tmp_path / "hpc_trainer.py").write_text(
        "import os, subprocess, sys\n"
        "code = 'import os, sys; print(\"torch\" in sys.modules, os.getppid()); input()'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdin=0, start_new_session=True)\n"
        "print(os.getpid(), flush=True); os._exit(0) if sys.argv[1] == 'leave' else child.wait()\n"
    )
    argv = [sys.executable, "-m", "hpc_trainer", "stay"]
    with warm.Popen(argv, cwd=tmp_path, stdin=-1, stdout=-1, text=True) as process:
        output, _ = process.communicate("x\n", timeout=60)
    assert set(output.split()) == {"True", str(process.pid)}


@pytest.mark.dist
def test_ranks_that_a_training_on_this_machine_starts_are_forked(local: LocalDriver) -> None:
    """A start in between that is no Python (a shell, say) would cost each rank of each test 2 s of a core."""
    (local.folder / "tells.py").write_text(
        "import gc, os\nfrom torch import nn\n"
        "def build(input_shape, num_classes):\n"
        "    open('frozen' + os.environ['SUBMITIT_LOCAL_GLOBALID'], 'w').write(str(gc.get_freeze_count()))\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    local.train("experiment=digits", "debug=smoke", "hardware=cpu_x2", "model=custom", "model._target_=tells.build",
                "--trust", "tells")  # fmt: skip
    counts = [int((local.folder / f"frozen{rank}").read_text()) for rank in (0, 1)]
    assert min(counts) > 10_000, counts  # what the warm process has imported; 0 in a real start


def test_what_a_fork_cannot_give_is_a_real_start() -> None:
    code = "import sys; print('torch' in sys.modules, sys.flags.optimize)"
    assert warm.run([sys.executable, "-c", code], text=True).stdout == "True 0\n"
    assert warm.run([sys.executable, "-O", "-c", code], text=True).stdout == "False 1\n"
    environ = {**os.environ, "TORCH_LOGS": "dynamo"}
    assert warm.run([sys.executable, "-c", code], text=True, env=environ).stdout == "False 0\n"


@pytest.mark.long
def test_what_a_library_sets_when_it_is_imported_makes_no_start_a_real_one() -> None:
    """What these set in this process, programs of later tests inherit."""
    code = "import os, sys; print('torch' in sys.modules, os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    imports = "import sklearn.datasets, torch._inductor.runtime.cache_dir_utils as cache; cache.cache_dir()"
    for_all = f"import json, os; {imports}; print(json.dumps(dict(os.environ)))"
    environ = json.loads(warm.run([sys.executable, "-W", "ignore", "-c", for_all], text=True).stdout)
    assert environ["KMP_INIT_AT_FORK"]
    done = warm.run([sys.executable, "-c", code], text=True, env=environ)
    assert done.stdout == f"True {environ['TORCHINDUCTOR_CACHE_DIR']}\n"


@pytest.mark.parametrize(("answer", "said"), [(None, "has ended, by SIGKILL"), (b"-1", "could not fork")])
def test_a_warm_process_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch, answer: bytes | None, said: str) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far, subprocess.Popen(["sleep", "100"]) as process:
        process.kill()
        far.close() if answer is None else far.send(answer)
        monkeypatch.setattr(warm, "_process", process)
        monkeypatch.setattr(warm, "_the_nursery", warm.Nursery(near, warm._at_start(os.environ)))
        with pytest.raises(ChildProcessError, match=said):
            warm.run([sys.executable, "-c", "print('never')"])
