"""Files and folders of other users: what is frozen of them, what is refused, and where they stand on the path."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.errors import UntrustedFileError
from hpc_trainer.launch.frozen_code.frozen_worker import manifest_digest, member
from hpc_trainer.launch.frozen_code.import_path import frozen_path, is_below, is_environment, safe_path
from hpc_trainer.launch.frozen_code.snapshot import check_owners, user_name

OWN, BOB, NOBODY_KNOWN = os.getuid(), 65534, 61234


def _file(uid: int = OWN, mode: int = stat.S_IFREG | 0o644) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))


def _refused(source: str, places: list[str], files: dict[str, os.stat_result]) -> str:
    with pytest.raises(UntrustedFileError) as error:
        check_owners(source, places, files)
    return str(error.value)


def test_a_file_that_everybody_may_write_is_refused() -> None:
    open_file = _file(mode=stat.S_IFREG | 0o646)
    ending = "Look at what is in there, then: chmod -R o-w /src"
    assert _refused("/src", ["."], {"a.py": open_file, "b.py": _file()}) == (
        f"/src/a.py would be frozen and run as you, and everybody may write it. {ending}"
    )
    names = ", ".join(f"/src/{number}" for number in range(3))
    for count, more in ((3, ""), (4, " and 1 more")):
        assert _refused("/src", ["."], {str(number): open_file for number in range(count)}) == (
            f"{names}{more} would be frozen and run as you, and everybody may write them. {ending}"
        )
    assert check_owners("/src", ["."], {"link": _file(mode=stat.S_IFLNK | 0o777), "a": _file(0)}) == ()


def test_files_of_others_are_named() -> None:
    files = {"a": _file(BOB), "b": _file(NOBODY_KNOWN), "hpc_trainer/c": _file(BOB), "d": _file(), "e": _file(0)}
    assert check_owners("/src", ["."], files) == (
        f"2 of the frozen files in /src belong to {user_name(BOB)}, user {NOBODY_KNOWN} and will run as you: a, b.",
    )
    assert check_owners("/src", ["."], {"hpc_trainer/c": _file(BOB)}) == ()
    assert user_name(0) == "root"


@pytest.mark.parametrize(
    ("name", "places", "module"),
    [
        ("json.py", ["."], "json"),
        ("json/__init__.py", ["."], "json"),
        ("json/tool.py", ["."], None),
        ("numpy.py", ["."], "numpy"),
        ("numpy/__init__.py", ["."], "numpy"),
        ("sitecustomize.py", ["."], "sitecustomize"),
        ("src/json.py", ["."], None),
        ("src/json.py", [".", "src"], "json"),
        ("src2/json.py", ["src"], None),
        ("json.txt", ["."], None),
        ("my-json.py", ["."], None),
        ("mine_alone.py", ["."], None),
        ("tests/__init__.py", ["."], None),
    ],
)
def test_a_file_of_another_user_replaces_no_installed_module(name: str, places: list[str], module: str | None) -> None:
    files = {name: _file(NOBODY_KNOWN)}
    if module is None:
        assert len(check_owners("/src", places, files)) == 1
        return
    assert _refused("/src", places, files) == (
        f"/src/{name} belongs to user {NOBODY_KNOWN}. It would be frozen, and run as you in place of the module "
        f"{module} that is installed. Look at it, and remove it or leave it out: 'snapshot.exclude=[{name}]'. If you "
        "mean it, replace it by a copy of your own."
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Make a folder with a mode and, for root, an owner; `here` is the current one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)

    def make(name: str, mode: int = 0o755) -> str:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name).chmod(mode)
        return str(tmp_path / name)

    return make


def test_folders_that_others_may_write_come_last_and_the_current_one_after_them(
    folder: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, own, group = str(tmp_path / "here"), folder("own"), folder("group", 0o775)
    everybody, installed = folder("everybody", 0o707), folder("x/site-packages", 0o777)
    (tmp_path / "archive.zip").touch()
    (tmp_path / "archive.zip").chmod(0o666)
    path = ["", everybody, own, group, here, own, installed, sys.prefix, f"{tmp_path}/archive.zip", "none"]
    safe = [own, installed, sys.prefix, f"{tmp_path}/archive.zip", f"{here}/none"]
    assert safe_path(path) == [*safe, everybody, group, here]
    assert capsys.readouterr().err == (
        f"others may write {everybody}, {group}: searched after the installed packages.\n"
    )
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert safe_path([here, own]) == [own]
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_folder_of_a_group_without_a_name_is_one_that_others_may_write(folder: Callable[..., str]) -> None:
    group = folder("group", 0o775)
    os.chown(group, NOBODY_KNOWN, NOBODY_KNOWN)
    assert safe_path([group, folder("own")])[-1] == group


def test_a_current_folder_that_is_gone_is_on_no_path(folder: Callable[..., str], tmp_path: Path) -> None:
    own = folder("own")
    (tmp_path / "here").rmdir()
    assert safe_path([own]) == [own]


def test_what_is_below_a_folder() -> None:
    assert [is_below(path, "/a/b") for path in ("/a/b", "/a/b/c", "/a/bc", "/a")] == [True, True, False, False]
    assert is_below("/a/b", "/a/")
    assert is_below("/a", "/")
    assert is_environment("/src/.venv/lib/site-packages/x", "/src")
    assert is_environment("/src/dist-packages", "/src")
    assert not is_environment("/src/lib", "/src")
    assert not is_environment("/src/site-packages/x", "/src/site-packages")


def test_folders_of_a_root_are_replaced_by_their_copies(tmp_path: Path) -> None:
    source, copy = tmp_path / "src", tmp_path / "copy"
    for name in ("src/lib/inner", "src/gone", "src/.venv/site-packages", "copy/code/lib", "copy/inner", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (copy / "code/lib/mine.py").touch()
    (tmp_path / "elsewhere/mine.py").touch()
    roots = [
        {"source": str(source), "name": "code", "packages": {}},
        {"source": str(source / "lib/inner"), "name": "inner", "packages": {}},
    ]
    path = [f"{source}/lib", f"{source}/gone", f"{source}/.venv/site-packages", f"{source}/lib/inner", f"{source}/lib",
            f"{tmp_path}/elsewhere"]  # fmt: skip
    replaced = [f"{copy}/code/lib", f"{source}/.venv/site-packages", f"{copy}/inner", f"{tmp_path}/elsewhere"]
    assert frozen_path(path, copy, roots) == replaced
    roots[0]["packages"] = {"mine": "lib"}
    assert frozen_path(path, copy, roots) == replaced, "it is found in the copy anyway"
    found = frozen_path([path[-1], *path[:-1]], copy, roots)
    assert found == [*replaced[:1], path[-1], *replaced[1:-1]]
    roots[0]["packages"] = {"no_such_module": "lib"}
    assert frozen_path([path[-1]], copy, roots) == [f"{copy}/code/lib", path[-1]]


def test_a_manifest_has_one_digest_whatever_the_order_of_its_keys() -> None:
    assert manifest_digest({"a": 1, "b": {"c": 2, "d": 3}}) == manifest_digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert manifest_digest({"a": 1}) != manifest_digest({"a": 2})
    assert [member(7, name) for name in ("a/b.py", "ä.py", "a\\b", "a\tb")] == ["code/a/b.py", *["odd-names/7"] * 3]
