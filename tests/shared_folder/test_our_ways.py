"""What runs/ does on a shared folder, on two clients whose caches last ten minutes and whose answers are lost.

Each test fails if the code trusts what a client remembers, or what an answer says: names and attributes are never
asked for anew by themselves here.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hpc_trainer.record import files
from hpc_trainer.record.checkpoint_folders import committed, discard, quarantine
from hpc_trainer.record.files import (
    OwnLines,
    age_on_server_s,
    append_lines,
    claim,
    rename,
    write_atomic,
    write_json,
    write_marker,
)
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.processes import submit_lock
from hpc_trainer.record.reading import Faults, is_there, names_in, read_json, read_lines
from hpc_trainer.record.run_folder import read_folder
from hpc_trainer.record.shared_folder import cache_age_s
from hpc_trainer.record.states import CANCEL, DONE, RunState
from tests.shared_folder.clients import ROOT, Share

Start = Callable[..., tuple[Path, Path]]
KINDS = ("nfs3", "nfs4", "nfs60", "lustre")


@pytest.fixture(params=KINDS)
def clients(request: pytest.FixtureRequest, two: Start) -> tuple[Path, Path]:
    """The mount points of two clients."""
    return two(request.param)


def test_a_played_folder_counts_as_one_whose_answers_may_be_old(two: Start) -> None:
    assert cache_age_s(two("nfs3")[0]) == 60.0


def test_a_name_that_another_client_made_is_there(clients: tuple[Path, Path]) -> None:
    login, node = (RunPaths(each / "run") for each in clients)
    login.folder.mkdir()
    assert not login.marker(DONE).exists()
    assert not is_there(login.marker(DONE))
    write_marker(node.marker(DONE))
    assert is_there(login.marker(DONE))
    assert names_in(login.folder) == [DONE]
    assert not is_there(login.marker(CANCEL))


def test_a_marker_that_another_client_removed_is_gone(clients: tuple[Path, Path]) -> None:
    """`retry` takes the cancel back; the node that saw it must start."""
    login, node = (RunPaths(each / "run") for each in clients)
    login.folder.mkdir()
    write_marker(login.marker(CANCEL))
    assert is_there(node.marker(CANCEL))
    login.marker(CANCEL).unlink()
    assert not is_there(node.marker(CANCEL))


@pytest.mark.few(2)
def test_a_folder_that_begins_anew_is_the_new_one(clients: tuple[Path, Path]) -> None:
    """`submit --fresh` renames the folder; a node that knew it by its name must not find the old DONE."""
    login, node = (RunPaths(each / "run") for each in clients)
    login.folder.mkdir()
    write_marker(login.marker(DONE))
    assert is_there(node.marker(DONE))
    rename(login.folder, login.folder.with_name("run.old-1"))
    login.folder.mkdir()
    assert not is_there(node.marker(DONE))


@pytest.mark.few(2)
def test_a_run_that_ended_elsewhere_is_read_to_its_end(clients: tuple[Path, Path]) -> None:
    """The login shell looked before the run began, while it ran, and after: it sees what the node wrote."""
    login, node = (RunPaths(each / "sweep" / "run") for each in clients)
    assert read_folder(login, None, None).attempts == []
    node.folder.mkdir(parents=True)
    journal = Journal(node)
    journal.start(0, job_id="7_0", restart_count=0, node="n1", pid=1, executor="slurm", world_size=1)
    write_json(node.heartbeat, {"step": 1, "attempt": 0, "time": 1.0})
    first = read_folder(login, None, None)
    assert (len(first.attempts), first.heartbeat["step"], first.markers) == (1, 1, frozenset())
    for step in (2, 3):
        write_json(node.heartbeat, {"step": step, "attempt": 0, "time": 1.0}, sync=False)
        assert read_folder(login, None, None).heartbeat["step"] == step
    write_json(node.result, {"step": 9, "metrics": {"loss": 0.5}})
    write_marker(node.marker(DONE))
    journal.end(0, state=RunState.COMPLETED, cause="done", step=9, saved_step=9)
    last = read_folder(login, None, None)
    assert (last.markers, last.result["step"], last.faults, last.doubt) == (frozenset({DONE}), 9, (), None)
    assert last.attempts[0].state is RunState.COMPLETED


@pytest.mark.few(2)
def test_what_is_replaced_while_it_is_read_is_read(clients: tuple[Path, Path]) -> None:
    """A heartbeat is replaced all the time: the reader's file is stale now and then, and never a fault."""
    login, node = (RunPaths(each) for each in clients)
    write_json(node.heartbeat, {"step": 0})
    stop = threading.Event()

    def beat() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            write_json(node.heartbeat, {"step": step}, sync=False)
            # Eighty times as often as a run does. Every 5 ms a reader that waits for a core was overtaken four times.
            time.sleep(0.025)

    writer = threading.Thread(target=beat)
    writer.start()
    try:
        faults = Faults()
        seen = [(read_json(login.heartbeat, faults) or {"step": None})["step"] for _ in range(200)]
    finally:
        stop.set()
        writer.join()
    assert faults == []
    assert None not in seen
    assert seen == sorted(seen)


