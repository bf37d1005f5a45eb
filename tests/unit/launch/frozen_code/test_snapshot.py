"""What of a person's folder is frozen, and how it comes into the run folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import hpc_trainer
from hpc_trainer.config.schema.cluster import SnapshotMode
from hpc_trainer.config.schema.optim import CustomOptimConfig
from hpc_trainer.errors import ConfigError, SubmitError, UntrustedFileError
from hpc_trainer.launch.frozen_code.archive import code_revision, shared_code, store_code
from hpc_trainer.launch.frozen_code.frozen_worker import read_archive
from hpc_trainer.launch.frozen_code.snapshot import is_same_code, read_code
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.tidy.cleaning import drop_unused_code
from tests.unit.launch.frozen_code.projects import frozen, git, links_of, make_checkout, names, write_files
from tests.unit.record.builders import make_spec, make_specs

PACKAGE = ["my_lab/__init__.py", "my_lab/net.py", "setup.py"]
MODES = [SnapshotMode.git, SnapshotMode.copy]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout, and the folder that the command is given in."""
    folder = make_checkout(tmp_path / "project")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def runs(project: Path) -> Path:
    folder = project / "runs"
    (folder / "sweep").mkdir(parents=True)
    return folder


# --- git ---


def test_the_working_tree_is_frozen_not_the_commit(project: Path, runs: Path) -> None:
    (project / "my_lab" / "net.py").write_text("changed = True\n")
    (project / "setup.py").unlink()
    write_files(project, {"my_lab/staged.py": "", "my_lab/new.py": "", "my_lab/ignored.py": ""})
    (project / ".gitignore").write_text("ignored.py\n")
    git(project, "add", "my_lab/staged.py")
    code = frozen(runs)
    assert names(code, "project") == [
        ".gitignore", "my_lab/__init__.py", "my_lab/net.py", "my_lab/new.py", "my_lab/staged.py",
    ]  # fmt: skip
    assert code.contents["project/my_lab/net.py"] == ("644", b"changed = True\n")


def test_ignored_files_that_python_needs_are_frozen(project: Path, runs: Path) -> None:
    (project / ".gitignore").write_text("*.so\n_version.py\n*_pb2.py\nsettings.py\nbuild/\n")
    write_files(
        project,
        {"my_lab/_version.py": "", "my_lab/x_pb2.py": "", "my_lab/settings.py": "token = 1\n", "build/_version.py": ""},
    )
    (project / "my_lab" / "fast.so").touch()
    new = set(names(frozen(runs), "project")) - {".gitignore", *PACKAGE}
    assert new == {"my_lab/_version.py", "my_lab/x_pb2.py", "my_lab/fast.so"}
    new = set(names(frozen(runs, include=["settings.py"]), "project")) - {".gitignore", *PACKAGE}
    assert new == {"my_lab/settings.py"}


def test_a_checkout_without_commits(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "young", {"my_lab.py": "class Net: ...\n"})
    git(tmp_path / "young", "init", "-q")
    monkeypatch.chdir(tmp_path / "young")
    assert names(frozen(runs, "my_lab.Net"), "young") == ["my_lab.py"]


def test_submodules_and_clones_inside_are_frozen(project: Path, runs: Path, tmp_path: Path) -> None:
    other = make_checkout(tmp_path / "other")
    git(project, "submodule", "add", "-q", str(other), "vendor/other")
    git(project, "clone", "-q", str(other), "clone")
    (project / "vendor/other/my_lab/net.py").write_text("changed inside the submodule\n")
    (project / "vendor/other/.env").write_text("TOKEN=1\n")
    code = frozen(runs, exclude=["clone/setup.py"])
    listed = names(code, "project")
    assert {f"vendor/other/{name}" for name in PACKAGE} <= set(listed)
    assert {name for name in listed if name.startswith("clone/")} == {f"clone/{name}" for name in PACKAGE[:2]}
    assert code.contents["project/vendor/other/my_lab/net.py"][1] == b"changed inside the submodule\n"
    assert not [name for name in listed if name.endswith((".env", "/.git"))]


