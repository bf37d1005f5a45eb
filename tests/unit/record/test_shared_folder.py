"""Looking without an old answer, and changes whose answers are lost: played on this disk, one lost answer at a time.

tests/shared_folder plays whole file systems; here each function meets the one answer that it is for.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.record import reading
from hpc_trainer.record.files import age_on_server_s, claim, make_folder_once, own_name, remove, rename, write_atomic
from hpc_trainer.record.reading import Watch, is_there, names_in, retry_stale
from hpc_trainer.record.shared_folder import cache_age_s, look_anew, mount_of


def _loses_reply(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """The next `os.call` is carried out, and answered as its second try is."""
    real: Callable[..., Any] = getattr(os, call)

    def lost(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(os, call, real)
        real(*args, **options)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, lost)


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_rename_whose_answer_was_lost_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool, is_folder: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    if is_folder:
        source.mkdir()
    else:
        source.write_text("new")
        target.write_text("old")
    _loses_reply(monkeypatch, "rename", errno.ENOENT)
    rename(source, target, is_own=is_own)
    assert target.is_dir() if is_folder else target.read_text() == "new"


def test_a_file_is_written_if_another_has_replaced_it_before_the_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this process knows the temporary name: if it is gone, the rename was carried out."""
    target, real = tmp_path / "target", os.rename

    def lost(source: Path, name: Path) -> None:
        real(source, name)
        (tmp_path / "theirs").write_text("theirs")
        real(tmp_path / "theirs", name)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "rename", lost)
    write_atomic(target, "ours")
    assert target.read_text() == "theirs"


@pytest.mark.parametrize("is_own", [False, True])
def test_a_rename_of_what_is_gone_fails(tmp_path: Path, is_own: bool) -> None:
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "gone", tmp_path / "target", is_own=is_own)


def test_a_rename_onto_what_somebody_else_put_there_fails(tmp_path: Path) -> None:
    """The target is there; it is not what was to be renamed."""
    (tmp_path / "target").write_text("theirs")
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "gone", tmp_path / "target")


def test_a_claim_whose_answer_was_lost_is_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "claim"
    _loses_reply(monkeypatch, "link", errno.EEXIST)
    assert claim(path, b"mine\n")
    assert path.read_bytes() == b"mine\n"
    assert [each.name for each in tmp_path.iterdir()] == ["claim"]


def test_a_claim_that_is_taken_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    assert claim(path, b"first\n")
    assert not claim(path, b"second\n")
    assert path.read_bytes() == b"first\n"
    assert [each.name for each in tmp_path.iterdir()] == ["claim"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_has_o_excl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*paths: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    assert claim(tmp_path / "claim", b"first\n")
    assert not claim(tmp_path / "claim", b"second\n")
    assert (tmp_path / "claim").read_bytes() == b"first\n"


def test_a_claim_that_the_disk_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path / "claim", b"first\n")
    assert list(tmp_path.iterdir()) == []


def test_of_many_claims_exactly_one_is_won(tmp_path: Path) -> None:
    """Threads have one process id, and so one name of their own: forked processes, as nodes are."""
    children = []
    for place in range(4):
        child = os.fork()
        if child == 0:
            won = [number for number in range(20) if claim(tmp_path / f"claim-{number}", b"x")]
            (tmp_path / f"won-{place}").write_text(json.dumps(won))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    won = [json.loads((tmp_path / f"won-{place}").read_text()) for place in range(4)]
    assert sorted(number for each in won for number in each) == list(range(20))


def test_a_folder_whose_answer_was_lost_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _loses_reply(monkeypatch, "mkdir", errno.EEXIST)
    assert make_folder_once(tmp_path / "folder", 0o700)
    (tmp_path / "folder" / "file").touch()
    assert not make_folder_once(tmp_path / "folder", 0o700), "somebody uses it"


def test_what_is_removed_twice_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    _loses_reply(monkeypatch, "unlink", errno.ENOENT)
    remove(tmp_path / "file")
    remove(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_call_is_tried_again_while_the_server_has_lost_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.time, "sleep", lambda seconds: None)
    stale, calls = OSError(errno.ESTALE, "stale"), list[int]()

    def call_of(errors: list[OSError]) -> Callable[[], int]:
        def call() -> int:
            calls.append(1)
            if errors:
                raise errors.pop()
            return 7

        return call

    for count in (0, 1, 3):
        assert retry_stale(call_of([stale] * count)) == 7
    calls.clear()
    with pytest.raises(OSError, match="stale"):
        retry_stale(call_of([stale] * 4))
    assert len(calls) == 4
    with pytest.raises(OSError, match="input"):
        retry_stale(call_of([OSError(errno.EIO, "input")]))
    assert len(calls) == 5


