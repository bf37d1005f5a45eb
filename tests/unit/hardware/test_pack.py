"""`pack`: an environment that runs from another folder, with its digest, and what it leaves outside is said."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from hpc_trainer.config.environment import PACK_FACTS
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.hardware.pack import find_environment, pack_environment

_SCRIPT = "import sys\nimport lab\nprint(lab.NAME, sys.prefix)\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with a package and the two kinds of scripts that pip and uv write."""
    folder = tmp_path_factory.mktemp("lab") / "env with space"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lab").mkdir()
    (site / "lab" / "__init__.py").write_text("NAME = 'lab'\n")
    short, long = folder / "bin" / "short", folder / "bin" / "long"
    short.write_text(f"#!{folder}/bin/python3\n{_SCRIPT}")
    long.write_text(f"#!/bin/sh\n'''exec' \"{folder}/bin/python\" \"$0\" \"$@\"\n' '''\n{_SCRIPT}")
    for script in (short, long):
        script.chmod(0o755)
    return folder


@pytest.fixture
def env(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "lab" / made.name, symlinks=True))


def _unpack(archive: Path, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(["tar", "-C", folder, "-xf", archive], check=True)
    return folder


def test_a_copy_runs_while_its_environment_is_gone(made: Path, tmp_path: Path) -> None:
    packed = pack_environment(made, tmp_path / "env.tar", modules=("lab",))
    copy = _unpack(packed.archive, tmp_path / "copy")
    away = made.rename(made.with_name("away"))
    try:
        for name in ("short", "long"):
            said = subprocess.run([copy / "bin" / name], capture_output=True, text=True, check=True).stdout
            assert said.split() == ["lab", str(copy)]
    finally:
        away.rename(made)
    facts = json.loads((copy / PACK_FACTS).read_text())
    assert (facts["sha256"], facts["files"], facts["kind"]) == (packed.sha256, packed.num_files, "venv")
    assert packed.python == ".".join(map(str, sys.version_info[:3]))
    assert any(folder.startswith(sys.base_prefix) for folder, _, _ in packed.outside), (
        "the standard library is the base Python's"
    )


def test_the_digest_is_that_of_the_contents(env: Path, tmp_path: Path) -> None:
    def digest(name: str) -> str:
        return pack_environment(env, tmp_path / name, tries=False).sha256

    first = digest("1.tar")
    os.utime(env / "bin" / "long", (1, 1))
    assert digest("2.tar") == first, "times do not count"
    next(env.glob("lib/python*/site-packages/lab/__init__.py")).write_text("NAME = 'lob'\n")
    assert digest("3.tar") != first


def test_an_absolute_link_into_the_environment_is_moved_and_one_that_leads_out_is_named(
    env: Path, tmp_path: Path
) -> None:
    (env / "inside").symlink_to(env / "bin" / "long")
    (env / "outside").symlink_to(tmp_path)
    (site,) = env.glob("lib/python*/site-packages")
    editable = site / "mine-1.0.dist-info"
    editable.mkdir()
    (editable / "direct_url.json").write_text('{"url": "file:///home/me/mine", "dir_info": {"editable": true}}')
    packed = pack_environment(env, tmp_path / "env.tar", tries=False)
    with tarfile.open(packed.archive) as tar:
        assert tar.getmember("./inside").linkname == "bin/long"
    assert [note.partition(". ")[0] for note in packed.notes] == [
        "1 editable install(s) are not in the archive, and ranks import them from their present folders: "
        "mine (/home/me/mine)",
        "1 link(s) lead out of the environment: outside",
    ]


def test_an_environment_that_cannot_be_moved_is_refused_and_leaves_nothing(env: Path, tmp_path: Path) -> None:
    (site,) = env.glob("lib/python*/site-packages")
    (env / "src").mkdir()
    (site / "src.pth").write_text(f"{env / 'src'}\n")
    with pytest.raises(HpcTrainerError, match=r"cannot be moved: its sys\.path has .*/src\. A \.pth file"):
        pack_environment(env, tmp_path / "env.tar")
    (site / "src.pth").unlink()
    with pytest.raises(HpcTrainerError, match="No module named 'nothing'"):
        pack_environment(env, tmp_path / "env.tar", modules=("nothing",))
    assert not [*tmp_path.glob("*.tar"), *tmp_path.glob(".*")]


@pytest.mark.long
def test_with_its_python_nothing_comes_from_outside(made: Path, tmp_path: Path) -> None:
    if sys.base_prefix == "/usr":
        with pytest.raises(HpcTrainerError, match=r"made from the Python of the operating system \(/usr\)"):
            pack_environment(made, tmp_path / "env.tar", with_python=True)
        return
    packed = pack_environment(made, tmp_path / "env.tar", modules=("lab", "ssl", "ctypes"), with_python=True)
    assert packed.outside == ()


def test_conda_pack_makes_the_archive_of_a_conda_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a script in place of conda-pack that is called as its manual says; its archive has a conda-unpack."""
    env, programs = tmp_path / "conda", tmp_path / "programs"
    (env / "conda-meta").mkdir(parents=True)
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    with pytest.raises(HpcTrainerError, match=r"conda-pack is not on PATH\. Type: pip install conda-pack"):
        pack_environment(env)
    stand_in = programs / "conda-pack"
    stand_in.write_text(
        f"#!{sys.executable}\nimport sys, venv, tarfile\nwords = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "assert sys.argv[1] == '--quiet' and words['--format'] == 'tar', sys.argv\n"
        "folder = words['--prefix'] + '-made'\nvenv.create(folder, symlinks=True)\n"
        "open(folder + '/bin/conda-unpack', 'w').write('open(__file__ + \".ran\", \"w\")')\n"
        "with tarfile.open(words['--output'], 'w') as tar:\n    tar.add(folder, '.')\n"
    )
    stand_in.chmod(0o755)
    packed = pack_environment(env)
    assert (packed.kind, packed.archive) == ("conda", tmp_path / "conda.tar")
    with tarfile.open(packed.archive) as tar:
        facts = tar.extractfile(f"./{PACK_FACTS}")
        assert json.load(io.TextIOWrapper(facts or io.BytesIO()))["sha256"] == packed.sha256


def test_bad_input_is_refused_with_what_to_type(env: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not an environment: .* Name its folder, as .*env with space\."):
        pack_environment(env.parent)
    with pytest.raises(ConfigError, match=r"must end with \.tar\. Use --to .*/x\.tar"):
        pack_environment(env, tmp_path / "x.tgz")
    with pytest.raises(ConfigError, match="is inside the environment"):
        pack_environment(env, env / "x.tar")
    with pytest.raises(ConfigError, match="Make it: mkdir -p"):
        pack_environment(env, tmp_path / "none" / "x.tar")
    (tmp_path / "there.tar").touch()
    with pytest.raises(ConfigError, match="To replace it: --force"):
        pack_environment(env, tmp_path / "there.tar")
    with pytest.raises(ConfigError, match="is not a folder"):
        pack_environment(tmp_path / "nothing")
    project = tmp_path / "project"
    project.mkdir()
    (project / ".venv").symlink_to(env)
    assert find_environment(project) == (project / ".venv", "venv")
