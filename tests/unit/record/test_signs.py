"""Signs: which lines count, and what is filled into the texts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from hpc_trainer.record.signs import SIGNS
from hpc_trainer.record.tracebacks import found_in, last_error, last_traceback, sign_of, with_causes

FAULT = "uncorrectable ECC error"
ECC = f"CUDA error: {FAULT} encountered"
MODULE = "ModuleNotFoundError: No module named 'x'"


def _name(lines: Sequence[str]) -> str | None:
    sign = sign_of(lines)
    return None if sign is None else sign.name


_OTHER = _name([MODULE])
_CPP = ["terminate called after throwing an instance of 'std::exception'"]
_ABORTED = "the program ended with SIGABRT: python train.py"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ([], None),
        (["step 3"], None),
        ([ECC, "step 3"], "gpu_ecc"),
        ([ECC, MODULE], _OTHER),
        ([MODULE, ECC], "gpu_ecc"),
        # Only the error of the last traceback counts, and none of the lines above it.
        ([ECC, "Traceback (most recent call last):", '  File "a.py"', "KeyError: 'x'"], _name(["KeyError: 'x'"])),
        ([ECC, "Traceback (most recent call last):", f"  {ECC}", MODULE], _OTHER),
        ([ECC, "Traceback (most recent call last):", '  File "a.py"'], "gpu_ecc"),  # the error itself is missing
        # An error that passes on another one does not hide what stands above it.
        ([ECC, "Traceback (most recent call last):", "  frame", "ChildFailedError: rank 3"], "gpu_ecc"),
        (["Traceback (most recent call last):", "  frame", MODULE,
          "Traceback (most recent call last):", "  frame", "CalledProcessError: 3"], _OTHER),
        ([ECC, "Traceback (most recent call last):", "  frame", MODULE, "",
          "The above exception was the direct cause of the following exception:", "",
          "Traceback (most recent call last):", "  frame", "ValueError: 3"], _OTHER),
        ([f"WARNING {ECC}"], None),
        ([f"UserWarning: {ECC}"], None),
        ([f"retrying after {ECC}"], None),
        (["x" * (500 - len(FAULT)) + FAULT], "gpu_ecc"),
        (["x" * (501 - len(FAULT)) + FAULT], None),  # a line is read so far
        ([f"  {ECC}"], "gpu_ecc"),
        # torch's DataLoader: a worker that was killed, and what a rank that was reading from it then prints.
        (["RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."], "host_memory"),
        (["RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly"], "data_worker"),
        (["Traceback (most recent call last):", '  File "/x/torch/utils/data/dataloader.py", line 1, in _try_get_data',
          "ConnectionResetError: [Errno 104] Connection reset by peer"], "data_worker"),
        (["Traceback (most recent call last):", '  File "/x/own.py", line 1, in read',
          "ConnectionResetError: [Errno 104] Connection reset by peer"], "peer_lost"),
        # What another line of the output says about a connection that broke.
        (["[0] NCCL WARN NET/IB : Got completion from peer 10.0.35.1<49189> with error 12, opcode 0",
          "Traceback (most recent call last):", "  frame", "ncclRemoteError: A call failed"], "network"),
        # torch prefixes the lines of a rank, also the frames, which are no errors.
        ([f"[rank3]: {line}" for line in ("Traceback (most recent call last):", f"  raise {ECC}", MODULE)], _OTHER),
        # A program that aborted says why just above, and hpc_trainer's own line about the signal does not hide it.
        ([*_CPP, "  what():  std::bad_alloc", _ABORTED], "host_memory"),
        ([*_CPP, "  what():  CUDA error: an illegal memory access", "frame #0: f", _ABORTED], "gpu_access"),
        (["[rank1]: Watchdog caught collective operation timeout: WorkNCCL", *_CPP, _ABORTED], "nccl_timeout"),
        ([*_CPP, "  what():  the mesh has a hole", _ABORTED], "crash"),
        ([ECC, "step 3", "step 4", "step 5", *_CPP, _ABORTED], "crash"),
        ([ECC, "free(): invalid pointer", _ABORTED], "crash"),
        ([*_CPP, "  what():  std::bad_alloc", "the program ended with SIGSEGV: x"], "crash"),
    ],
)  # fmt: skip
def test_which_line_tells_why(lines: list[str], name: str | None) -> None:
    assert _name(lines) == name


def test_a_sign_says_what_it_found_and_where() -> None:
    line = "train.py: error: unrecognized arguments: --lr " + "9" * 100
    sign = sign_of(["step 3", line, "step 4"])
    assert sign is not None
    assert (sign.name, sign.line, sign.matched) == ("arguments", line, line.partition("error: ")[2][:80])
    assert sign.says == f"the program does not accept its command line: {sign.matched}"


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ({0: 5, 1: 5, 2: 4}, ": rank 2 was behind the others"),
        ({0: 5, 1: 4, 2: 4}, ": ranks 1, 2 were behind the others"),
        (dict.fromkeys(range(9), 4) | {9: 5}, ": ranks 0, 1, 2, 3, 4, 5, 6, 7 were behind the others"),
        ({0: 5, 1: 5}, ""),
        ({}, ""),
    ],
)
def test_ranks_that_came_late_to_a_collective_are_named(last: dict[int, int], says: str) -> None:
    (sign,) = (sign for sign in SIGNS if sign.name == "nccl_timeout")
    assert sign.finds is not None
    lines = [
        f"[Rank {rank}] Timeout, last enqueued NCCL work: {work}, last completed: 3" for rank, work in last.items()
    ]
    assert sign.finds is not None
    assert sign.finds(["step 3", *lines]) == says


def test_the_search_for_late_ranks_takes_no_time_squared() -> None:
    lines = ["Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", "Rank 1]" * 30_000]
    begin = time.process_time()
    assert sign_of(lines) is not None
    assert time.process_time() - begin < 1.0, "it was 7 s of an idle core"


def test_signs_of_a_node_and_no_others_send_the_run_elsewhere() -> None:
    of_node = {sign.name for sign in SIGNS if sign.is_of_node}
    assert {"gpu_ecc", "launch_failed"} < of_node
    assert {"arguments", "syntax", "signal", "crash", "labels"}.isdisjoint(of_node)
    assert of_node < {sign.name for sign in SIGNS if any("hardware.exclude" in words for words in sign.advice)}


def test_a_run_that_may_succeed_later_is_repeated_by_the_advice() -> None:
    assert all(any("hpc-trainer retry {run}" in words for words in sign.advice) for sign in SIGNS if sign.may_pass)


def test_a_sign_that_gives_way_names_one_that_is_there() -> None:
    names = {sign.name for sign in SIGNS}
    assert all(name in names for sign in SIGNS for _, name in sign.unless)


_OF_TORCHRUN = [
    "Traceback (most recent call last):", '  File "/home/me/train.py", line 1, in <module>', "ValueError: bad shard 7",
    "E1127 07:21:16.210000 25275 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)",
    "Traceback (most recent call last):", '  File "/env/lib/python3.11/site-packages/torch/run.py", line 1, in main',
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "=" * 60, "t.py FAILED",
    *["  exitcode  : 1"] * 30,
]  # fmt: skip


def test_the_error_of_a_rank_is_found_above_that_of_torchrun() -> None:
    assert last_error(_OF_TORCHRUN) == "ValueError: bad shard 7"
    assert last_traceback(_OF_TORCHRUN) == _OF_TORCHRUN
    kept = with_causes(_OF_TORCHRUN, 5)
    assert "ValueError: bad shard 7" in kept
    assert not any(line.startswith("  File") for line in kept)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], None), (["step 3"], None), (["Traceback (most recent call last):", "  frame"], None),
        (["Traceback (most recent call last):", "  frame", "KeyError: 'x'"], "KeyError: 'x'"),
        (["Traceback (most recent call last):", "  frame", "KeyError: 1",
          "Traceback (most recent call last):", "  frame", "ValueError: two", "  lines", "more"], "ValueError: two"),
        (["Traceback (most recent call last):", "  frame", "KeyError: 1", *["step 3"] * 10], None),
        (["Traceback (most recent call last):", "  frame", "CalledProcessError: 3"], None),
        (["[rank0]: Traceback (most recent call last):", "[rank0]:   frame", "[rank0]: KeyError: 1"], "KeyError: 1"),
    ],
)  # fmt: skip
def test_the_error_with_which_a_program_ended(lines: list[str], said: str | None) -> None:
    assert last_error(lines) == said


def test_the_newest_place_of_a_line_comes_first() -> None:
    lines = ["a", "the line", "b", "at: the line!", "c"]
    assert list(found_in(lines, "  the line ")) == [4, 2]
    assert list(found_in(lines, "none")) == list(found_in(lines, "  ")) == []