def test_changes_are_made_whatever_answers_are_lost(two: Start, shares: list[Share]) -> None:
    """Every answer of a change is lost: each change is made, and known to be."""
    login, node = two("nfs3")
    shares[-1].faults(lost_replies=1.0)
    write_atomic(login / "file", "text")
    assert claim(login / "claim", b"mine")
    assert not claim(node / "claim", b"theirs")
    checkpoints = login / "checkpoints"
    with pytest.raises(FileExistsError):
        checkpoints.mkdir()
    for step in (1, 2, 3):
        with pytest.raises(FileExistsError):
            (checkpoints / f"step-0000000{step}").mkdir()
    assert quarantine(checkpoints / "step-00000002").name == "step-00000002.bad-1"
    discard(checkpoints / "step-00000003")
    write_marker(login / DONE)
    append_lines(login / "lines.jsonl", [{"a": 1}], sealed=True)
    with submit_lock(SweepPaths(login / "sweep")):
        assert (login / "sweep" / "submit.lock").exists()
    shares[-1].faults()
    assert (node / "file").read_text() == "text"
    assert (node / "claim").read_bytes() == b"mine"
    assert committed(node / "checkpoints") == [(1, node / "checkpoints" / "step-00000001")]
    assert not (node / "sweep" / "submit.lock").exists()
    assert list(read_lines(node / "lines.jsonl")) == [{"a": 1}]
    assert [path.name for path in node.iterdir() if path.name.startswith(".") and ".nfs" not in path.name] == []


_TAKES = """\
import sys, time
from pathlib import Path
from hpc_trainer.errors import SubmitError
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import submit_lock
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.files import append_lines

sweep, count = SweepPaths(Path(sys.argv[1])), int(sys.argv[2])
for _ in range(count):
    with submit_lock(sweep, wait_s=60.0):
        told = list(read_lines(sweep.submissions))
        append_lines(sweep.submissions, [{"number": len(told)}], sealed=True)
"""


