"""Each behaviour that a played shared folder has, with two clients, against what the sources in kinds.py say."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shared_folder.clients import CALM, Share
from tests.shared_folder.kinds import KINDS, kind_of

pytestmark = pytest.mark.long  # what plays the folder, not ours
Start = Callable[..., tuple[Path, Path]]

SHORT = {"acregmin": 0.1, "acregmax": 0.2, "acdirmin": 0.2, "acdirmax": 0.4}


def soon(condition: Callable[[], bool], within: float = 5.0) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def code_of(action: Callable[[], object]) -> int:
    """Return the error number of an action, 0 if it succeeds."""
    try:
        action()
    except OSError as error:
        return error.errno or -1
    return 0


# 1, 2: attributes and names


def test_attributes_are_those_of_the_last_look_until_they_are_too_old(two: Start) -> None:
    a, b = two()
    (a / "f").write_text("1")
    assert (b / "f").stat().st_size == 1
    (a / "f").write_text("123")
    assert (b / "f").stat().st_size == 1
    a, b = two(**SHORT)
    (a / "f").write_text("1")
    assert (b / "f").stat().st_size == 1
    (a / "f").write_text("123")
    assert soon(lambda: (b / "f").stat().st_size == 3)


def test_the_lifetime_of_attributes_doubles_while_they_stay_the_same(tmp_path: Path) -> None:
    from tests.shared_folder.nodes import Nodes
    from tests.shared_folder.server import Server

    (tmp_path / "f").touch()
    server = Server(tmp_path / "control", KINDS["nfs3"], "a", 0, lambda _: None)
    nodes = Nodes(tmp_path, server, KINDS["nfs3"])
    node, _ = nodes.found(os.open(tmp_path / "f", os.O_PATH))
    began = node.asked
    lifetimes = []
    for later in (1, 3, 9, 21, 45, 93, 153):
        node.take(nodes.present(node), began + later)
        lifetimes.append(node.lifetime)
    assert lifetimes == [3, 6, 12, 24, 48, 60, 60]
    (tmp_path / "f").write_text("1")
    node.take(nodes.present(node), began + 160)
    assert node.lifetime == 3
    assert nodes.root.lifetime == 30
    assert nodes.root.longest == 60


def test_a_name_looked_up_as_missing_stays_missing(two: Start) -> None:
    a, b = two()
    assert not (b / "f").exists()
    (a / "f").write_text("1")
    assert not (b / "f").exists()
    # Close-to-open does not help: open asks for attributes of a file, and there is none.
    assert code_of((b / "f").read_text) == errno.ENOENT
    a, b = two(missing_names=False)
    assert not (b / "f").exists()
    (a / "f").write_text("1")
    assert (b / "f").exists()
    a, b = two(**SHORT)
    assert not (b / "f").exists()
    (a / "f").write_text("1")
    assert soon((b / "f").exists)


def test_a_removed_file_is_still_there_by_its_cached_name(two: Start) -> None:
    a, b = two()
    (a / "f").write_text("1")
    assert (b / "f").exists()
    (a / "f").unlink()
    assert (b / "f").exists()
    assert code_of((b / "f").read_text) == errno.ENOENT
    assert not (b / "f").exists()


def test_stat_of_a_replaced_file_is_of_the_old_one(two: Start) -> None:
    a, b = two()
    (a / "f").write_text("1")
    inode = (b / "f").stat().st_ino
    (a / "new").write_text("123")
    (a / "new").rename(a / "f")
    assert ((b / "f").stat().st_ino, (b / "f").stat().st_size) == (inode, 1)
    assert (b / "f").read_text() == "123"
    assert ((b / "f").stat().st_ino, (b / "f").stat().st_size) == ((a / "f").stat().st_ino, 3)


@pytest.mark.parametrize("kind", ["local", "lustre", "lustre_flock"])
def test_a_strong_client_sees_everything_at_once(two: Start, kind: str) -> None:
    a, b = two(kind)
    assert not (b / "f").exists()
    with (a / "f").open("w") as file:
        assert (b / "f").exists()
        file.write("12")
        file.flush()
        assert (b / "f").read_text() == "12"
    (a / "new").write_text("123")
    (a / "new").rename(a / "f")
    assert (b / "f").stat().st_size == 3
    (a / "f").unlink()
    assert not (b / "f").exists()


# 3: close-to-open


def test_open_sees_what_was_closed_before(two: Start) -> None:
    a, b = two()
    (a / "f").write_text("1")
    assert (b / "f").read_text() == "1"
    (a / "f").write_text("two")
    assert (b / "f").read_text() == "two"
    assert (b / "f").stat().st_size == 3


def test_listing_a_folder_makes_its_missing_names_doubtful(two: Start) -> None:
    a, b = two()
    (a / "d").mkdir()
    assert not (b / "d/f").exists()
    (a / "d/f").write_text("1")
    assert not (b / "d/f").exists()
    assert names_in(b / "d") == ["f"]
    assert (b / "d/f").read_text() == "1"


def test_an_open_descriptor_reads_up_to_the_size_that_is_known(two: Start) -> None:
    a, b = two()
    (a / "f").write_text("1")
    with (b / "f").open() as file:
        assert file.read() == "1"
        (a / "f").write_text("123")
        assert file.read() == ""
    a, b = two(**SHORT)
    (a / "f").write_text("1")
    with (b / "f").open() as file:
        assert file.read() == "1"
        (a / "f").write_text("123")
        assert soon(lambda: file.read() == "23")


def test_open_of_a_file_that_lives_on_elsewhere_is_the_old_one_on_nfs3_only(two: Start) -> None:
    for kind, text in (("nfs3", "old"), ("nfs4", "new")):
        a, b = two(kind)
        (a / "f").write_text("old")
        assert (b / "f").exists()
        (a / "f").rename(a / "kept")
        (a / "f").write_text("new")
        assert (b / "f").read_text() == text, kind


# 4: writes


def test_written_data_is_sent_at_sync_close_and_stat(two: Start) -> None:
    a, b = two(**SHORT)
    server = a.parent / "backing"
    with (a / "f").open("w+", buffering=1) as file:
        file.write("line\n")
        assert (server / "f").read_text() == ""
        file.seek(0)
        assert file.read() == "line\n"
        os.fsync(file.fileno())
        assert (server / "f").read_text() == "line\n"
        file.write("more\n")
        assert (server / "f").read_text() == "line\n"
        assert (a / "f").stat().st_size == 10
        assert (server / "f").read_text() == "line\nmore\n"
        file.write("end\n")
    assert (server / "f").read_text() == "line\nmore\nend\n"
    assert (b / "f").read_text() == "line\nmore\nend\n"


def test_written_data_is_sent_when_it_is_much_or_old(two: Start) -> None:
    a, _ = two(dirty_limit=1000, dirty_age=0.3)
    server = a.parent / "backing"
    with (a / "f").open("wb", buffering=0) as file:
        file.write(b"x" * 600)
        assert (server / "f").stat().st_size == 0
        file.write(b"x" * 600)
        assert (server / "f").stat().st_size == 1200
        file.write(b"x")
        assert soon(lambda: (server / "f").stat().st_size == 1201)


@pytest.mark.parametrize("kind", ["nfs3", "lustre"])
@pytest.mark.parametrize("full", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_is_said_at_sync_or_close(two: Start, shares: list[Share], kind: str, full: str) -> None:
    a, _ = two(kind)
    shares[-1].faults(full=full)
    code = getattr(errno, full)
    one = os.open(a / "one", os.O_CREAT | os.O_WRONLY)
    assert os.write(one, b"12") == 2
    assert code_of(lambda: os.fsync(one)) == code
    assert code_of(lambda: os.close(one)) == 0
    two_ = os.open(a / "two", os.O_CREAT | os.O_WRONLY)
    assert os.write(two_, b"12") == 2
    assert code_of(lambda: os.close(two_)) == code
    assert (a / "two").stat().st_size == 0
    shares[-1].faults()
    (a / "two").write_text("12")
    assert (a / "two").read_text() == "12"


def test_a_full_local_disk_is_said_at_write(two: Start, shares: list[Share]) -> None:
    a, _ = two("local")
    shares[-1].faults(full="ENOSPC")
    one = os.open(a / "one", os.O_CREAT | os.O_WRONLY)
    assert code_of(lambda: os.write(one, b"12")) == errno.ENOSPC
    os.close(one)


# 5: append


def test_appends_of_two_clients_overwrite_each_other_but_not_on_lustre(two: Start) -> None:
    for kind, lines in (("nfs3", ["b1"]), ("nfs4", ["b1"]), ("lustre", ["a1", "b1"])):
        a, b = two(kind)
        (a / "log").touch()
        with (a / "log").open("a") as first, (b / "log").open("a") as second:
            for file, line in ((first, "a1\n"), (second, "b1\n")):
                file.write(line)
                file.flush()
            os.fsync(first.fileno())
            os.fsync(second.fileno())
        assert (a / "log").read_text().split() == lines, kind


def test_appends_one_after_the_other_are_kept(two: Start) -> None:
    a, b = two()
    for number in range(3):
        for client in (a, b):
            with (client / "log").open("a") as file:
                file.write(f"{client.name}{number}\n")
    assert (a / "log").read_text().split() == ["a0", "b0", "a1", "b1", "a2", "b2"]


# 6: own changes


def test_names_stay_as_they_were_when_only_this_client_changes_the_folder(two: Start) -> None:
    a, b = two("nfs4")
    (b / "d").mkdir()
    assert not (b / "d/x").exists()
    (b / "d/own").touch()
    (b / "d/own").rename(b / "d/other")
    (b / "d/other").unlink()
    assert not (b / "d/other").exists()
    (a / "d/x").touch()
    assert not (b / "d/x").exists()  # its own changes did not make the missing name doubtful
    (b / "d/own").touch()
    assert (b / "d/x").exists()  # but now the folder is not as this client left it


# 7, 8: lost and late answers


def test_a_lost_answer_says_failed_though_it_was_done(two: Start, shares: list[Share]) -> None:
    a, _ = two()
    server = a.parent / "backing"
    for name in ("f", "g", "h"):
        (a / name).write_text(name)
    (a / "e").mkdir()
    shares[-1].faults(lost_replies=1.0)
    assert code_of((a / "d").mkdir) == errno.EEXIST
    assert code_of(lambda: os.link(a / "f", a / "link")) == errno.EEXIST
    assert code_of(lambda: (a / "soft").symlink_to("f")) == errno.EEXIST
    assert code_of(lambda: (a / "x").open("x")) == errno.EEXIST
    assert code_of(lambda: (a / "g").rename(a / "g2")) == errno.ENOENT
    assert code_of((a / "h").unlink) == errno.ENOENT
    assert code_of((a / "e").rmdir) == errno.ENOENT
    expected = {"d", "f", "g2", "link", "soft", "x"}
    assert {path.name for path in server.iterdir()} == expected
    # Names that an answer was lost of are looked up anew: whoever looks finds what was done.
    for name in expected:
        assert (a / name).exists(), name
    for name in ("g", "h", "e"):
        assert not (a / name).exists(), name
    (a / "new").write_text("1")  # without O_EXCL a repetition is the same
    assert {event["what"] for event in shares[-1].clients[0].events()} == {"lost reply"}


def test_sessions_of_nfs4_lose_no_answer() -> None:
    assert KINDS["nfs4"].lost_replies == 0 < KINDS["nfs3"].lost_replies


def test_answers_are_late_by_the_seed(two: Start, shares: list[Share]) -> None:
    a, _ = two()
    shares[-1].faults(very_late=1.0)
    began = time.monotonic()
    os.statvfs(a)
    took = time.monotonic() - began
    events = [event for event in shares[-1].clients[0].events() if event["what"].startswith("late")]
    assert [event["operation"] for event in events] == ["FSSTAT"]
    assert took >= float(events[0]["what"].split()[2]) >= 1


# 9: files that are open when they are removed


def test_a_file_that_is_open_here_is_hidden_until_it_is_closed(two: Start) -> None:
    a, b = two()
    (a / "d").mkdir()
    (a / "d/f").write_text("old")
    with (a / "d/f").open() as file:
        (a / "d/f").unlink()
        hidden = [path.name for path in (b / "d").iterdir()]
        assert [name[:4] for name in hidden] == [".nfs"]
        assert not (a / "d/f").exists()
        assert (file.read(), os.fstat(file.fileno()).st_size) == ("old", 3)
        assert code_of((a / "d").rmdir) == errno.ENOTEMPTY
    (a / "d").rmdir()
    (a / "f").write_text("old")
    (a / "g").write_text("new")
    with (a / "f").open() as file:
        (a / "g").rename(a / "f")
        assert len([path for path in b.iterdir() if path.name.startswith(".nfs")]) == 1
        assert (file.read(), (a / "f").read_text()) == ("old", "new")
    assert soon(lambda: names_in(b) == ["f"])  # the kernel tells of a last close without waiting


def test_a_file_that_was_closed_before_is_not_hidden(two: Start) -> None:
    a, _ = two()
    server = a.parent / "backing"
    for _ in range(50):
        (a / "f").write_text("1")
        (a / "f").unlink()
        assert names_in(server) == []


def test_a_file_removed_by_another_client_is_stale_where_it_is_open(two: Start) -> None:
    a, b = two(**SHORT)
    (a / "f").write_text("text")
    with (b / "f").open("r+") as file:
        (a / "f").unlink()
        assert code_of(lambda: os.read(file.fileno(), 1)) == errno.ESTALE
        assert soon(lambda: code_of(lambda: os.fstat(file.fileno())) == errno.ESTALE)


@pytest.mark.parametrize("kind", ["local", "lustre"])
def test_a_removed_file_can_still_be_read_where_clients_are_strong(two: Start, kind: str) -> None:
    a, b = two(kind)
    (a / "f").write_text("text")
    with (b / "f").open("r+") as file:
        (a / "f").unlink()
        assert (os.fstat(file.fileno()).st_nlink, file.read()) == (0, "text")
    with (a / "g").open("w") as file:
        (a / "g").unlink()
        assert names_in(b) == []


# 10: clocks


def test_times_are_of_the_servers_clock(tmp_path: Path, shares: list[Share]) -> None:
    share = Share(tmp_path / "s", clock_s=45, settings=CALM)
    shares.append(share)
    a = share.client("a").mountpoint
    before = time.time()
    (a / "f").write_text("1")
    assert before + 44 < (a / "f").stat().st_mtime < time.time() + 46
    os.utime(a / "f", (1_000_000_000, 1_100_000_000))
    assert ((a / "f").stat().st_atime, (a / "f").stat().st_mtime) == (1_000_000_000, 1_100_000_000)
    before = time.time()
    os.utime(a / "f")
    assert before + 44 < (a / "f").stat().st_mtime < time.time() + 46


# 11: locks


def _flock(file: int) -> int:
    return code_of(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))


def _fcntl(file: int) -> int:
    return code_of(lambda: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB))


@pytest.mark.parametrize(
    ("kind", "mine", "other"),
    [
        ("nfs3", 0, errno.EAGAIN),
        ("lustre_flock", 0, errno.EAGAIN),
        ("local", 0, errno.EAGAIN),
        ("nfs60", 0, 0),
        ("all", errno.ENOLCK, errno.ENOLCK),
        ("lustre", errno.ENOSYS, errno.ENOSYS),
    ],
)
def test_locks_are_shared_local_or_refused(two: Start, kind: str, mine: int, other: int) -> None:
    a, b = two(kind, outage_s=0)
    (a / "lock").touch()
    for take in (_flock, _fcntl):
        with (a / "lock").open("r+") as first, (b / "lock").open("r+") as second:
            assert take(first.fileno()) == mine
            assert take(second.fileno()) == other
        with (b / "lock").open("r+") as second:
            assert soon(lambda file=second, take=take: take(file.fileno()) == mine)  # type: ignore[misc]


def test_flock_of_nfs_needs_a_descriptor_that_may_write_and_meets_fcntl(two: Start) -> None:
    a, b = two()
    (a / "lock").touch()
    with (a / "lock").open() as file:
        assert _flock(file.fileno()) == errno.EBADF
    with (a / "lock").open("r+") as first, (b / "lock").open("r+") as second:
        assert _flock(first.fileno()) == 0
        assert _fcntl(second.fileno()) == errno.EAGAIN


def test_a_lock_is_waited_for_while_all_else_goes_on(two: Start) -> None:
    a, b = two()
    (a / "lock").touch()
    with (a / "lock").open("r+") as first, (b / "lock").open("r+") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        waiting = threading.Thread(target=fcntl.flock, args=(second, fcntl.LOCK_EX))
        waiting.start()
        (b / "other").write_text("goes on")
        assert waiting.is_alive()
        fcntl.flock(first, fcntl.LOCK_UN)
        waiting.join(5)
        assert not waiting.is_alive()


def test_a_lock_that_hangs_can_be_interrupted(two: Start, shares: list[Share]) -> None:
    a, _ = two()
    (a / "lock").touch()
    shares[-1].faults(locks="hang")
    code = f"import fcntl; fcntl.flock(open({str(a / 'lock')!r}, 'r+'), fcntl.LOCK_EX)"
    caller = subprocess.Popen([sys.executable, "-c", code])
    assert soon(lambda: bool(shares[-1].clients[0].events()))
    (a / "other").write_text("goes on")
    assert caller.poll() is None
    caller.terminate()
    assert caller.wait(5) == -signal.SIGTERM


# 12: maps


def test_a_file_can_be_mapped(two: Start) -> None:
    a, b = two()
    (a / "f").write_bytes(b"mapped")
    with (b / "f").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == b"mapped"
    with (a / "f").open("r+b") as writable, mmap.mmap(writable.fileno(), 0) as mapped:
        mapped[:3] = b"MAP"
        mapped.flush()
    assert (b / "f").read_bytes() == b"MAPped"
    subprocess.run(["cp", sys.executable, str(a / "program")], check=True)
    assert subprocess.run([b / "program", "-c", "print(1)"], check=True, capture_output=True).stdout == b"1\n"


# 13: the server is out


def test_a_server_that_is_out_makes_calls_wait_and_go_on(two: Start, shares: list[Share]) -> None:
    a, b = two()
    (a / "f").write_text("1")
    began = time.time()
    shares[-1].faults(outage_until=began + 0.6)
    assert (b / "f").read_text() == "1"
    assert began + 0.6 <= time.time() < began + 5
    assert shares[-1].clients[1].events()[0]["what"] == "outage"


def test_a_caller_that_waits_for_the_server_can_be_killed_only(two: Start, shares: list[Share]) -> None:
    a, _ = two()
    shares[-1].faults(outage_until=time.time() + 60)
    program = "import os, signal, sys; signal.signal(signal.SIGUSR1, print); os.mkdir(sys.argv[1])"
    caller = subprocess.Popen([sys.executable, "-c", program, str(a / "d")])
    assert soon(lambda: bool(shares[-1].clients[0].events()))
    caller.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    assert caller.poll() is None
    caller.kill()
    assert caller.wait(5) == -signal.SIGKILL


def test_the_outage_and_the_full_quota_of_a_kind_are_of_its_seed(tmp_path: Path) -> None:
    from tests.shared_folder.server import Faults

    spans = {}
    for name, field in (("outage", "outage"), ("all", "outage"), ("quota", "quota")):
        for client in ("a", "b"):
            spans[name, client] = getattr(Faults(tmp_path, KINDS[name], client, 7), field)
        start, end = spans[name, "a"]
        assert spans[name, "a"] == spans[name, "b"]
        assert end - start == pytest.approx(30)
        assert 4 < start - time.time() < 61
    other = Faults(tmp_path, KINDS["outage"], "a", 8).outage
    assert other != spans["outage", "a"]


# 14: root is nobody


def test_root_is_nobody_on_a_server_that_squashes_it(two: Start) -> None:
    a, _ = two("root_squash")
    server = a.parent / "backing"
    server.chmod(0o777)
    (server / "private").mkdir(mode=0o700)
    (server / "private/f").touch()
    (server / "secret").write_text("1")
    (server / "secret").chmod(0o600)
    (server / "open").write_text("1")
    (a / "mine").write_text("2")
    (a / "folder").mkdir(mode=0o700)
    assert ((server / "mine").stat().st_uid, (server / "folder").stat().st_uid) == (65534, 65534)
    (a / "folder/f").touch()
    (a / "mine").chmod(0o600)
    assert ((a / "mine").read_text(), (a / "open").read_text()) == ("2", "1")
    assert code_of((a / "private/f").stat) == errno.EACCES
    assert code_of(lambda: names_in(a / "private")) == errno.EACCES
    assert code_of((a / "private/g").touch) == errno.EACCES
    assert code_of((a / "secret").read_text) == errno.EACCES
    assert code_of(lambda: (a / "open").write_text("3")) == errno.EACCES
    assert code_of(lambda: (a / "open").chmod(0o666)) == errno.EPERM
    assert code_of(lambda: os.chown(a / "mine", 0, 0)) == errno.EPERM


# 15: faults from the control folder


def test_faults_begin_and_end_at_run_time_for_all_or_for_one(two: Start, shares: list[Share]) -> None:
    a, b = two()
    share = shares[-1]
    share.faults(read_only=True)
    assert code_of((a / "d").mkdir) == errno.EROFS
    assert code_of((b / "d").mkdir) == errno.EROFS
    share.faults(only="a", read_only=True)
    assert code_of((a / "d").mkdir) == errno.EROFS
    assert code_of((b / "d").mkdir) == 0
    share.faults(full="inodes")
    assert code_of((a / "e").mkdir) == errno.ENOSPC
    assert code_of((a / "e").touch) == errno.ENOSPC
    share.faults()
    (a / "f").write_text("1")
    share.faults(full="inodes")
    (a / "f").write_text("123")
    with (a / "f").open("rb", buffering=0) as opened:
        for code in ("ENOENT", "ESTALE"):
            share.faults(vanished=code)
            assert code_of(lambda: names_in(a)) == getattr(errno, code)
            assert code_of((a / "never asked").stat) == code_of((a / "f").stat) == getattr(errno, code)
            # Unmounted lazily, open files stay usable; one that is exported no more has no handles.
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what the kernel keeps asks nobody
            assert code_of(lambda: opened.read(1)) == (errno.ESTALE if code == "ESTALE" else 0)
    share.faults()
    assert (a / "f").read_text() == "123"


@pytest.mark.parametrize("kind", ["nfs3", "nfs4"])
def test_a_path_through_a_folder_that_was_made_anew_is_followed_anew(two: Start, kind: str) -> None:
    """Linux follows a path again after ESTALE, and asks about each name in it."""
    a, b = two(kind)
    (a / "t").mkdir()
    (b / "t" / "f").write_text("1")
    (a / "t").rename(a / "trash")
    (a / "trash" / "f").unlink()
    (a / "trash").rmdir()
    (a / "t").mkdir()
    assert (b / "t").exists()
    (b / "t" / "f").write_text("2")
    assert (a / "t" / "f").read_text() == "2"


# 16: names, links, flags


def test_names_and_links_are_as_on_any_file_system(two: Start) -> None:
    a, b = two()
    assert code_of((a / ("x" * 256)).touch) == errno.ENAMETOOLONG
    assert code_of((a / ("x" * 256)).stat) == errno.ENAMETOOLONG
    (a / ("x" * 255)).touch()
    (a / "f").write_text("1")
    (a / "soft").symlink_to("f")
    os.link(a / "f", a / "hard")
    assert (b / "soft").read_text() == (b / "hard").read_text() == "1"
    assert (str((b / "soft").readlink()), (b / "hard").stat().st_nlink) == ("f", 2)
    (a / "g").write_text("2")
    (a / "g").rename(a / "f")
    assert (b / "f").read_text() == "1"  # the known file lives on by its other name, and NFS 3 asks no more
    assert names_in(b) == ["f", "hard", "soft", "x" * 255]
    assert ((b / "f").read_text(), (b / "hard").read_text()) == ("2", "1")
    (a / "d").mkdir()
    (a / "f").rename(a / "d/f")
    assert (b / "d/f").read_text() == "2"
    assert code_of((a / "d").rmdir) == errno.ENOTEMPTY
    (a / "d/f").chmod(0o600)
    os.chown(a / "d/f", 1234, 1234)
    seen = (a / "d/f").stat()
    assert (seen.st_mode & 0o777, seen.st_uid) == (0o600, 1234)
    os.truncate(a / "d/f", 0)
    assert (b / "d/f").read_text() == ""


def test_a_hard_link_opens_when_the_other_name_is_gone(two: Start) -> None:
    for kind in ("nfs3", "nfs4"):
        a, _ = two(kind)
        (a / "f").write_text("1")
        os.link(a / "f", a / "g")
        assert (a / "f").exists()
        assert (a / "g").exists()
        (a / "new").write_text("2")
        (a / "new").rename(a / "g")
        assert ((a / "f").read_text(), (a / "g").read_text()) == ("1", "2"), kind


def test_rename_takes_no_flags(two: Start) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for kind, code in (("nfs3", errno.EINVAL), ("lustre", errno.EINVAL), ("local", 0)):
        a, _ = two(kind)
        (a / "f").touch()
        result = libc.renameat2(-100, os.fsencode(a / "f"), -100, os.fsencode(a / "g"), 1)  # RENAME_NOREPLACE
        assert (ctypes.get_errno() if result else 0) == code, kind


# Beside the list


def test_exclusive_creation_asks_the_server_whatever_is_cached(two: Start) -> None:
    a, b = two()
    for name in ("claim", "folder"):
        (a / name).touch()
        assert (b / name).exists()
        (a / name).unlink()
        assert (b / name).exists()  # cached
    with (b / "claim").open("x"):
        pass
    (b / "folder").mkdir()
    assert not (a / "new").exists()
    (b / "new").touch()
    assert code_of(lambda: (a / "new").open("x")) == errno.EEXIST
    with (a / "new").open("a"):  # without O_EXCL an existing file is opened
        pass


def test_one_of_many_claims_wins(two: Start) -> None:
    a, b = two()
    won: list[str] = []

    def claim(client: Path, number: int) -> None:
        with contextlib.suppress(FileExistsError), (client / f"claim{number}").open("x"):
            won.append(f"{number}")

    for number in range(20):
        threads = [threading.Thread(target=claim, args=(client, number)) for client in (a, b) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(won, key=int) == [str(number) for number in range(20)]


@pytest.mark.parametrize("kind", ["local", "nfs3", "nfs4", "lustre"])
def test_one_client_alone_has_a_file_system_like_any_other(two: Start, tmp_path: Path, kind: str) -> None:
    a, _ = two(kind, dirty_limit=5000, dirty_age=0.05)
    draw = random.Random(kind)
    plain = tmp_path / "plain"
    plain.mkdir()
    folders = (a, plain)
    names = ["f", "g", "d/f", "d/g"]
    for folder in folders:
        (folder / "d").mkdir()

    for number in range(400):
        name, other = draw.choice(names), draw.choice(names)
        step = draw.choice([_written, _appended, _truncated, _read, _renamed, _removed, _linked, _listed])
        offset, data = draw.randrange(9000), draw.randbytes(draw.randrange(3000))
        played, expected = (_outcome(step, folder / name, folder / other, offset, data) for folder in folders)
        assert played == expected, (number, step, name, other, offset, len(data))


def _outcome(step: Callable[[Path, Path, int, bytes], object], *about: Any) -> object:
    try:
        return step(*about)
    except OSError as error:
        return error.errno


def _written(path: Path, _other: Path, offset: int, data: bytes) -> object:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(file, data, offset)
        os.pwrite(file, data[: len(data) // 2], max(0, offset - 100))
        return os.pread(file, 20000, 0), os.fstat(file).st_size
    finally:
        os.close(file)


def _appended(path: Path, other: Path, offset: int, data: bytes) -> object:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        if offset % 2:
            file.truncate(offset)
        file.write(data)
        return file.tell(), other.exists()


def _truncated(path: Path, _other: Path, offset: int, _data: bytes) -> object:
    os.truncate(path, offset)
    return path.stat().st_size, path.read_bytes()


def _read(path: Path, other: Path, offset: int, data: bytes) -> object:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(len(data)), other.is_file(), path.read_bytes()


def _renamed(path: Path, other: Path, _offset: int, _data: bytes) -> object:
    path.rename(other)
    return other.read_bytes(), path.exists()


def _removed(path: Path, _other: Path, _offset: int, _data: bytes) -> object:
    with path.open("rb") as file:
        path.unlink()
        return file.read(), path.exists()


def _linked(path: Path, other: Path, _offset: int, _data: bytes) -> object:
    os.link(path, other)
    return path.stat().st_nlink, other.read_bytes()


def _listed(path: Path, other: Path, _offset: int, _data: bytes) -> object:
    return names_in(path.parent), names_in(other.parent), path.stat().st_nlink


def test_requests_are_counted(two: Start, shares: list[Share]) -> None:
    a, _ = two()
    client = shares[-1].clients[0]
    (a / "f").write_text("12345")
    before = client.counts()
    for _ in range(10):
        (a / "f").stat()
    after = client.counts()
    assert before["requests"] == after["requests"]  # from the cache
    assert after["calls"]["LOOKUP"] - before["calls"]["LOOKUP"] == 10
    (a / "f").read_text()
    last = client.counts()
    assert last["requests"]["GETATTR"] == after["requests"].get("GETATTR", 0) + 1  # close-to-open
    assert last["bytes"] == {"written": 5, "read": 5}


def test_a_mount_ends_with_its_data_sent(two: Start, shares: list[Share]) -> None:
    a, _ = two()
    file = os.open(a / "f", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"late")
    shares[-1].clients[0].stop()
    assert (a.parent / "backing/f").read_text() == "late"
    assert not a.is_mount()
    with contextlib.suppress(OSError):
        os.close(file)


def test_settings_of_a_kind_are_checked() -> None:
    kind = kind_of("nfs3", 0.5, ["acregmin=9", "locks=local", "strong=true"])
    assert (kind.acregmin, kind.acdirmin, kind.locks, kind.strong) == (9, 15, "local", True)
    with pytest.raises(ValueError, match="nfs5"):
        kind_of("nfs5")
    with pytest.raises(ValueError, match="acreg"):
        kind_of("nfs3", 1, ["acreg=1"])
