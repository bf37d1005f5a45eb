"""A checkout is recorded so that it can be made again: revision, difference, new files; never a secret."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hpc_trainer.errors import RunStateError
from hpc_trainer.record.redaction import REDACTED, Redaction
from hpc_trainer.runtime.code import checkouts_of
from hpc_trainer.verify.old_code import write_checkout
from tests.unit.launch.frozen_code.projects import git, make_checkout, write_files

TOKEN = "hf_" + "Q7w8" * 6


def _files(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_what_was_recorded_is_made_again(tmp_path: Path) -> None:
    top = make_checkout(tmp_path / "project")
    write_files(top, {"my_lab/net.py": "class Net:\n    x = 1", "my_lab/new.py": "a = 1\nb = 2\n", "my_lab/no.py": ""})
    (top / "setup.py").unlink()
    was = _files(top)
    (found,) = checkouts_of([str(top / "my_lab"), str(top)], Redaction())
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "Later")
    write_files(top, {"my_lab/net.py": "raise SystemExit\n"})

    write_checkout(found, tmp_path / "again" / "project")

    assert _files(tmp_path / "again" / "project") == was
    assert found["diff_sha256"] == hashlib.sha256(found["diff"].encode()).hexdigest()
    assert (found["diff_redacted"], found["untracked"], found["top"]) == (0, [], str(top))
    assert not (top / ".git" / "worktrees").exists()


def test_secrets_are_in_no_record(tmp_path: Path) -> None:
    top = make_checkout(tmp_path / "project")
    write_files(top, {".env": "MODE=old\n"})
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "With .env")
    git(top, "remote", "add", "origin", "https://me:swordfish@example.org/lab.git")
    write_files(top, {".env": "MODE=blowfish\n", "my_lab/net.py": f'TOKEN = "{TOKEN}"\n', "api_key.txt": "codfish"})

    (found,) = checkouts_of([str(top)], Redaction())

    told = str(found)
    assert all(secret not in told for secret in (TOKEN, "swordfish", "blowfish", "codfish"))
    assert (found["left_out"], found["untracked"]) == ([".env"], ["api_key.txt"])
    assert f'+TOKEN = "{REDACTED}"' in found["diff"]
    assert found["diff_redacted"] == 1
    write_checkout(found, tmp_path / "again" / "project")
    assert (tmp_path / "again" / "project" / "my_lab" / "net.py").read_text() == f'TOKEN = "{REDACTED}"\n'


def test_a_folder_without_git_has_no_checkout(tmp_path: Path) -> None:
    assert checkouts_of([str(tmp_path)], Redaction()) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"revision": "0" * 40}, "neither .* has it"),
        ({"diff": None, "diff_sha256": "0" * 64}, "too long to be kept"),
        ({"diff": "diff --git a/gone b/gone\n--- a/gone\n+++ b/gone\n@@ -1 +1 @@\n-a\n+b\n", "diff_redacted": 2},
         "does not apply: 2 value"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_again_says_why(tmp_path: Path, change: dict[str, object], why: str) -> None:
    (found,) = checkouts_of([str(make_checkout(tmp_path / "project"))], Redaction())

    with pytest.raises(RunStateError, match=why):
        write_checkout({**found, **change}, tmp_path / "again" / "project")
