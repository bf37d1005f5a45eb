"""The code of a run that nothing was frozen of: had back from git, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import RunStateError
from hpc_trainer.launch.frozen_code.archive import code_revision
from hpc_trainer.record.redaction import Redaction
from hpc_trainer.runtime.code import checkouts_of
from hpc_trainer.verify.old_code import read_checkout
from tests.unit.launch.frozen_code.projects import git, make_checkout, write_files
from tests.unit.record.builders import make_spec

OWN = ("cluster=local", "model=custom", "model._target_=my_lab.net.Net", "snapshot=off")


def _recorded(top: Path) -> dict[str, Any]:
    return {"places": {"my_lab": str(top)}, "checkouts": checkouts_of([str(top)], Redaction())}


def test_the_code_of_then_is_frozen_whatever_stands_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = make_checkout(tmp_path / "project")
    write_files(top, {"my_lab/net.py": "class Net: then = 1\n"})
    recorded = _recorded(top)
    git(top, "commit", "-qam", "Later")
    write_files(top, {"my_lab/net.py": "class Net: now = 1\n"})
    monkeypatch.chdir(top)

    code = read_checkout(make_spec(*OWN, trust=["my_lab"]), recorded, tmp_path / "runs")

    assert code is not None
    (content,) = [each for name, (_, each) in code.contents.items() if name.endswith("my_lab/net.py")]
    assert content == b"class Net: then = 1\n"
    assert Path.cwd() == top


def test_within_a_hook_of_another_repository_its_own_one_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, other = make_checkout(tmp_path / "project"), make_checkout(tmp_path / "other")
    write_files(top, {"my_lab/net.py": "class Net: then = 1\n"})
    write_files(other, {"my_lab/net.py": "class Net: other = 1\n"})
    monkeypatch.chdir(top)
    revision = code_revision()["git_revision"]
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))

    assert code_revision()["git_revision"] == revision
    code = read_checkout(make_spec(*OWN, trust=["my_lab"]), _recorded(top), tmp_path / "runs")

    assert code is not None
    (content,) = [each for name, (_, each) in code.contents.items() if name.endswith("my_lab/net.py")]
    assert content == b"class Net: then = 1\n"


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"my_lab/net.py": "class Net: ...\n"})

    with pytest.raises(RunStateError, match="is not a git checkout, and nothing was frozen"):
        read_checkout(make_spec(*OWN, trust=["my_lab"]), _recorded(tmp_path), tmp_path / "runs")


def test_a_program_without_frozen_code_is_refused(tmp_path: Path) -> None:
    spec = make_spec("cluster=local", "train.command='sh -c true'", "snapshot=off")

    with pytest.raises(RunStateError, match="its files were not frozen"):
        read_checkout(spec, _recorded(tmp_path), tmp_path / "runs")
