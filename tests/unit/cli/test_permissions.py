"""Only the person can read and write a sweep, whatever umask the shell has; what others may have changed is refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.record.files import own_name, set_umask, write_atomic
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import submit_lock
from tests.unit.slurm.fake_slurm import FakeSlurm

Submit = Callable[..., tuple[int, str]]
ANOTHER_USER = 12345
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


def modes(folder: Path) -> dict[str, set[str]]:
    """The modes of all folders and of all files under `folder`, itself included; links have none of their own."""
    found: dict[str, set[str]] = {"folders": set(), "files": set()}
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            found["folders" if path.is_dir() else "files"].add(f"{stat.S_IMODE(path.stat().st_mode):04o}")
    return found


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def submit(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_slurm: FakeSlurm
) -> Iterator[Submit]:
    """`hpc-trainer submit` of a shell with umask 002, on Slurm; returns exit code and what was said."""
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(runs_dir))

    def run(*words: str) -> tuple[int, str]:
        os.umask(0o002)
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", "submit", "cluster=slurm", "sweep_name=s", *words])
        code: object = 0
        try:
            main()
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        return int(str(code or 0)), out.out + out.err

    yield run
    assert {line.split()[0] for line in fake_slurm.calls()} <= {
        "sbatch", "squeue", "sacct", "scontrol", "sinfo", "test-only",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "folder", "file"), [((), "0700", "0600"), (("paths.group_readable=true",), "0750", "0640")]
)
def test_under_umask_002_nobody_else_may_write(
    submit: Submit, runs_dir: Path, more: tuple[str, ...], folder: str, file: str
) -> None:
    for seeds in ("seed=0", "seed=0,1"):
        assert submit(seeds, "hardware=cpu_x1,gpu_x8", *more)[0] == 0
    archive = file.replace("6", "4")  # the frozen code is nobody's to write
    assert modes(runs_dir) == {"folders": {folder}, "files": {file, archive}}
    names = {path.name for path in (runs_dir / "s").rglob("*")}
    assert {"specs.jsonl", "submissions.jsonl", "sweep.json", "slurm"} <= names
    assert sum(name.endswith(".sh") for name in names) == 4


def test_what_lives_for_a_moment_is_ours_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.umask(0o002)
    set_umask(False)
    seen: dict[str, str] = {}
    rename = os.rename

    def look(path: Path, target: Path) -> None:
        seen[Path(path).name] = f"{stat.S_IMODE(Path(path).stat().st_mode):04o}"
        rename(path, target)

    monkeypatch.setattr(os, "rename", look)
    paths = SweepPaths(tmp_path / "runs" / "s")
    with submit_lock(paths):
        assert modes(tmp_path / "runs") == {"folders": {"0700"}, "files": {"0600"}}
        assert paths.lock.exists()
        write_atomic(paths.sweep, "{}")
    assert seen == {Path(own_name(paths.sweep)).name: "0600"}


def _others_may_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def _group_may_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWGRP)


def _belongs_to_another(path: Path) -> None:
    os.chown(path, ANOTHER_USER, -1)


def _is_a_link(path: Path) -> None:
    real = path.with_name(f"{path.name}.real")
    path.rename(real)
    path.symlink_to(real)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_others_may_write, "others may write it"),
        (_group_may_write, "others may write it"),
        pytest.param(_belongs_to_another, f"belongs to user {ANOTHER_USER}", marks=needs_root),
        (_is_a_link, "is a symbolic link"),
    ],
)
@pytest.mark.parametrize("name", ["", "specs.jsonl", "submissions.jsonl"])
def test_a_sweep_that_others_may_have_changed_is_refused(
    submit: Submit, runs_dir: Path, fake_slurm: FakeSlurm, spoil: Callable[[Path], None], message: str, name: str
) -> None:
    assert submit("seed=0")[0] == 0
    path = runs_dir / "s" / name
    spoil(path)
    kept = {each: each.read_bytes() for each in runs_dir.rglob("*") if each.is_file()}
    code, said = submit("seed=0,1")
    assert code == 1
    assert message in said
    assert str(path) in said
    assert len(fake_slurm.calls("sbatch")) == 1
    assert {each: each.read_bytes() for each in runs_dir.rglob("*") if each.is_file()} == kept


def test_a_folder_of_sweeps_that_everybody_may_write_is_refused(
    submit: Submit, runs_dir: Path, fake_slurm: FakeSlurm
) -> None:
    runs_dir.mkdir()
    runs_dir.chmod(0o777)
    code, said = submit("seed=0")
    assert code == 1
    assert f"chmod o-w {runs_dir}" in said
    assert fake_slurm.calls("sbatch") == []
    runs_dir.chmod(0o1777)
    assert submit("seed=0")[0] == 0


def test_what_keeps_the_group_out_is_named_with_the_command(submit: Submit, runs_dir: Path) -> None:
    assert submit("seed=0")[0] == 0
    code, said = submit("seed=0,1", "paths.group_readable=true")
    assert code == 0
    assert "paths.group_readable=true: the modes of" in said
    assert f"chmod g+x {runs_dir}" in said.replace("\n", " ")
    assert f"chmod -R g+rX {runs_dir}/s" in said.replace("\n", " ")
    runs_dir.chmod(0o710)
    (runs_dir / "s").chmod(0o750)
    said = submit("seed=0,1,2", "paths.group_readable=true")[1].replace("\n", " ")
    assert "chmod -R" not in said
    assert f"chmod g+x {runs_dir}" not in said, "pytest's own folders above are another matter"
    assert "keep the group out" not in submit("seed=0,1,2,3")[1]


@pytest.mark.parametrize(("folder", "file", "bytecode"), [(0o775, 0o664, "755 644"), (0o700, 0o600, "700 600")])
def test_bytecode_is_as_readable_as_its_code(tmp_path: Path, folder: int, file: int, bytecode: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code").chmod(folder)
    (tmp_path / "code" / "my_module.py").write_text("x = 1\n")
    (tmp_path / "code" / "my_module.py").chmod(file)
    look = (
        "from hpc_trainer.record.files import set_umask; set_umask(False); set_umask(True); set_umask(False)\n"
        f"import sys; sys.path.insert(0, {str(tmp_path / 'code')!r}); import my_module\n"
    )
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", look], check=True, env=kept)
    made = tmp_path / "code" / "__pycache__"
    assert f"{made.stat().st_mode & 0o777:o} {next(made.iterdir()).stat().st_mode & 0o777:o}" == bytecode


@needs_root
def test_bytecode_that_another_user_keeps_for_himself_is_no_matter() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lies in a folder that only we may enter
        _look_as_another_user(Path(folder))


def _look_as_another_user(tmp_path: Path) -> None:
    (tmp_path / "co" / "lab" / "__pycache__").mkdir(parents=True)
    (tmp_path / "co" / "lab" / "__init__.py").touch()
    (tmp_path / "co" / "lab" / "closed").mkdir()
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)
    (tmp_path / "co" / "lab" / "__pycache__").chmod(0o700)
    look = (
        "import os, sys; from pathlib import Path\n"
        "from hpc_trainer.errors import ConfigError\n"
        "from hpc_trainer.launch.frozen_code.files import Rules, files_below\n"
        f"os.setgroups([]); os.setgid({ANOTHER_USER}); os.setuid({ANOTHER_USER})\n"
        "try:\n    print(list(files_below(Path(sys.argv[1]), ['lab'], Rules())))\n"
        "except ConfigError as error:\n    print(error)\n"
    )

    def listed() -> str:
        command = [sys.executable, "-c", look, str(tmp_path / "co")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert listed() == "['lab/__init__.py']\n"
    (tmp_path / "co" / "lab" / "closed").chmod(0o700)
    assert f"{tmp_path}/co/lab/closed cannot be read, so it cannot be frozen" in listed()
