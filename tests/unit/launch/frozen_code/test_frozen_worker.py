"""How a worker starts from frozen code: unpacked once, checked, and first on the path whatever else is there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hpc_trainer
from hpc_trainer.launch.frozen_code import import_path
from hpc_trainer.launch.frozen_code.archive import store_code
from hpc_trainer.launch.frozen_code.frozen_worker import check_trusted, manifest_digest, read_archive
from hpc_trainer.launch.frozen_code.import_path import frozen_path
from hpc_trainer.launch.frozen_code.unpacking import (
    RefusedCodeError,
    ensure_unpacked,
    find_change,
    is_compiled,
    take,
    unpack,
)
from hpc_trainer.record.layout import SweepPaths
from tests.unit.launch.frozen_code.projects import frozen, make_checkout, write_files

# Stands in for hpc_trainer's worker: says which code was found, and with which path.
WORKER = """
import os, signal, subprocess, sys
import my_lab.net, hpc_trainer
print(my_lab.net.__file__, hpc_trainer.__file__, *sys.argv[1:], sep="\\n")
child = "import my_lab.net; print(my_lab.net.__file__)"
print(subprocess.run([sys.executable, "-c", child], cwd="/", capture_output=True, text=True).stdout, end="")
try:
    import sibling
except ImportError:
    print("no sibling")
else:
    print(sibling.__file__)
print(*(each.name for each in signal.sigpending()))
sys.exit(5)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with my_lab and an hpc_trainer of its own, small enough to see what is imported."""
    folder = make_checkout(tmp_path / "project")
    write_files(folder, {"hpc_trainer/__init__.py": "", "hpc_trainer/worker/__main__.py": WORKER})
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def archive(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hpc_trainer, "__file__", str(project / "hpc_trainer" / "__init__.py"))
    runs = project / "runs"
    (runs / "sweep").mkdir(parents=True)
    return store_code(SweepPaths(runs / "sweep"), frozen(runs))


@pytest.fixture(autouse=True)
def node(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder on "this node's disk" in which a worker unpacks."""
    place = tmp_path_factory.mktemp("node")
    monkeypatch.setenv("SLURM_TMPDIR", str(place))
    return place / f"hpc_trainer-{os.getuid()}"


