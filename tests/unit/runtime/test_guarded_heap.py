"""No rank with Muon accesses the heap wrongly: blocks end at pages that cannot be accessed (guarded_heap.c).

The first tests show that such a heap sees what it is for, among it what once crashed ranks: the deep copy of a fake
tensor, which torchmetrics makes, frees a weak reference twice (hpc_trainer/runtime/own_process.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.training.ranks import child_environment

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="it takes glibc and a C compiler"),
]
_HERE = Path(__file__).parent
_MUON = _HERE.parent / "features" / "muon" / "sharded_child.py"
# Each `action` runs in a fork, where blocks are guarded.
_IN_A_FORK = """
import contextlib, ctypes, os, sys
{imports}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
child = os.fork()
if child == 0:
    {action}
    os._exit(0)
sys.exit(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heap") / "guarded_heap.so"
    options = ["-O2", "-fPIC", "-shared", "-fno-builtin-malloc", "-o", str(path)]
    subprocess.run(["cc", *options, str(_HERE / "guarded_heap.c"), "-ldl", "-lpthread"], check=True)
    return path


def _run(library: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**child_environment(), "LD_PRELOAD": str(library), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=900, env=environment, check=False
    )


@pytest.mark.parametrize(
    ("action", "report"),
    [
        ("ctypes.memset(libc.malloc(90) + 96, 1, 1)", "access outside at +96 of a block of 90 bytes"),
        ("block = libc.malloc(90); ctypes.memset(block + 90, 1, 1); libc.free(block)", "write outside at +90"),
        ("block = libc.malloc(90); ctypes.memset(block - 1, 1, 1); libc.free(block)", "write outside at -1"),
        ("block = libc.malloc(90); libc.free(block); ctypes.memset(block, 1, 1)", "access after the free at +0"),
        ("block = libc.malloc(90); libc.free(block); libc.free(block)", "second or wrong free at +0"),
    ],
    ids=["behind", "close behind", "before", "freed", "freed twice"],
)
def test_a_wrong_access_ends_the_process(library: Path, action: str, report: str) -> None:
    done = _run(library, "-c", _IN_A_FORK.format(imports="", action=action))
    assert done.returncode in (6, 11), done.stderr
    assert f"guarded heap: {report}" in done.stderr


def test_a_deep_copy_of_a_fake_tensor_accesses_freed_memory(library: Path) -> None:
    """If this test fails, torch has mended it, and estimates could run in the rank again."""
    imports = "import copy, gc, torch, torch._dynamo; from torch._subclasses.fake_tensor import FakeTensorMode"
    action = "with FakeTensorMode(), contextlib.suppress(RuntimeError): copy.deepcopy(torch.tensor(0.0))"
    done = _run(library, "-c", _IN_A_FORK.format(imports=imports, action=f"{action}\n    gc.collect()"))
    assert "guarded heap: access after the free at +8 of a block of 96 bytes" in done.stderr, done.stderr
    assert done.returncode == 11


def test_ranks_with_muon_access_the_heap_rightly(library: Path, tmp_path: Path) -> None:
    """Muon's ranks under ZeRO-1, FSDP and tensor parallel; a rank of an old version once died of a damaged heap."""
    done = _run(library, str(_MUON), str(tmp_path), "zero2", "fsdp2", "tp")
    assert done.returncode == 0, done.stderr[-6000:]
    totals = [
        [int(number) for number in found]
        for found in re.findall(r"guarded heap: process \d+, (\d+) blocks, \d+ freed, (\d+) not guarded", done.stderr)
    ]
    assert len([blocks for blocks, _ in totals if blocks > 100_000]) == 4, "two ranks that train, and two that load"
    assert all(unguarded < blocks / 100 for blocks, unguarded in totals if blocks > 100_000), totals
