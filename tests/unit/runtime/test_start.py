"""The current folder comes last on the path of a process of ours, whatever else stands there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpc_trainer.runtime.start import put_current_folder_last


def test_a_folder_that_nobody_may_look_into_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a person's PYTHONPATH may lie what Python passes over: here a name that no file system takes."""
    monkeypatch.chdir(tmp_path)
    broken = "/" + "x" * 300
    monkeypatch.setattr(sys, "path", [os.fspath(tmp_path), broken, "/usr", ""])
    put_current_folder_last()
    assert sys.path == [broken, "/usr", os.fspath(tmp_path), ""]