def test_a_stale_file_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_STALE_PAUSE_S", 0.0)
    answers = [errno.ESTALE, errno.ESTALE, 0]

    def read() -> str:
        number = answers.pop(0)
        if number:
            raise OSError(number, os.strerror(number))
        return "text"

    assert retry_stale(read) == "text"
    answers += [errno.ESTALE] * 4
    with pytest.raises(OSError, match="Stale"):
        retry_stale(read)
    answers[:] = [errno.EIO, 0]
    with pytest.raises(OSError, match="Input/output"):
        retry_stale(read)
    assert answers == [0], "another error is not tried again"


def test_a_look_opens_the_folder_and_the_one_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = os.open

    def watched(path: Any, *rest: Any) -> int:
        opened.append(os.fspath(path))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", watched)
    folder = tmp_path / "run"
    folder.mkdir()
    assert look_anew(folder)
    assert opened == [str(tmp_path), str(folder)], "from above: the name of the folder itself may be old"
    assert not is_there(folder / "DONE")
    (folder / "DONE").touch()
    assert is_there(folder / "DONE")
    assert not look_anew(tmp_path / "gone")
    assert not is_there(tmp_path / "gone" / "DONE")
    assert names_in(folder) == ["DONE"]
    assert names_in(tmp_path / "gone") is None


def test_a_link_that_leads_nowhere_is_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert is_there(tmp_path / "link")


def test_a_watch_asks_now_and_then_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(reading, "is_there", lambda path, parents: asked.append(path) or len(asked) > 2)
    watch = Watch(tmp_path / "CANCEL", every_s=0.05)
    assert not watch.has_come()
    assert not watch.has_come()
    assert len(asked) == 1
    deadline = time.monotonic() + 10
    while not watch.has_come():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watch.has_come()
    assert len(asked) == 3


def test_a_name_of_ones_own_fits_and_is_nobody_elses(tmp_path: Path) -> None:
    long = tmp_path / ("ä" * 127 + "x")
    assert len(os.fsencode(long.name)) == 255
    Path(own_name(long)).touch()
    assert len(os.fsencode(Path(own_name(long)).name)) <= 255
    assert str(threading.get_native_id()) in own_name(tmp_path / "a")
    assert own_name(tmp_path / "a") != own_name(tmp_path / "b")


def test_ages_are_of_the_clock_that_stamps_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.utime(path, (time.time() - 100, time.time() - 100))
    assert 99 < age_on_server_s(path) < 110
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        age_on_server_s(tmp_path / "gone")


_MOUNTS = """\
21 1 8:1 / / rw,relatime - ext4 /dev/root rw
30 21 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw,vers=4.2,acdirmax=120
31 21 0:41 / /scratch rw - lustre a@tcp:/scratch rw,flock
32 21 0:42 / /proj\\040ects rw - fuse.sshfs host:/ rw,user_id=0
33 21 0:43 / /nocache rw - nfs server:/x rw,noac
34 21 0:44 / /slow rw - nfs server:/y rw,actimeo=7
35 30 0:45 / /home/local rw - xfs /dev/sdb rw
36 21 0:46 / /beegfs rw - beegfs beegfs_nodev rw
"""


@pytest.mark.parametrize(
    ("folder", "kind", "age_s"),
    [
        ("/home/me/runs", "nfs4", 120.0), ("/scratch/runs", "lustre", 0.0), ("/proj ects/runs", "fuse.sshfs", 60.0),
        ("/nocache/runs", "nfs", 0.0), ("/slow/runs", "nfs", 7.0), ("/home/local/runs", "xfs", 0.0),
        ("/beegfs/runs", "beegfs", 1.0), ("/elsewhere", "ext4", 0.0), ("/homes", "ext4", 0.0),
    ],
)  # fmt: skip
def test_the_mount_tells_how_old_an_answer_may_be(
    folder: str, kind: str, age_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPC_TRAINER_CACHE_AGE_S", raising=False)
    monkeypatch.setattr(Path, "read_text", lambda path, **options: _MOUNTS)
    mount = mount_of(folder)
    assert mount is not None
    assert (mount[1], cache_age_s(folder)) == (kind, age_s)
    monkeypatch.setenv("HPC_TRAINER_CACHE_AGE_S", "12.5")
    assert cache_age_s(folder) == 12.5


def test_a_system_that_does_not_tell_its_mounts_counts_as_nfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path, **options: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert mount_of(tmp_path) is None
    assert cache_age_s(tmp_path) == 60.0


def test_claims_of_threads_of_one_process(tmp_path: Path) -> None:
    """As the watchdog's thread and the main one, which both record the first error."""
    for number in range(50):
        path, won = tmp_path / f"claim-{number}", list[bool]()
        threads = [threading.Thread(target=_claim, args=(path, won)) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(won) == [False, True]


def _claim(path: Path, won: list[bool]) -> None:
    won.append(claim(path, b"x" * 100))
