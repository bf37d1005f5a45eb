"""The wheel, installed into an environment of its own and started from another folder, trains."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_wheel_runs_from_another_folder(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    # The dependencies come from here (torch alone is 200 MB); a plain path in a .pth file brings no editable install.
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(site.getsitepackages()[0] + "\n")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = subprocess.run(
        [python, "-c", "import hpc_trainer; print(hpc_trainer.__file__)"],
        cwd=elsewhere, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(packages) in where.stdout
    done = subprocess.run(
        [tmp_path / "env" / "bin" / "hpc-trainer", "train", "experiment=digits", "debug=smoke", "--json"],
        cwd=elsewhere, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["state"] == "COMPLETED"
    assert (elsewhere / "runs" / "digits").is_dir()
    program = tmp_path / "env" / "bin" / "hpc-trainer"
    subprocess.run([program, "init", "lab"], cwd=elsewhere, env=env, capture_output=True, check=True)
    assert (elsewhere / "lab" / ".gitignore").is_file(), "its templates are in the wheel"
    assert (packages / "hpc_trainer" / "py.typed").exists()
    # Hydra finds its plugins in a namespace package at the top.
    assert (packages / "hydra_plugins" / "hpc_trainer_launcher" / "__init__.py").exists()
    assert not (packages / "hpc_trainer" / "hydra_apps" / "plugin").exists()