def test_hostile_names_stay_names(project: Path, runs: Path, tmp_path: Path) -> None:
    odd = ["-rf", "a\nb.py", "it's $(touch pwned).py", 'q"\\.py', " lead", "ü.py", os.fsdecode(b"\xff.py"), "*?[x]"]
    for name in odd:
        (project / "my_lab" / name).write_text(repr(name))
    code = frozen(runs)
    assert set(names(code, "project")) == {*PACKAGE, *(f"my_lab/{name}" for name in odd)}
    archive = store_code(SweepPaths(runs / "sweep"), code)
    done = subprocess.run(
        [sys.executable, archive, "--unpack", tmp_path / "out"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {each.name for each in (tmp_path / "out/project/my_lab").iterdir()} == {
        "__init__.py", "net.py", *odd,
    }  # fmt: skip
    assert not list(tmp_path.rglob("pwned"))


def test_the_package_of_a_loop_of_ones_own_is_frozen(project: Path, runs: Path) -> None:
    write_files(project, {"my_lab/loop.py": "def main(config, run): ...\n"})
    spec = make_spec("cluster=local", train__main="my_lab.loop.main", trust=["my_lab"])
    code = read_code([spec], runs)
    assert code is not None
    assert set(names(code, "project")) == {*PACKAGE, "my_lab/loop.py"}


def test_a_git_hook_around_the_command_is_not_seen(
    project: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkout(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    write_files(project, {"my_lab/mine.py": ""})
    assert "my_lab/mine.py" in names(frozen(runs), "project")


def test_no_program_of_the_checkout_is_run(project: Path, runs: Path, tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/pwned\n")
    hook.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "diff.lab.textconv"):
        git(project, "config", key, str(hook))
    (project / ".gitattributes").write_text("*.py diff=lab\n")
    (project / "my_lab" / "net.py").write_text("changed = True\n")
    code = frozen(runs)
    assert names(code, "project") == [".gitattributes", *PACKAGE]
    assert code_revision(code)["git_diff_sha256"] is not None
    assert not (tmp_path / "pwned").exists()


def test_a_checkout_that_git_refuses_is_an_error(project: Path, runs: Path) -> None:
    (project / ".git" / "config").write_text("[core\n")
    with pytest.raises(ConfigError, match=r"git does not list .*: fatal: bad config.*snapshot=copy"):
        frozen(runs)


@pytest.mark.parametrize("why", ["no git", "no checkout", "ignored"])
def test_what_git_cannot_say_is_copied(
    project: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif why == "no checkout":
        (project / ".git").rename(tmp_path / "away")
    else:
        git(project, "rm", "-q", "-r", "--cached", "my_lab")
        (project / ".gitignore").write_text("my_lab/\n")
    code = frozen(runs)
    assert [root.how for root in code.roots if root.name == "project"] == ["copy"]
    assert names(code, "project") == PACKAGE


# --- copy ---


def test_copy_takes_what_python_can_import(project: Path, runs: Path) -> None:
    modules = (
        "train", "helpers/a", "helpers/deep/b", "other/deep/c", "env/bin/x", "env/y", "my_lab/checkpoints/store",
        "node_modules/x",
    )  # fmt: skip
    write_files(project, {f"{name}.py": "" for name in modules})
    (project / "my_lab" / "vocabulary.txt").write_text("a b c")
    (project / "notes.txt").write_text("no code")
    (project / "data").mkdir()
    (project / "data" / "big.bin").write_text("no code")
    (project / "env" / "pyvenv.cfg").touch()
    (project / "my_lab" / "best.pt").touch()
    (project / "my_lab" / ".hidden").touch()
    write_files(runs / "sweep" / "code", {"module.py": ""})
    code = frozen(runs, mode=SnapshotMode.copy)
    assert links_of(code) == {name: str(project / name) for name in ("data", "my_lab/best.pt", "notes.txt")}
    assert sorted({*names(code, "project")} - {*links_of(code)}) == sorted(
        [*PACKAGE, "train.py", "helpers/a.py", "helpers/deep/b.py", "my_lab/vocabulary.txt",
         "my_lab/checkpoints/store.py"]
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_the_folder_of_sweeps_is_never_frozen(project: Path, mode: SnapshotMode) -> None:
    odd = project / "my_lab" / "my *[runs]!"
    write_files(odd / "sweep" / "run", {"module.py": ""})
    assert names(frozen(odd, mode=mode), "project") == PACKAGE


@pytest.mark.parametrize("mode", MODES)
def test_secrets_are_never_frozen(project: Path, runs: Path, mode: SnapshotMode) -> None:
    secrets = [
        ".env", ".env.local", "prod.env", "server.pem", "tls.key", "id_rsa", "id_ed25519", "id_rsa.pub", ".netrc",
        "credentials", "credentials.json", "google_credentials.json", "secrets.yaml", "secrets.py", "x.token",
        ".pypirc", ".ssh/config", ".aws/x", "kubeconfig", ".hf_token",
    ]  # fmt: skip
    for name in secrets:
        path = project / "my_lab" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"TOKEN=hunter of {name}.\n")
    git(project, "add", "-A", "-f")  # not even if it is tracked, or asked for
    archive = store_code(SweepPaths(runs / "sweep"), frozen(runs, mode=mode, include=["*"]))
    with zipfile.ZipFile(archive) as file:
        content = b"".join(file.read(each) for each in file.namelist())
    assert [name for name in secrets if f"hunter of {name}.".encode() in content] == []


@pytest.mark.parametrize("name", ["id_map.py", "tokenizer.py", "environment.py", "key.py", "secretary.py"])
def test_code_that_sounds_like_a_secret_is_frozen(project: Path, runs: Path, name: str) -> None:
    (project / "my_lab" / name).touch()
    assert f"my_lab/{name}" in names(frozen(runs), "project")


@pytest.mark.parametrize("mode", MODES)
def test_what_was_left_out_for_its_name_is_listed(project: Path, runs: Path, mode: SnapshotMode) -> None:
    secrets = ["my_lab/.ENV", "my_lab/KEY.PEM", "my_lab/conf/Secrets.yaml", "my_lab/deploy_key", "my_lab/api_key.txt"]
    write_files(project, dict.fromkeys([*secrets, "my_lab/api_key.py", "my_lab/tokens.txt", "my_lab/ignored.key"], ""))
    (project / ".gitignore").write_text("ignored.key\n")
    code = frozen(runs, mode=mode, exclude=["deploy_key"])
    wanted = sorted({*secrets} - {"my_lab/deploy_key"} | ({"my_lab/ignored.key"} if mode.value == "copy" else set()))
    assert code.left_out == tuple(f"{project}/{name}" for name in wanted)
    assert code.provenance()["left_out"] == list(code.left_out)
    assert {"my_lab/api_key.py", "my_lab/tokens.txt"} <= set(names(code, "project"))


@pytest.mark.parametrize("mode", MODES)
def test_excluded_files_are_left_out(project: Path, runs: Path, mode: SnapshotMode) -> None:
    write_files(project, {"my_lab/raw/a.py": "", "my_lab/b_old.py": "", "sub/my_lab/raw/c.py": "", "sub/d.py": ""})
    left = {"mode": mode, "exclude": ["my_lab/raw/", "*_old.py"]}
    assert names(frozen(runs, **left), "project") == sorted([*PACKAGE, "sub/my_lab/raw/c.py", "sub/d.py"])


def test_a_package_that_would_be_missing_is_an_error(project: Path, runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"my_lab is found at .*my_lab and would not be frozen"):
        frozen(runs, exclude=["my_lab"])


# --- links, odd files, sizes ---


@pytest.mark.parametrize("mode", MODES)
def test_links_stay_inside_or_are_left_out(project: Path, runs: Path, tmp_path: Path, mode: SnapshotMode) -> None:
    (tmp_path / "outside").write_text("token-of-somebody-4711")
    lab = project / "my_lab"
    (lab / "inside.py").symlink_to("net.py")
    (lab / "absolute.py").symlink_to(lab / "net.py")
    (lab / "out.py").symlink_to(tmp_path / "outside")
    (lab / "up").symlink_to("../../outside")
    (lab / "nowhere").symlink_to("missing")
    (lab / "loop").symlink_to("loop")
    (lab / "folder").symlink_to(tmp_path)
    code = frozen(runs, mode=mode)
    links = {name: content for name, (kind, content) in code.contents.items() if kind == "link"}
    assert links == {
        "project/my_lab/inside.py": b"net.py", "project/my_lab/absolute.py": b"net.py",
        "project/my_lab/up": os.fsencode(tmp_path / "outside"),
    }  # fmt: skip
    assert {Path(each).name for each in code.left_out} == {"out.py", "nowhere", "loop", "folder"}
    assert b"token-of-somebody-4711" not in store_code(SweepPaths(runs / "sweep"), code).read_bytes()


def test_data_and_outputs_that_are_not_frozen_are_linked(project: Path, runs: Path, tmp_path: Path) -> None:
    (project / ".gitignore").write_text(
        "/data/*\n*.npy\n*.log\n/vendor/\n/generated.py\n/env/\n/build/\n.env\n/keys/\n"
    )
    linked = [
        "data/mnist/raw/images",
        "my_lab/table.npy",
        "checkpoints/1/last.ckpt",
        "checkpoints/2/last.ckpt",
        "best.pt",
    ]
    other = ["data/.gitkeep", "run.log", "vendor/deep/module.py", "generated.py", "env/pyvenv.cfg", "build/x", ".env"]
    other += ["keys/api_key.txt", "skipped.npy", "__pycache__/x.npy"]
    write_files(project, {**dict.fromkeys([*linked, *other], ""), "tracked.pt": "weights"})
    git(project, "add", "-f", "data/.gitkeep", "tracked.pt")
    (project / "scratch").symlink_to(tmp_path / "scratch")
    write_files(tmp_path / "scratch", {"images/1.png": ""})
    code = frozen(runs, exclude=["skipped.npy"])
    inside = ["data/mnist", "my_lab/table.npy", "checkpoints", "best.pt", "keys"]
    assert links_of(code) == {
        "scratch": str(tmp_path / "scratch"), **{name: str(project / name) for name in inside},
    }  # fmt: skip
    assert {"data/.gitkeep", "tracked.pt"} <= {*names(code, "project")}


def test_a_hundred_thousand_ignored_files_are_few_links(project: Path, runs: Path) -> None:
    (project / ".gitignore").write_text("*.npy\n/large/\n")
    (project / "large").mkdir()
    for number in range(250):
        (project / f"{number}.npy").touch()
        (project / "large" / f"{number}.npy").touch()
    links = links_of(frozen(runs))
    assert len(links) == 200
    assert "large" in links, "folders come first"


def test_a_package_that_git_ignores_leaves_the_links_of_the_checkout(project: Path, runs: Path) -> None:
    (project / ".gitignore").write_text("/z_made/\n/data/*\n")
    write_files(project, {"z_made/net.py": "", "data/.gitkeep": "", "data/mnist/images": ""})
    git(project, "add", "-f", "data/.gitkeep")
    code = frozen(runs, packages=["z_made"])
    assert links_of(code) == {"data/mnist": str(project / "data" / "mnist")}
    assert "z_made/net.py" in names(code, "project")


def test_a_home_folder_is_not_linked(project: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(project, {"letters/one.txt": ""})
    assert "letters" in links_of(frozen(runs, mode=SnapshotMode.copy))
    monkeypatch.setenv("HOME", str(project))
    assert links_of(frozen(runs, mode=SnapshotMode.copy)) == {}


def test_a_package_behind_a_link_is_frozen_where_it_is(project: Path, runs: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "elsewhere", {"linked/net.py": ""})
    (project / "linked").symlink_to(tmp_path / "elsewhere" / "linked")
    code = frozen(runs, "linked.net.Net")
    assert names(code, "elsewhere") == ["linked/net.py"]


def test_a_package_behind_a_link_of_another_name_is_frozen_by_that_name(project: Path, runs: Path) -> None:
    """The folder that it leads to cannot be imported by the package's name."""
    (project / "linked").symlink_to("my_lab")
    code = frozen(runs, "linked.net.Net")
    assert code.contents["project/linked"] == ("link", b"my_lab")


@pytest.mark.parametrize("mode", MODES)
def test_pipes_and_sockets_are_passed_over(project: Path, runs: Path, mode: SnapshotMode) -> None:
    os.mkfifo(project / "my_lab" / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("my_lab/socket")
        assert names(frozen(runs, mode=mode), "project") == PACKAGE


@pytest.mark.parametrize("mode", MODES)
def test_too_much_is_refused_before_it_is_read(project: Path, runs: Path, mode: SnapshotMode) -> None:
    with (project / "my_lab" / "huge.bin").open("wb") as file:
        file.truncate(10**12)  # sparse: reading it would end this test
    with pytest.raises(ConfigError) as error:
        frozen(runs, mode=mode)
    for part in ("snapshot.max_mb=50", "'my_lab/huge.bin' (1000000.0 MB)", 'snapshot.exclude=["my_lab/huge.bin"]'):
        assert part in str(error.value)
    assert names(frozen(runs, mode=mode, exclude=["my_lab/huge.bin"]), "project") == PACKAGE


@pytest.mark.parametrize("mode", MODES)
def test_too_many_files_are_refused(project: Path, runs: Path, mode: SnapshotMode) -> None:
    for number in range(1100):  # the limit is above what hpc_trainer itself, frozen as well, has
        (project / "my_lab" / f"image{number}.txt").touch()
    with pytest.raises(ConfigError, match=r"snapshot.max_files=1000 files. Most are in my_lab \("):
        frozen(runs, mode=mode, max_files=1000)


def test_modes_are_kept(project: Path, runs: Path) -> None:
    (project / "setup.py").chmod(0o755)
    contents = frozen(runs).contents
    assert (contents["project/setup.py"][0], contents["project/my_lab/net.py"][0]) == ("755", "644")


def test_a_read_only_tree_is_frozen(project: Path, runs: Path) -> None:
    for path in project.glob("my_lab/*"):
        path.chmod(0o400)
    (project / "my_lab").chmod(0o500)
    try:
        archive = store_code(SweepPaths(runs / "sweep"), frozen(runs))
    finally:
        (project / "my_lab").chmod(0o700)
    assert "project/my_lab/net.py" in read_archive(archive)[1]


# --- which folders ---


def test_a_run_of_shipped_parts_freezes_none_of_the_current_folder(project: Path, runs: Path) -> None:
    code = read_code([make_spec("cluster=local")], runs)
    assert code is not None, "these tests run from a checkout"
    (root,) = code.roots
    assert root.packages == {"hpc_trainer": "."}
    assert root.source == str(Path(hpc_trainer.__file__).resolve().parents[1])
    assert all(name.startswith("hpc_trainer/") for name in names(code, root.name))
    assert "hpc_trainer/worker/__main__.py" in names(code, root.name)


def test_an_optimizer_of_ones_own_is_frozen_too(project: Path, runs: Path) -> None:
    optim = CustomOptimConfig(_target_="my_lab.net.Optimizer")
    code = read_code([make_spec("cluster=local", optim=optim, trust=["my_lab"])], runs)
    assert code is not None
    assert {"my_lab": "."} in [root.packages for root in code.roots]


def test_off_and_an_installed_package_freeze_nothing(
    project: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = make_spec("cluster=local", snapshot__mode=SnapshotMode.off)
    assert read_code([off], runs) is None
    assert read_code([], runs) is None
    wheel = tmp_path / "site-packages" / "hpc_trainer" / "__init__.py"
    monkeypatch.setattr(hpc_trainer, "__file__", str(wheel))
    assert read_code([make_spec("cluster=local")], runs) is None


def test_more_packages_and_pythonpath(
    project: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "lib" / "src", {"tools/a.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path / "lib" / "src"))
    code = frozen(runs, packages=["tools", "numpy", "not_there"])
    assert names(code, "src") == ["tools/a.py"]
    assert {root.name: root.packages for root in code.roots if "hpc_trainer" not in root.packages} == {
        "project": {"my_lab": "."}, "src": {"tools": "."},
    }  # fmt: skip


def test_a_src_layout_notes_where_the_package_is(project: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(project, "mv", "my_lab", "mine")
    write_files(project, {"src/my_lab/net.py": ""})
    monkeypatch.syspath_prepend(str(project / "src"))
    code = frozen(runs)
    assert {"my_lab": "src"} in [root.packages for root in code.roots]
    assert "mine/net.py" in names(code, "project"), "the whole checkout"


def test_the_grid_agrees_about_the_snapshot(runs: Path) -> None:
    specs = [make_spec("cluster=local"), make_spec("cluster=local", seed=1, snapshot__max_mb=3.0)]
    with pytest.raises(ConfigError, match="only one value of snapshot"):
        read_code(specs, runs)


# --- the digest, and the archive ---


def test_the_digest_is_of_names_modes_and_contents(project: Path, runs: Path) -> None:
    first = frozen(runs).digest
    os.utime(project / "my_lab" / "net.py", (1, 1))
    git(project, "commit", "-q", "--allow-empty", "-m", "Nothing")
    assert frozen(runs).digest == first
    seen = {first}
    for change in (
        lambda: (project / "my_lab" / "net.py").write_text("x"),
        lambda: (project / "my_lab" / "net.py").chmod(0o755),
        lambda: (project / "my_lab" / "net.py").rename(project / "my_lab" / "ten.py"),
        (project / "my_lab" / "empty").touch,
    ):
        change()
        digest = frozen(runs).digest
        assert digest not in seen
        seen.add(digest)


def test_the_second_time_writes_nothing(project: Path, runs: Path) -> None:
    paths = SweepPaths(runs / "sweep")
    archive = store_code(paths, frozen(runs))
    before = {path: path.stat().st_mtime_ns for path in (archive, paths.code, paths.folder)}
    assert store_code(paths, frozen(runs)) == archive
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert list(paths.code.iterdir()) == [archive]
    assert archive.stat().st_mode & 0o222 == 0


def test_a_changed_archive_is_refused(project: Path, runs: Path) -> None:
    paths, code = SweepPaths(runs / "sweep"), frozen(runs)
    archive = store_code(paths, code)
    whole = archive.read_bytes()
    archive.chmod(0o600)
    content = code.contents["project/my_lab/net.py"][1]
    archive.write_bytes(whole.replace(content, content[::-1]))
    with pytest.raises(SubmitError, match=r"my_lab/net\.py.*Move it away and submit again"):
        store_code(paths, code)
    for end in (0, 1, len(whole) // 2, len(whole) - 1):
        archive.write_bytes(whole[:end])
        with pytest.raises(SubmitError, match="cannot be read"):
            store_code(paths, code)


def test_an_archive_that_others_may_write_is_refused(project: Path, runs: Path) -> None:
    paths, code = SweepPaths(runs / "sweep"), frozen(runs)
    archive = store_code(paths, code)
    archive.chmod(0o666)
    with pytest.raises(UntrustedFileError, match="others may write"):
        store_code(paths, code)
    archive.chmod(0o400)
    paths.code.chmod(0o777)
    with pytest.raises(UntrustedFileError, match="others may write"):
        store_code(paths, code)


def test_writers_at_the_same_time_leave_one_archive(project: Path, runs: Path) -> None:
    paths, code = SweepPaths(runs / "sweep"), frozen(runs)
    start = threading.Barrier(8)
    failures: list[BaseException] = []

    def write() -> None:
        start.wait()
        try:
            store_code(paths, code)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    (archive,) = paths.code.iterdir()
    assert read_archive(archive)[1] == code.contents


KILLED = """
import os, pathlib, signal, sys
from hpc_trainer.launch.frozen_code.archive import store_code
from hpc_trainer.record.layout import SweepPaths
from tests.unit.launch.frozen_code.projects import frozen

runs = pathlib.Path(sys.argv[1])
code = frozen(runs)
owner = {"os": os, "Path": pathlib.Path}[sys.argv[2]]
setattr(owner, sys.argv[3], lambda *argv, **options: os.kill(os.getpid(), signal.SIGKILL))
store_code(SweepPaths(runs / "sweep"), code)
"""


@pytest.mark.parametrize(
    "call", ["os rename", *(pytest.param(call, marks=pytest.mark.long) for call in ("os fchmod", "os fsync"))]
)
def test_killed_in_the_middle_there_is_no_archive(project: Path, runs: Path, call: str) -> None:
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(runs), *call.split()],
        env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    paths = SweepPaths(runs / "sweep")
    (half,) = paths.code.iterdir()
    assert half.name.startswith(".")
    os.utime(half, (1, 1))
    archive = store_code(paths, frozen(runs))
    assert list(paths.code.iterdir()) == [archive], "and what the killed one left is tidied up"


def test_the_archive_can_be_looked_at_with_any_unzip(project: Path, runs: Path) -> None:
    archive = store_code(SweepPaths(runs / "sweep"), frozen(runs))
    with zipfile.ZipFile(archive) as file:
        assert file.read("code/project/my_lab/net.py") == b"class Net: ...\n"
        assert {"__main__.py", "hpc_trainer_import_path.py", "manifest.json"} <= set(file.namelist())
        assert json.loads(file.read("manifest.json"))["format"] == 1


# One file for all sweeps.


def test_code_is_the_same_if_both_name_the_same() -> None:
    shared, own = make_specs(1), [make_spec("train.main=jobs.own_loop.main", "trust=[jobs]")]
    assert is_same_code(shared, make_specs(2))
    assert not is_same_code(shared, own)
    assert not is_same_code(own, shared)


def test_sweeps_with_the_same_code_share_one_file(project: Path, runs: Path) -> None:
    code = frozen(runs)
    first, second = (store_code(SweepPaths(runs / name), code) for name in ("one", "two"))
    assert first.stat().st_ino == second.stat().st_ino
    assert first.stat().st_nlink == 3
    assert read_archive(second)[0] == code.manifest
    drop_unused_code(runs)
    assert second.stat().st_nlink == 3, "sweeps have it"
    first.unlink()
    second.unlink()
    (shared,) = shared_code(runs).rglob("*.zip")
    drop_unused_code(runs)
    assert not shared.exists()
    assert store_code(SweepPaths(runs / "two"), code).stat().st_nlink == 2, "a submit writes it again"


def test_a_shared_folder_that_others_may_write_gets_no_name(project: Path, runs: Path) -> None:
    folder = shared_code(runs) / "own"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert store_code(SweepPaths(runs / "one"), frozen(runs)).stat().st_nlink == 1
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("how", ["changed", "cut", "a link", "no links", "others may write"])
def test_a_shared_file_that_is_not_as_it_was_is_not_taken(
    how: str, project: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = frozen(runs)
    store_code(SweepPaths(runs / "one"), code)
    (shared,) = shared_code(runs).rglob("*.zip")
    content = shared.read_bytes()
    if how == "no links":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    elif how == "others may write":
        shared.parent.chmod(0o777)
    else:
        shared.unlink()
        if how == "a link":
            (tmp_path / "elsewhere.zip").write_bytes(content)
            shared.symlink_to(tmp_path / "elsewhere.zip")
        else:
            shared.write_bytes(content[:-9] if how == "cut" else content.replace(b"class", b"clasz"))
            shared.chmod(0o400)
    archive = store_code(SweepPaths(runs / "two"), code)
    assert read_archive(archive)[0] == code.manifest
    assert archive.stat().st_ino != (runs / "one" / "code" / archive.name).stat().st_ino
