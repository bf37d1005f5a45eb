"""Small files are old or new, never torn; lines are whole; files that others could have changed are refused."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from hpc_trainer.errors import RunStateError, UntrustedFileError
from hpc_trainer.record import files
from hpc_trainer.record.files import (
    OwnLines,
    append_lines,
    append_texts,
    set_umask,
    whole_file,
    write_atomic,
    write_json,
    write_marker,
)
from hpc_trainer.record.reading import read_json, read_lines
from hpc_trainer.record.trust import check_place, check_trusted


def test_a_file_that_was_closed_is_opened_again_by_the_next_append(tmp_path: Path) -> None:
    lines = OwnLines(tmp_path / "lines.jsonl")
    for number in range(3):
        lines.append([{"number": number}])
        lines.close()
        lines.close()  # a second time: nothing more to close
    assert [line["number"] for line in read_lines(tmp_path / "lines.jsonl")] == [0, 1, 2]


def test_numbers_that_json_lacks_are_words(tmp_path: Path) -> None:
    inf = float("inf")
    write_json(tmp_path / "file", {"loss": float("nan"), "bounds": [-inf, inf, 1.5]})
    assert json.loads((tmp_path / "file").read_text()) == {"loss": "NaN", "bounds": ["-Infinity", "Infinity", 1.5]}


_WRITER = Path(__file__).with_name("atomic_writer.py")


def test_a_writer_that_is_killed_leaves_the_old_text_or_the_new_one(tmp_path: Path) -> None:
    path, size, chance = tmp_path / "small.json", 200_000, random.Random(0)
    write_atomic(path, "z" * size)
    seen = set()
    for _ in range(20):
        # fork is cheaper than a new Python: the writer is a loop over the real function.
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for letter in "abcdefgh":
                        write_atomic(path, letter * size)
            finally:
                os._exit(1)
        reads = 0
        until = time.monotonic() + chance.uniform(0.005, 0.02)
        while time.monotonic() < until or reads == 0:
            _assert_whole(path, size)
            reads += 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.add(_assert_whole(path, size))
    assert seen - {"z"}, "no writer got as far as writing"


def _assert_whole(path: Path, size: int) -> str:
    text = path.read_text()
    assert len(text) == size
    assert len(set(text)) == 1, f"torn: {sorted(set(text))}"
    return text[0]


def test_a_writer_process_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    writer = subprocess.Popen([sys.executable, str(_WRITER), str(path), "100000"])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        writer.kill()
        writer.wait()
    _assert_whole(path, 100_000)


def test_write_atomic_goes_through_a_name_in_the_same_folder_and_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize("sync", [True, False])
def test_a_refused_write_leaves_nothing_beside_the_old(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "x.json"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(path, {"a": 1}, sync=sync)
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("sync", [True, False])
def test_a_marker_is_there_or_not_and_the_first_one_stays(tmp_path: Path, sync: bool) -> None:
    set_umask(False)
    marker = tmp_path / "CANCEL"
    write_marker(marker, sync=sync)
    told = read_json(marker)
    assert told is not None
    assert time.time() - told["time"] < 60
    assert marker.stat().st_mode & 0o777 == 0o600
    write_marker(marker, sync=sync)
    assert read_json(marker) == told
    assert [each.name for each in tmp_path.iterdir()] == ["CANCEL"]
    with pytest.raises(FileNotFoundError):
        write_marker(tmp_path / "no folder" / "CANCEL", sync=sync)


def test_a_marker_like_another_is_a_name_of_the_same_file_where_that_is_possible(tmp_path: Path) -> None:
    markers = [tmp_path / name / "CANCEL" for name in ("first", "second", "own", "lost")]
    for marker in markers:
        marker.parent.mkdir()
    first, second, own, lost = markers
    assert write_marker(first, {"with_sweep": True}, sync=False)
    assert write_marker(second, {"with_sweep": True}, sync=False, like=first)
    assert second.samefile(first)
    assert write_marker(own)
    told = read_json(own)
    assert not write_marker(own, {"with_sweep": True}, sync=False, like=second)
    assert read_json(own) == told
    first.unlink()  # by a retry of that run in this moment
    assert write_marker(lost, {"with_sweep": True}, sync=False, like=first)
    assert (read_json(lost) or {})["with_sweep"] is True
    assert lost.stat().st_nlink == 1
    with pytest.raises(FileNotFoundError):
        write_marker(tmp_path / "no folder" / "CANCEL", like=second)


def test_lines_are_appended_in_order(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_lines(path, [{"n": 0}, {"n": 1}])
    append_lines(path, [])
    append_lines(path, [{"n": 2, "text": "two\nlines\u2028and more"}])
    assert [record["n"] for record in read_lines(path)] == [0, 1, 2]
    assert path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("torn", ['{"n": 9, "te', '{"n": 9', "{", '{"n": "é'])
def test_a_torn_line_spoils_itself_only(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "x.jsonl"
    append_lines(path, [{"n": 0}])
    with path.open("ab") as file:
        file.write(torn.encode()[:-1] if torn.endswith("é") else torn.encode())
    assert [record["n"] for record in read_lines(path)] == [0]
    append_lines(path, [{"n": 1}])
    append_lines(path, [{"n": 2}])
    assert [record["n"] for record in read_lines(path)] == [0, 1, 2]


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n[1]\n"x"\n{"n": 1}\nnull\n')
    assert list(read_lines(path)) == [{"n": 1}]


def test_many_writers_at_once_lose_no_line(tmp_path: Path) -> None:
    path, children = tmp_path / "x.jsonl", []
    for writer in range(4):
        child = os.fork()
        if child == 0:
            try:
                for number in range(50):
                    append_lines(path, [{"writer": writer, "n": number, "pad": "x" * 500}], sync=False)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    records = list(read_lines(path))
    assert len(records) == 200
    for writer in range(4):
        assert [record["n"] for record in records if record["writer"] == writer] == list(range(50))


def test_no_file_is_nothing(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none")) == []
    assert read_json(tmp_path / "none") is None
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "torn").write_text('{"a"')
    assert read_json(tmp_path / "list") is None
    assert read_json(tmp_path / "torn") is None


@pytest.mark.parametrize(("group_readable", "folder_mode", "file_mode"), [(False, 0o700, 0o600), (True, 0o750, 0o640)])
def test_new_folders_and_files_are_private(
    tmp_path: Path, group_readable: bool, folder_mode: int, file_mode: int
) -> None:
    set_umask(group_readable)
    folder = tmp_path / "new"
    folder.mkdir()
    write_json(folder / "a.json", {})
    append_lines(folder / "b.jsonl", [{}])
    assert folder.stat().st_mode & 0o777 == folder_mode
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {file_mode}


# --- trust ---


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o700, 0o755, 0o400])
def test_what_only_we_may_write_is_trusted(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "x"
    path.touch()
    path.chmod(mode)
    check_trusted(path)


@pytest.mark.parametrize("mode", [0o620, 0o660, 0o602, 0o666, 0o777, 0o770])
@pytest.mark.parametrize("is_folder", [False, True])
def test_what_others_may_write_is_refused(tmp_path: Path, mode: int, is_folder: bool) -> None:
    path = tmp_path / "x"
    path.mkdir() if is_folder else path.touch()
    path.chmod(mode)
    with pytest.raises(UntrustedFileError, match=rf"mode {mode:o}.*chmod go-w {path}"):
        check_trusted(path)


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        check_trusted(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(json.dumps({}))
    os.chown(path, 12345, -1)
    with pytest.raises(UntrustedFileError, match="belongs to user 12345"):
        check_trusted(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunStateError, match=r"none: no such file") as caught:
        check_trusted(tmp_path / "none")
    assert not isinstance(caught.value, UntrustedFileError)


# --- the place of a sweep ---


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "runs" / "sweep"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o2770, 0o2775, 0o1777, 0o3777])
def test_a_folder_of_sweeps_that_only_owners_or_a_team_may_change_is_fine(sweep: Path, mode: int) -> None:
    sweep.parent.chmod(mode)
    check_place(sweep)


@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o702, 0o703])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_that_everybody_may_rename_in_is_refused(sweep: Path, mode: int, depth: int) -> None:
    above = sweep.parents[depth]
    above.chmod(mode)
    with pytest.raises(
        UntrustedFileError, match=rf"{above} has mode {mode:o}: everybody may rename.*chmod o-w {above}"
    ):
        check_place(sweep)


def test_the_sweep_folder_itself_must_be_ours(sweep: Path) -> None:
    sweep.chmod(0o770)
    with pytest.raises(UntrustedFileError, match="mode 770"):
        check_place(sweep)
    sweep.chmod(0o700)
    sweep.rename(sweep.with_name("real"))
    sweep.symlink_to(sweep.with_name("real"))
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        check_place(sweep)


def test_a_linked_folder_of_sweeps_is_judged_by_where_it_leads(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sweep.parent)
    check_place(tmp_path / "link" / "sweep")
    sweep.parent.chmod(0o777)
    with pytest.raises(UntrustedFileError, match=str(sweep.parent)):
        check_place(tmp_path / "link" / "sweep")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_above_the_folder_of_sweeps_only_what_is_ours_is_looked_at(sweep: Path) -> None:
    os.chown(sweep.parents[1], 12345, -1)
    sweep.parents[1].chmod(0o777)
    check_place(sweep)  # the site's scratch: nobody here can mend it
    os.chown(sweep.parent, 12345, -1)
    sweep.parent.chmod(0o777)
    with pytest.raises(UntrustedFileError, match="everybody may rename"):
        check_place(sweep)  # the folder of sweeps itself is the person's choice


def test_a_large_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    path.write_bytes(b"old")

    def write_half() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            assert path.read_bytes() == b"old"
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_half()
    assert [each.name for each in tmp_path.iterdir()] == ["rows.npy"]
    assert path.read_bytes() == b"old"
    with whole_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_is_full_is_told_with_the_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: Python's own words name no file either."""
    path, before = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)

    def whole() -> None:
        with whole_file(path) as file:
            file.write(b"x" * 1000)

    for write in (lambda: write_atomic(path, "x" * 1000), lambda: append_texts(path, ["x" * 1000 + "\n"] * 2), whole):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(OSError, match=re.escape(str(path))):
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _acl(*permissions: int) -> bytes:
    """Return an ACL with permissions of the owner, user 65534, the owner's group, the mask and all others."""
    tags = [(0x01, 2**32 - 1), (0x02, 65534), (0x04, 2**32 - 1), (0x10, 2**32 - 1), (0x20, 2**32 - 1)]
    entries = [struct.pack("<HHI", tag, allowed, who) for (tag, who), allowed in zip(tags, permissions, strict=True)]
    return struct.pack("<I", 2) + b"".join(entries)