def _start(archive: Path, cwd: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-u", archive, *argv], cwd=cwd, env={**kept, **environ}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_the_frozen_code_runs_whatever_happened_to_the_other(project: Path, archive: Path, node: Path) -> None:
    write_files(
        project,
        {"my_lab/net.py": "raise RuntimeError('edited')\n", "sibling.py": "", "hpc_trainer/worker/__main__.py": "x("},
    )
    for number, environ in enumerate(({}, {"PYTHONPATH": str(project)}, {"PYTHONPATH": f"{project}/my_lab:/nowhere"})):
        done = _start(archive, project if number else Path("/"), "--array", "x y", **environ)
        assert done.returncode == 5, done.stderr
        folder = node / archive.stem
        assert done.stdout.splitlines() == [
            f"{folder}/project/my_lab/net.py", f"{folder}/project/hpc_trainer/__init__.py", "--array", "x y",
            f"{folder}/project/my_lab/net.py", "no sibling", "",
        ]  # fmt: skip


def test_it_starts_with_the_checkout_gone(project: Path, archive: Path, tmp_path: Path, node: Path) -> None:
    sweep = archive.parents[1].rename(tmp_path / "sweep")
    project.rename(tmp_path / "gone")
    done = _start(sweep / "code" / archive.name, Path("/"))
    assert done.returncode == 5, done.stderr
    assert done.stdout.startswith(f"{node}/{archive.stem}/project/my_lab/net.py\n")
    assert [*(sweep / "code").iterdir()] == [sweep / "code" / archive.name], "nothing is written there"


def test_the_current_folder_is_on_the_path_as_before_if_it_is_not_frozen(
    project: Path, archive: Path, tmp_path: Path
) -> None:
    write_files(tmp_path / "elsewhere", {"sibling.py": ""})
    assert _start(archive, tmp_path / "elsewhere").stdout.splitlines()[-2] == f"{tmp_path}/elsewhere/sibling.py"


def test_nothing_in_the_current_folder_stands_in_for_what_opens_the_archive(project: Path, archive: Path) -> None:
    write_files(project, {"zipfile.py": "raise SystemExit('of the current folder')\n"})
    for path in (str(project), "."):
        done = _start(archive, project, PYTHONPATH=path)
        assert done.returncode == 5, done.stderr


def test_only_folders_that_others_may_write_come_behind_the_standard_library(
    project: Path, archive: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    write_files(mine, {"zipfile.py": "raise SystemExit('the one that was asked for')\n"})
    for mode in (0o700, 0o755):
        mine.chmod(mode)
        assert "the one that was asked for" in _start(archive, project, PYTHONPATH=str(mine)).stderr
    mine.chmod(0o777)
    assert _start(archive, project, PYTHONPATH=str(mine)).returncode == 5


@pytest.mark.parametrize(
    ("uid", "gid", "name", "members", "others"),
    [
        (1000, 1000, "anna", [], False),
        (1000, 1000, "anna", ["anna"], False),
        (1000, 1000, "anna", ["anna", "ben"], True),
        (1000, 1000, "users", [], True),
        (1000, 100, "anna", [], True),
        (0, 1000, "anna", [], True),
    ],
)
def test_only_a_private_group_counts_as_the_owner(
    uid: int, gid: int, name: str, members: list[str], others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = SimpleNamespace(pw_gid=1000, pw_name="anna")
    group = SimpleNamespace(gr_gid=gid, gr_name=name, gr_mem=members)
    monkeypatch.setattr(import_path, "pwd", SimpleNamespace(getpwuid=lambda _: account))
    monkeypatch.setattr(import_path, "grp", SimpleNamespace(getgrgid=lambda _: group))
    info: Any = SimpleNamespace(st_mode=0o40770, st_uid=uid, st_gid=gid)
    assert import_path._others_may_write(info) is others


def test_a_changed_copy_is_set_aside_and_unpacked_anew(project: Path, archive: Path, node: Path) -> None:
    folder = node / archive.stem
    assert _start(archive, project).returncode == 5
    net = folder / "project" / "my_lab" / "net.py"
    assert net.stat().st_mode & 0o222 == 0
    for damage in (
        lambda: (net.chmod(0o600), net.write_text("raise RuntimeError('edited')\n")),
        net.unlink,
        lambda: (net.unlink(), net.symlink_to("/dev/null")),
        lambda: write_files(folder, {"project/json.py": "raise RuntimeError('added')\n"}),
    ):
        damage()
        done = _start(archive, project)
        assert done.returncode == 5
        assert "is not what was submitted; unpacking" in done.stderr
        assert net.read_text() == "class Net: ...\n"
    assert len(list(node.glob("*.changed-*"))) == 4
    assert (folder / "project" / "my_lab" / "__pycache__").is_dir(), "what Python compiled is kept, and no change"
    assert _start(archive, project).stderr == ""


def test_code_finds_data_beside_itself_and_may_write_there(project: Path, archive: Path, node: Path) -> None:
    write_files(project, {".gitignore": "/data/\n", "data/words.txt": "a b c"})
    archive = store_code(SweepPaths(archive.parents[1]), frozen(project / "runs"))
    copy = node / archive.stem / "project"
    assert _start(archive, project).returncode == 5
    assert (copy / "data" / "words.txt").read_text() == "a b c"
    (copy / "data" / "words.txt").write_text("d")
    assert (project / "data" / "words.txt").read_text() == "d"
    write_files(copy, {"my_lab/results/1.json": "{}"})
    (project / "data" / "words.txt").unlink()
    (project / "data").rmdir()  # gone, or not mounted on this node
    done = _start(archive, project)
    assert (done.returncode, done.stderr) == (5, "")
    assert (copy / "my_lab" / "results" / "1.json").exists(), "the copy was not replaced"


# Its bytecode takes 20 times as much room as its lines.
MANY = "class Net: ...\n" + "".join(f"def f{number}(): pass\n" for number in range(800))


def _bytecode(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.pyc")}


def test_a_disk_that_fills_in_the_first_start_costs_no_other(project: Path, archive: Path, node: Path) -> None:
    """Many releases of Python put bytecode in place that a full disk has cut, and every later import fails at it."""
    write_files(project, {"my_lab/net.py": MANY})
    archive = store_code(SweepPaths(archive.parents[1]), frozen(project / "runs"))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    small = max(len(MANY), archive.stat().st_size) + 1_000
    full = subprocess.run(
        [sys.executable, archive], cwd="/", env=kept, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (small, small)),
    )  # fmt: skip
    assert full.returncode == 5, full.stderr
    assert all(len(found) < small for found in _bytecode(node / archive.stem).values()), "cut, and in place"
    done = _start(archive, Path("/"))
    assert (done.returncode, done.stderr) == (5, "")
    assert max(map(len, _bytecode(node / archive.stem).values())) > small


def test_bytecode_is_there_before_the_first_import_and_nobody_adds_any(archive: Path, node: Path) -> None:
    _, files = read_archive(archive)
    node.mkdir(mode=0o700)
    folder = ensure_unpacked(node / archive.stem, files, is_local=True)
    assert is_compiled(folder, files, is_local=True)
    before = _bytecode(node / archive.stem)
    modules = [name for name in files if name.endswith(".py")]
    assert sorted(before) == sorted(
        str(Path(importlib.util.cache_from_source(str(folder / name))).relative_to(folder)) for name in modules
    )
    assert _start(archive, Path("/")).returncode == 5
    assert _bytecode(node / archive.stem) == before
    assert find_change(folder, files) is None


def test_a_module_that_cannot_be_compiled_has_no_bytecode(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"old.py": ("644", b"print 'x'\n"), "null.py": ("644", b"x = '\0'\n"), "odd.py": ("644", b"x = '\\d'\n")}
    unpack(tmp_path / "code", files)
    assert is_compiled(tmp_path / "code", files, is_local=True)
    assert [path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")] == ["odd"]
    assert capfd.readouterr() == ("", ""), "its warnings are for who imports it"


def test_on_a_shared_folder_one_rank_compiles_and_no_other_waits_for_it(tmp_path: Path) -> None:
    files = {"one.py": ("644", b"x = 1\n")}
    folder, claim = tmp_path / "code", tmp_path / "code.compiling"
    unpack(folder, files)
    claim.touch()
    assert not is_compiled(folder, files, is_local=False)
    assert not [*tmp_path.rglob("*.pyc")]
    os.utime(claim, (time.time() - 301,) * 2)  # whoever took it was killed
    assert is_compiled(folder, files, is_local=False)
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


@pytest.mark.parametrize("bits", [range(5, 6), pytest.param(range(8), marks=pytest.mark.long)], ids=["one", "all"])
def test_a_flipped_bit_of_the_archive_changes_no_code(archive: Path, bits: range) -> None:
    code, whole = read_archive(archive), archive.read_bytes()
    with zipfile.ZipFile(archive) as file:
        # What stands between the files: zipfile raises nine kinds of errors for it. Their content has its digest.
        headers = [(info.header_offset, info.header_offset + 30 + len(info.filename)) for info in file.infolist()]
        places = [at for start, end in [*headers, (file.start_dir, len(whole))] for at in range(start, end)]
    archive.chmod(0o600)
    num_refused = 0
    for at in places:
        for bit in bits:
            archive.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            try:
                assert read_archive(archive) == code, (at, bit)  # nobody reads the date of a file
            except RefusedCodeError:
                num_refused += 1
    assert num_refused > len(places) * len(bits) / 8


def test_the_files_that_open_it_have_their_digests_too(archive: Path) -> None:
    whole = archive.read_bytes()
    for name in ("__main__.py", "hpc_trainer_import_path.py", "hpc_trainer_unpacking.py"):
        changed = _packed_anew(archive, archive, {name: b"raise SystemExit(0)\n"})
        with pytest.raises(RefusedCodeError, match=name):
            read_archive(changed)
        archive.write_bytes(whole)


def test_older_archives_have_fewer_files_that_open_them(archive: Path, tmp_path: Path) -> None:
    manifest, files = read_archive(archive)
    changes: dict[str, bytes | None] = {}
    for name in ("unpacking", "import_path"):  # that of the first 0.2.0, and of 0.1.0
        del manifest[name]
        changes |= {f"hpc_trainer_{name}.py": None, "manifest.json": json.dumps(manifest).encode()}
        old = tmp_path / f"{manifest_digest(manifest)[:12]}.zip"
        _packed_anew(archive, old, changes)
        assert read_archive(old) == (manifest, files)


def _packed_anew(archive: Path, place: Path, changes: dict[str, bytes | None]) -> Path:
    """The archive with other contents of some members; None: without it."""
    with zipfile.ZipFile(archive) as file:
        members = {**{name: file.read(name) for name in file.namelist()}, **changes}
    packed = place.with_suffix(".packed")
    with zipfile.ZipFile(packed, "w") as file:
        for name, content in members.items():
            if content is not None:
                file.writestr(name, content)
    return packed.rename(place)


def test_many_ranks_at_once_unpack_one_copy(project: Path, archive: Path, node: Path) -> None:
    command = [sys.executable, archive]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert (rank.returncode, errors) == (5, "")
    assert [*archive.parent.iterdir()] == [archive]
    assert [path.name for path in node.iterdir() if path.is_dir()] == [archive.stem]


def test_a_stop_signal_waits_for_the_workers_handlers(project: Path, archive: Path, node: Path) -> None:
    node.mkdir(mode=0o700)
    give_back = take(node / f"{archive.stem}.unpacking", is_local=True)  # it waits for another rank that unpacks
    assert give_back is not None
    rank = subprocess.Popen([sys.executable, archive], stdout=subprocess.PIPE, text=True)
    try:
        status = Path(f"/proc/{rank.pid}/status")
        deadline = time.monotonic() + 20
        while not int(re.search(r"SigBlk:\s*(\w+)", status.read_text()).group(1), 16) >> (signal.SIGTERM - 1) & 1:
            assert time.monotonic() < deadline, "SIGTERM is not held back"
            time.sleep(0.01)
        rank.send_signal(signal.SIGTERM)
        give_back()
        output, _ = rank.communicate(timeout=60)
    finally:
        rank.kill()
    assert (rank.returncode, output.splitlines()[-1]) == (5, "SIGTERM")


def test_on_a_shared_folder_a_claim_of_a_killed_rank_delays_and_no_more(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_trainer.launch.frozen_code.unpacking._UNPACK_WAIT_S", 0.2)
    archive.with_suffix(".unpacking").touch()
    (archive.parent / f".{archive.stem}.dead.tmp").mkdir()
    _, files = read_archive(archive)
    folder = ensure_unpacked(archive.with_suffix(""), files, is_local=False)
    assert find_change(folder, files) is None
    assert not archive.with_suffix(".unpacking").exists()


def test_what_others_may_write_is_refused(project: Path, archive: Path) -> None:
    for path in (archive, archive.parent, archive.parents[1]):
        mode = path.stat().st_mode & 0o777
        path.chmod(mode | 0o020)
        done = _start(archive, project)
        assert done.returncode == 78, "exit 78: never retried"
        assert "others may write it" in done.stderr
        path.chmod(mode)
    link = archive.with_name("link.zip")
    link.symlink_to(archive)
    with pytest.raises(RefusedCodeError, match="symbolic link"):
        check_trusted(link)


def test_an_archive_under_another_digest_is_refused(project: Path, archive: Path) -> None:
    other = archive.rename(archive.with_name("0123456789ab.zip"))
    done = _start(other, project)
    assert done.returncode == 78
    assert "was changed: its digest is" in done.stderr
    assert "submit again" in done.stderr


def _root(source: str, **packages: str) -> dict[str, object]:
    return {"name": source.rsplit("/", 1)[-1], "source": source, "packages": packages}


def test_the_path_keeps_its_order(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    write_files(
        copy, {"lab/src/pkg/__init__.py": "", "lab/top.py": "", "ours/hpc_trainer/__init__.py": "", "lib/tool.py": ""}
    )
    roots = [_root("/home/me/lab", pkg="src"), _root("/home/me/lab/vendor/lib", tool="."), _root("/opt/ours")]
    given = ["/home/me/lab", "/usr/lib/python3", "/opt/ours/", "/home/me/lab/src", "/home/me/lab/gone",
             "/home/me/laboratory", "/home/me/lab/vendor/lib"]  # fmt: skip
    assert frozen_path(given, copy, roots) == [
        f"{copy}/lab", "/usr/lib/python3", f"{copy}/ours", f"{copy}/lab/src", "/home/me/laboratory", f"{copy}/lib",
    ]  # fmt: skip


def test_a_frozen_package_wins_over_one_that_is_installed(tmp_path: Path) -> None:
    write_files(tmp_path / "site-packages", {"pkg/__init__.py": ""})
    write_files(tmp_path / "copy", {"lab/pkg/__init__.py": ""})
    path = [str(tmp_path / "site-packages")]
    assert frozen_path(path, tmp_path / "copy", [_root("/home/me/lab", pkg=".")]) == [f"{tmp_path}/copy/lab", *path]


def test_an_environment_inside_the_project_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.venv` in the checkout, as `make demo` has it: what pip installed is not frozen, and must be found."""
    project, copy = tmp_path / "project", tmp_path / "code" / "abc"
    packages = project / ".venv" / "lib" / "python3.11" / "site-packages"
    dynload = project / ".venv" / "lib" / "python3.11" / "lib-dynload"
    for folder in (packages, dynload, copy / "project"):
        folder.mkdir(parents=True)
    roots = [{"source": str(project), "name": "project", "packages": {}}]
    found = frozen_path([str(project), str(packages), "/usr/lib"], copy, roots)
    assert found == [str(copy / "project"), str(packages), "/usr/lib"]
    assert frozen_path([str(dynload)], copy, roots) == [], "another environment's"
    monkeypatch.setattr(sys, "prefix", str(project / ".venv"))
    assert frozen_path([str(dynload)], copy, roots) == [str(dynload)], "this Python's own"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert frozen_path([str(project)], copy, roots) == [str(copy / "project")], "a project inside of an environment"
