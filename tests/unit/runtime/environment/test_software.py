"""What is installed is what importlib.metadata says, and where editable and git installs come from is told."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hpc_trainer.runtime import machine


def test_versions_are_those_of_importlib_metadata() -> None:
    wanted: dict[str, str] = {}
    for each in metadata.distributions():
        wanted.setdefault(re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(), each.version)

    found, _ = machine.packages()

    assert found == dict(sorted(wanted.items()))
    assert "torch" in found


def test_where_packages_come_from(tmp_path: Path) -> None:
    told = {
        "plain-1.0.dist-info": None,
        "By.Name-2.0.dist-info": {"url": "file:///home/me/x", "dir_info": {"editable": True}},
        "of_git-3.0+cu1.dist-info": {"url": "https://h/x", "vcs_info": {"vcs": "git", "commit_id": "ab"}},
        "odd-4.dist-info": ["no object"],
    }
    for name, origin in told.items():
        (tmp_path / name).mkdir()
        if origin is not None:
            (tmp_path / name / "direct_url.json").write_text(json.dumps(origin))
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "plain-9.0.dist-info").mkdir()

    versions, origins = machine.packages([str(tmp_path), str(tmp_path / "later"), str(tmp_path / "nowhere")])

    assert versions == {"by-name": "2.0", "odd": "4", "of-git": "3.0+cu1", "plain": "1.0"}
    assert origins == {
        "by-name": {"url": "file:///home/me/x", "editable": True},
        "odd": {"url": "unreadable"},
        "of-git": {"url": "https://h/x", "vcs": "git", "commit_id": "ab"},
    }


def test_variables_are_those_that_matter() -> None:
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/home/me", "SLURM_JOB_ID": "7", "LD_LIBRARY_PATH": "/x", "MAIL": "y"}

    assert list(machine.variables(environ)) == ["LD_LIBRARY_PATH", "NCCL_DEBUG", "SLURM_JOB_ID"]


def test_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADEDMODULES", "gcc/13.2:cuda/13.0")

    assert machine.modules() == ["gcc/13.2", "cuda/13.0"]


def test_the_machine_names_its_processor_and_libraries() -> None:
    import torch

    assert machine.cpu()["count"] >= 1
    found = machine.libraries()
    assert (found["torch"], found["cpu_kernels"]) == (torch.__version__, torch.backends.cpu.get_cpu_capability())
    assert machine.python()["executable"] == sys.executable


def test_gpus_of_the_driver_are_listed_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-{number}\n")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n")
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)

    assert [(each["name"], each["uuid"]) for each in machine.devices()] == [
        ("NVIDIA H100 80GB HBM3", "GPU-0"), ("NVIDIA H100 80GB HBM3", "GPU-1"),
    ]  # fmt: skip
    assert machine.driver() == "570.86.15"