@pytest.mark.parametrize(
    ("umask", "narrowed"), [(0o027, (7, 5, 5, 5, 0)), (0o077, (7, 0, 0, 0, 0)), (0o022, (7, 5, 5, 5, 5))]
)
def test_a_default_acl_gives_new_files_what_the_umask_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, narrowed: tuple[int, ...]
) -> None:
    monkeypatch.setattr(files, "_umask", umask)
    try:
        os.setxattr(tmp_path, files.DEFAULT_ACL, _acl(7, 7, 7, 7, 7))
    except OSError as error:
        pytest.skip(f"the file system has no ACLs: {error}")
    files.make_folder(tmp_path)
    assert os.getxattr(tmp_path, files.DEFAULT_ACL) == _acl(*narrowed)
    files.make_folder(tmp_path / "new" / "newer")
    for folder in (tmp_path / "new", tmp_path / "new" / "newer"):
        assert os.getxattr(folder, files.DEFAULT_ACL) == _acl(*narrowed)
        assert stat.S_IMODE(folder.stat().st_mode) & umask == 0


@pytest.mark.parametrize("umask", [0o077, 0o027])
def test_folders_and_their_parents_have_the_mode_that_the_umask_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setattr(files, "_umask", umask)
    before = os.umask(0)
    try:
        files.make_folder(tmp_path / "a" / "b")
        files.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o777 & ~umask] * 2
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        files.make_folder(tmp_path / "file")


