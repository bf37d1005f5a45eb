"""Where a node keeps its copy of the frozen code, what a killed rank leaves there, and what is removed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc_trainer.launch.frozen_code import frozen_worker, unpacking
from hpc_trainer.launch.frozen_code.frozen_worker import read_archive
from hpc_trainer.launch.frozen_code.unpacking import (
    ensure_unpacked,
    file_system_of,
    find_change,
    hold,
    is_compiled,
    node_places,
    place_code,
    remove_old,
)

FILES = {
    **{f"code/pkg/part{number}.py": ("644", b"x = 1\n" * 500) for number in range(60)},
    "code/pkg/__init__.py": ("644", b""),
    "code/link.py": ("link", b"pkg/part1.py"),
}
OURS = f"hpc_trainer-{os.getuid()}"
WEEK_S = 7 * 86400


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared" / "0123456789ab.zip"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "node"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(unpacking, "node_places", lambda: [str(place)])
    return place


def test_places_are_asked_in_order_and_relative_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", "/job")
    monkeypatch.setenv("TMPDIR", "/mine/")
    assert node_places() == ["/job", "/mine", "/tmp", "/var/tmp"]
    monkeypatch.setenv("SLURM_TMPDIR", "job")
    monkeypatch.delenv("TMPDIR")
    assert node_places() == ["/tmp", "/var/tmp"]


def test_the_copy_lies_in_a_private_folder_of_the_node(archive: Path, node: Path) -> None:
    folder, is_local = place_code(archive, FILES)
    assert (folder, is_local) == (node / OURS / archive.stem, True)
    assert (node / OURS).stat().st_mode & 0o777 == 0o700
    assert find_change(folder, FILES) is None
    assert [*archive.parent.iterdir()] == []


def _is_link(node: Path) -> None:
    (node / "other").mkdir(mode=0o700)
    (node / OURS).symlink_to(node / "other")


def _is_open(node: Path) -> None:
    (node / OURS).mkdir()
    (node / OURS).chmod(0o755)


UNUSABLE = {
    "must be a folder of yours": _is_link,
    "with mode 700": _is_open,
    "others may rename folders in it": lambda node: node.chmod(0o777),
    "No such file": lambda node: node.rmdir(),
    f"{OURS} must be": lambda node: (node / OURS).touch(),
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_a_place_that_others_may_change_is_not_used(
    archive: Path, node: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], reason: str
) -> None:
    UNUSABLE[reason](node)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    folder, is_local = place_code(archive, FILES)
    assert (folder, is_local) == (archive.with_suffix(""), False)
    assert find_change(folder, FILES) is None
    (line,) = capfd.readouterr().err.splitlines()
    assert reason in line
    assert line.endswith(f"It is imported from the shared folder: {folder}.")
    monkeypatch.setenv("SLURM_LOCALID", "3")
    place_code(archive, FILES)
    assert capfd.readouterr().err == "", "one rank of a node says it"


def test_a_sticky_folder_of_all_is_as_tmp(archive: Path, node: Path) -> None:
    node.chmod(0o1777)
    assert place_code(archive, FILES)[1]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_folder_of_somebody_else_is_not_used(archive: Path, node: Path) -> None:
    (node / OURS).mkdir(mode=0o700)
    os.chown(node / OURS, 4242, 4242)
    assert not place_code(archive, FILES)[1]


def test_the_next_place_is_taken(archive: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "node_places", lambda: ["/proc", "/nowhere", str(node)])
    assert place_code(archive, FILES) == (node / OURS / archive.stem, True)


class _Room:
    """What statvfs says of a file system, but for some of it."""

    def __init__(self, real: os.statvfs_result, changes: Mapping[str, int]) -> None:
        self._real, self._changes = real, changes

    def __getattr__(self, name: str) -> object:
        return self._changes.get(name, getattr(self._real, name))


@pytest.mark.parametrize(
    ("changes", "extra", "is_used"),
    [
        ({"f_bavail": 10}, {}, False),
        # Bytecode takes twice as much as its source: room for the files alone is not enough, three times that is.
        ({"f_bavail": 2_900_000, "f_frsize": 1}, {"code/table.txt": ("644", b"x" * 1_000_000)}, False),
        ({"f_bavail": 4_200_000, "f_frsize": 1}, {"code/table.txt": ("644", b"x" * 1_000_000)}, True),
        ({"f_files": 1000, "f_favail": 10}, {}, False),
        ({"f_files": 0, "f_favail": 0}, {}, True),  # btrfs counts none
        ({"f_flag": os.ST_NOEXEC}, {}, True),
        ({"f_flag": os.ST_NOEXEC}, {"code/fast.cpython-311.so": ("644", b"")}, False),
        ({"f_flag": os.ST_NOEXEC}, {"code/run.sh": ("755", b"")}, False),
    ],
)
def test_a_full_or_noexec_disk(
    archive: Path,
    node: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
    extra: dict[str, tuple[str, bytes]],
    is_used: bool,
) -> None:
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: _Room(real(path), changes))
    assert place_code(archive, {**FILES, **extra})[1] == is_used


def test_a_disk_that_fills_while_it_is_unpacked(archive: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = unpacking.unpack

    def full(folder: Path, files: unpacking.Files) -> None:
        real(folder, dict([*files.items()][:20]))
        if node in folder.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        shutil.rmtree(folder)
        real(folder, files)

    monkeypatch.setattr(unpacking, "unpack", full)
    assert place_code(archive, FILES) == (archive.with_suffix(""), False)
    assert [path.name for path in (node / OURS).iterdir()] == [f"{archive.stem}.unpacking"], "nothing half is left"


def test_code_that_something_keeps_changing_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, folder = unpacking.unpack, tmp_path / "code"

    def spoiled(place: Path, files: unpacking.Files) -> None:
        real(place, files)
        (place / "code/pkg/part1.py").chmod(0o600)
        (place / "code/pkg/part1.py").write_text("x = 2\n")

    monkeypatch.setattr(unpacking, "unpack", spoiled)
    with pytest.raises(unpacking.RefusedCodeError, match=r"code/code/pkg/part1.py is not what was submitted, and was"):
        unpacking.ensure_unpacked(folder, FILES, is_local=False)


def test_a_network_file_system_is_no_disk_of_the_node(
    archive: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        f"21 1 8:1 / / rw - ext4 /dev/sda rw\n30 21 0:40 / {node.parent} rw shared:1 - ext4 /dev/sdb rw\n"
        f"31 21 0:41 / {node.parent} rw,relatime - nfs4 host:/x rw\n32 21 0:42 / /with\\040space rw - lustre x rw\n"
    )
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a, **k: lines if str(self).endswith("mountinfo") else real(self, *a, **k)
    )
    assert file_system_of(str(node)) == "nfs4", "the later of two mounts at one place"
    assert file_system_of(f"{node.parent}x") == "ext4"
    assert file_system_of("/with space/sub") == "lustre"
    assert not place_code(archive, FILES)[1]


def test_the_copy_in_use_stays_and_an_unused_one_goes(node: Path) -> None:
    ours = node / OURS
    ours.mkdir(mode=0o700)
    for name in ("used", "unused", "young"):
        ensure_unpacked(ours / name, FILES, is_local=True)
    (ours / ".half.1.tmp").mkdir()
    (ours / "unused.changed-1").mkdir()
    process = multiprocessing.get_context("fork").Process(target=lambda: (hold(ours / "used"), time.sleep(60)))
    process.start()
    try:
        deadline = time.monotonic() + 20
        while not _is_held(ours / "used"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for path in ours.iterdir():
            if path.name != "young":
                os.utime(path, (time.time() - WEEK_S - 60,) * 2)
        remove_old(ours)
        assert sorted(path.name for path in ours.iterdir()) == ["used", "young"]
        assert find_change(ours / "used", FILES) is None
    finally:
        process.kill()
        process.join()
    os.utime(ours / "used", (time.time() - WEEK_S - 60,) * 2)
    assert hold(ours / "young")
    remove_old(ours)
    assert [path.name for path in ours.iterdir()] == ["young"], "a killed process holds nothing"


def _is_held(folder: Path) -> bool:
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-S", "-c", code, folder], capture_output=True, check=False).returncode != 0


def test_a_start_marks_the_copy_as_used(archive: Path, node: Path) -> None:
    folder, _ = place_code(archive, FILES)
    os.utime(folder, (1, 1))
    place_code(archive, FILES)
    assert time.time() - folder.stat().st_mtime < 60
    assert _is_held(folder)


def test_a_copy_that_is_removed_in_the_same_moment_is_unpacked_again(
    archive: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = unpacking.hold, []

    def removing(folder: Path) -> bool:
        if not removed:
            removed.append(folder)
            shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(unpacking, "hold", removing)
    folder, is_local = place_code(archive, FILES)
    assert is_local
    assert find_change(folder, FILES) is None


def test_on_a_nodes_disk_the_others_wait_for_the_bytecode(node: Path) -> None:
    folder = ensure_unpacked(node / "copy", FILES, is_local=True)
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        said = pool.starmap(_compiled, [(folder,)] * 4)
    assert said == [True] * 4
    assert len([*folder.rglob("*.pyc")]) == sum(
        name.endswith(".py") and mode != "link" for name, (mode, _) in FILES.items()
    )


def _compiled(folder: Path) -> bool:
    return is_compiled(folder, FILES, is_local=True)


def _unpacks(node: Path) -> None:
    folder = ensure_unpacked(node / "copy", FILES, is_local=True)
    is_compiled(folder, FILES, is_local=True)
    os._exit(0)


def test_killed_at_any_moment_nothing_blocks_the_next(node: Path) -> None:
    """As often as HPC_TRAINER_TEST_KILLS says, 12 times by default; half of the starts are three at once."""
    seed = int(os.environ.get("HPC_TRAINER_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"HPC_TRAINER_TEST_SEED={seed}")
    draw, context = random.Random(seed), multiprocessing.get_context("fork")
    begin = time.monotonic()
    _run(context.Process(target=_unpacks, args=(node,)))
    usual_s = time.monotonic() - begin
    for number in range(int(os.environ.get("HPC_TRAINER_TEST_KILLS", "12"))):
        shutil.rmtree(node / "copy", ignore_errors=True)
        ranks = [context.Process(target=_unpacks, args=(node,)) for _ in range(1 + 2 * (number % 2))]
        for rank in ranks:
            rank.start()
        time.sleep(draw.uniform(0, usual_s))
        assert ranks[0].pid is not None
        os.kill(ranks[0].pid, signal.SIGKILL)
        begin = time.monotonic()
        folder = ensure_unpacked(node / "copy", FILES, is_local=True)
        waited_s = time.monotonic() - begin
        assert find_change(folder, FILES) is None, (seed, number)
        assert waited_s < unpacking._UNPACK_WAIT_S, (seed, number, "the claim of a killed rank ends with it")
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks[1:]] == [0] * (len(ranks) - 1), (seed, number)
        assert is_compiled(folder, FILES, is_local=True), (seed, number)
    assert not [*node.glob("*.changed-*")]
    for half in node.glob(".*.tmp"):
        os.utime(half, (1, 1))
    remove_old(node)
    assert not [*node.glob(".*.tmp")]


def _run(process: multiprocessing.process.BaseProcess) -> None:
    process.start()
    process.join()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
def test_an_archive_that_this_client_does_not_see_yet_is_opened_again(
    archive: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    archive.write_bytes(b"whole")
    real, late = Path.read_bytes, [code, code]

    def read(self: Path) -> bytes:
        if late:
            raise OSError(late.pop(), "late")
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(frozen_worker.time, "sleep", lambda seconds: None)
    assert frozen_worker._read_whole(archive) == b"whole"


def test_an_archive_that_is_gone_is_refused_at_once(archive: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(unpacking.RefusedCodeError, match="cannot be read"):
        read_archive(archive)
    assert time.monotonic() - begin < 5
