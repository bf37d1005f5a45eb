"""Files of a folder: which ones are frozen, which ones get a link, and the limits of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.frozen_code.files import (
    WITH_CONFIGURATION,
    Rules,
    files_below,
    git_top,
    importable_files,
    is_data,
    linked_names,
    too_many,
)
from tests.unit.launch.frozen_code.projects import write_files


def test_the_top_of_a_checkout_is_the_nearest_folder_with_git(tmp_path: Path) -> None:
    deep = tmp_path / "top" / "inner" / "deep"
    deep.mkdir(parents=True)
    assert git_top(deep) is None
    (tmp_path / "top" / ".git").mkdir()
    assert git_top(deep) == git_top(tmp_path / "top") == tmp_path / "top"
    (deep.parent / ".git").write_text("gitdir: elsewhere\n")  # as in a submodule
    assert git_top(deep) == deep.parent


def test_as_many_files_as_may_be_frozen_are_and_one_more_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {f"lab/m{number}.py": "" for number in range(3)} | {"one.py": ""})
    expected = ["lab/m0.py", "lab/m1.py", "lab/m2.py", "one.py"]
    assert importable_files(tmp_path, [], Rules(max_files=4)) == expected
    with pytest.raises(ConfigError, match=r"more than snapshot.max_files=3 files. Most are in lab \(3 files\), one.py"):
        importable_files(tmp_path, [], Rules(max_files=3))


def test_the_three_largest_folders_are_named() -> None:
    names = [f"{top}/{number}" for top, count in (("a", 1), ("b", 4), ("c", 2), ("d", 3)) for number in range(count)]
    told = too_many(Path("/x"), names, 9)
    assert "more than snapshot.max_files=9 files. Most are in b (4 files), d (3 files), c (2 files). Leave" in told
    assert "'snapshot.exclude=[b]'" in told


def test_what_python_can_import_from_a_folder(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "train.py": "", ".hidden.py": "", "notes.txt": "", "conf.yaml": "",
            "lab/__init__.py": "", "lab/data.csv": "", "lab/.secret.txt": "", "lab/deep/more.txt": "",
            "only_data/a.csv": "", "only_conf/a.yaml": "", "named/a.csv": "", "env/pyvenv.cfg": "", "env/x.py": "",
        },
    )  # fmt: skip
    assert importable_files(tmp_path, ["named"], Rules()) == [
        "lab/__init__.py", "lab/data.csv", "lab/deep/more.txt", "named/a.csv", "train.py",
    ]  # fmt: skip
    assert {"conf.yaml", "only_conf/a.yaml"} <= set(importable_files(tmp_path, [], Rules(), WITH_CONFIGURATION))
    without = Rules(exclude=["lab/deep", "*.csv"], runs_dir=str(tmp_path / "named"))
    assert importable_files(tmp_path, ["named"], without) == ["lab/__init__.py", "train.py"]


def test_outputs_of_runs_are_not_frozen_unless_they_are_tracked_or_named(tmp_path: Path) -> None:
    names = ["a.py", "net.pt", "wandb/x/y.txt", "my_lab/checkpoints/store.py", "my_lab/checkpoints/a.ckpt", "kept.pt"]
    rules = Rules(include=["kept.pt"])
    assert rules.kept(names) == ["a.py", "my_lab/checkpoints/store.py", "kept.pt"]
    assert rules.not_frozen == ["net.pt", "wandb/", "my_lab/checkpoints/"]
    assert Rules().kept(names, tracked=names) == names
    assert Rules().kept(["wandb", ".git", "lab"], are_folders=True) == ["wandb", "lab"]


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("data", ["lab/a.py"]), ("lab/data", ["data/b.py", "lab/a.py"]), ("lab/data/", ["data/b.py", "lab/a.py"]),
        ("lab", ["data/b.py"]), ("*.py", ["lab/data/c.txt"]), ("lab/*.py", ["data/b.py", "lab/data/c.txt"]),
        ("l?b/a.py", ["data/b.py", "lab/data/c.txt"]), ("a", ["data/b.py", "lab/a.py", "lab/data/c.txt"]),
    ],
)  # fmt: skip
def test_a_pattern_with_a_slash_is_of_the_root_and_one_without_of_any_part(pattern: str, left: list[str]) -> None:
    assert Rules(exclude=[pattern]).kept(["data/b.py", "lab/a.py", "lab/data/c.txt"]) == left


def test_folders_come_before_files_among_the_links_and_no_more_than_the_most_are_made(tmp_path: Path) -> None:
    write_files(tmp_path, {f"f{number:03}.bin": "" for number in range(210)} | {"z_data/x.bin": ""})
    names = ["z_data/", *(f"f{number:03}.bin" for number in range(210))]
    assert linked_names(tmp_path, names, [], None) == ["z_data", *(f"f{number:03}.bin" for number in range(199))]
    assert linked_names(tmp_path, names, ["z_data/x.bin", "f000.bin"], None)[0] == "f001.bin", "they are frozen"
    assert linked_names(tmp_path, ["z_data/"], [], str(tmp_path / "z_data")) == [], "the folder of sweeps"


@pytest.mark.parametrize("name", ["build", "a.log", ".cache", "lab/.cache/x", "core.12", "note.txt~", "gone.bin"])
def test_what_code_does_not_read_gets_no_link(tmp_path: Path, name: str) -> None:
    if name != "gone.bin":
        write_files(tmp_path, {name: ""})
    assert linked_names(tmp_path, [name], [], None) == []


def test_a_folder_with_modules_in_two_levels_is_no_data(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "plain/a/b/c.py": "", "direct/x.py": "", "below/a/x.so": "", "below/a/y.csv": "", "env/a/pyvenv.cfg": "",
            "module.pyi": "", "table.csv": "",
        },
    )  # fmt: skip
    names = ("plain", "direct", "below", "env", "module.pyi", "table.csv", "missing")
    assert [name for name in names if is_data(tmp_path / name)] == ["plain", "table.csv"]


def test_hidden_folders_and_environments_below_a_frozen_one_are_left_out(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "lab/a.txt": "", "lab/.hidden/b.txt": "", "lab/venv/pyvenv.cfg": "", "lab/venv/c.txt": "",
            "lab/runs/d.txt": "", "lab/deep/e.txt": "",
        },
    )  # fmt: skip
    found = list(files_below(tmp_path, ["lab"], Rules(runs_dir=str(tmp_path / "lab" / "runs"))))
    assert found == ["lab/a.txt", "lab/deep/e.txt"], "level by level"