def test_a_marker_in_a_folder_that_cannot_be_reached_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ELOOP))):
        write_marker(tmp_path / "loop" / "CANCEL")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "loop"):
        write_marker(tmp_path / name)  # whatever has the name, the marker exists


@pytest.mark.parametrize(("mode", "kept"), [(0o666, 0o644), (0o777, 0o644), (0o640, 0o640), (0o600, 0o600)])
def test_who_may_read_the_code_may_read_its_bytecode(tmp_path: Path, mode: int, kept: int) -> None:
    tmp_path.chmod(0o751)
    loader, path = SourceFileLoader("m", str(tmp_path / "m.py")), tmp_path / "__pycache__" / "m.pyc"
    before = os.umask(0o077)
    try:
        files._keep_bytecode(loader, str(path), b"code", _mode=mode)
    finally:
        os.umask(before)
    assert path.read_bytes() == b"code"
    assert stat.S_IMODE(path.stat().st_mode) == kept
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o751


def test_what_others_planted_under_a_private_name_is_refused_and_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("left by a killed process")
    descriptor = files.open_own(own)
    assert os.fstat(descriptor).st_size == 0
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    os.link(own, tmp_path / "linked")
    (tmp_path / "symbolic").symlink_to(own)
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("linked", errno.EEXIST), ("symbolic", errno.ELOOP), ("pipe", errno.ENXIO)):
        with pytest.raises(OSError, match=rf"\[Errno {error}\]"):
            files.open_own(tmp_path / name)