@pytest.mark.parametrize("kind", ["nfs3", "lustre"])
def test_the_lock_keeps_submits_of_several_clients_apart(
    two: Start, shares: list[Share], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holder reads what all before it wrote: a number that comes twice is a run that is submitted twice."""
    login, node = two(kind)
    (login / "sweep").mkdir()
    shares[-1].faults(lost_replies=0.2 if kind == "nfs3" else 0.0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen([sys.executable, "-c", _TAKES, str(each / "sweep"), "4"], env=environment)
        for each in (login, node)
    ]
    assert [each.wait(120) for each in workers] == [0, 0]
    shares[-1].faults()
    assert [line["number"] for line in read_lines(node / "sweep" / "submissions.jsonl")] == list(range(8))


def test_a_line_that_another_client_overwrote_is_written_again(two: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that Slurm gave up still writes: its data lands on the newer attempt's line before that is read back."""
    login, node = (RunPaths(each / "run") for each in two("nfs3"))
    login.folder.mkdir()
    append_lines(login.journal(0), [{"who": "before"}], sealed=True)
    late = node.journal(0).open("ab", buffering=0)
    late.write(b'{"who": "given up", "text": "' + b"x" * 60 + b'"}\n')  # in the node's memory: it knows the old size
    append = files.append_texts

    def append_and_lose(path: Path, texts: Iterable[str], *, sync: bool = True) -> None:
        append(path, texts, sync=sync)
        late.close()  # sent now, over the line that was just appended

    monkeypatch.setattr(files, "append_texts", append_and_lose)
    append_lines(login.journal(0), [{"who": "newer"}], sealed=True)
    assert "newer" in [line.get("who") for line in read_lines(RunPaths(login.folder).journal(0), Faults())]


@pytest.mark.parametrize("full", ["ENOSPC", "EDQUOT"])
def test_a_full_quota_that_is_told_at_the_close_is_an_error_of_the_write(
    two: Start, shares: list[Share], full: str
) -> None:
    login, node = two("nfs3")
    write_atomic(login / "file", "before")
    append_lines(login / "lines.jsonl", [{"a": 1}])
    shares[-1].faults(full=full)
    writes: list[Callable[[], object]] = [
        lambda: write_atomic(login / "file", "after" * 1000),
        lambda: write_atomic(login / "file", "after" * 1000, sync=False),
        lambda: append_lines(login / "lines.jsonl", [{"a": 2}]),
        lambda: append_lines(login / "lines.jsonl", [{"a": 2}], sync=False),
        lambda: write_marker(login / "CANCEL"),
        lambda: write_marker(login / "CANCEL", sync=False),
        lambda: claim(login / "claim", b"mine"),
    ]
    for write in writes:
        with pytest.raises(OSError) as refused:  # noqa: PT011  (the number is looked at)
            write()
        assert refused.value.errno == getattr(errno, full)
        assert refused.value.filename is not None, "a person wants to know which disk is full"
    shares[-1].faults()
    assert (node / "file").read_text() == "before"
    append_lines(login / "lines.jsonl", [{"a": 3}])
    assert [line["a"] for line in read_lines(node / "lines.jsonl")] == [1, 3]


@pytest.mark.few(2)
def test_lines_of_a_file_that_stays_open_are_seen_at_once(clients: tuple[Path, Path], shares: list[Share]) -> None:
    """Another client that opens the file reads the lines before it is closed. A line costs one request, the write."""
    login, node = (each / "lines.jsonl" for each in clients)
    node.write_text('{"a": 0}\n{"a"')  # whoever wrote before was killed
    lines = OwnLines(node)
    lines.append([{"a": 1}])
    assert [line["a"] for line in read_lines(login)] == [0, 1]
    before = shares[-1].clients[1].counts()["requests"]
    for number in range(2, 12):
        lines.append([{"a": number}])
    asked = shares[-1].clients[1].counts()["requests"]
    assert {name for name, count in asked.items() if count != before.get(name, 0)} == {"WRITE"}
    assert [line["a"] for line in read_lines(login)] == list(range(12))
    lines.close()
    lines.append([{"a": 12}])
    lines.close()
    assert [line["a"] for line in read_lines(login)] == list(range(13))


def test_a_file_that_stays_open_is_made_anew_where_another_client_removed_it(two: Start) -> None:
    login, node = two("nfs3")
    lines = OwnLines(node / "lines.jsonl")
    lines.append([{"a": 1}])
    (login / "lines.jsonl").unlink()
    lines.append([{"a": 2}])
    lines.close()
    assert [line["a"] for line in read_lines(node / "lines.jsonl")] == [2]


def test_a_full_quota_is_told_by_a_file_that_stays_open(two: Start, shares: list[Share]) -> None:
    login, node = two("nfs3")
    lines = OwnLines(node / "lines.jsonl")
    lines.append([{"a": 1}])
    shares[-1].faults(full="EDQUOT")
    with pytest.raises(OSError, match="quota") as refused:
        lines.append([{"a": 2}])
    assert refused.value.errno == errno.EDQUOT
    shares[-1].faults()
    lines.append([{"a": 3}])
    lines.close()
    assert [line["a"] for line in read_lines(login / "lines.jsonl")] == [1, 3]


def test_ages_are_of_the_servers_clock(tmp_path: Path) -> None:
    """The server is 90 s ahead of this machine."""
    with Share(tmp_path / "share", "nfs3", clock_s=90.0) as share:
        login, node = (each.mountpoint for each in share.several("login", "node"))
        (node / "file").write_text("x")
        assert age_on_server_s(login / "file") < 30


@pytest.mark.few(1)
def test_a_result_is_json_on_each_client(clients: tuple[Path, Path]) -> None:
    """No temporary file, and none cut: the other client opens it at once."""
    login, node = clients
    for number in range(20):
        write_json(login / "result.json", {"number": number, "text": "x" * 5000})
        assert json.loads((node / "result.json").read_text())["number"] == number
