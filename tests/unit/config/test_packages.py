"""Packages that are no dependency of ours."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hpc_trainer.config.packages import EXTRAS, check_installed, missing, optional
from hpc_trainer.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_its_extra_brings_it(package: str, extra: str) -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    brought = {re.split(r"[>=<\[;]", each)[0] for each in extras[extra]}
    names = {"PIL": "pillow", "pynvml": "nvidia-ml-py", "prometheus_client": "prometheus-client"}
    assert names.get(package, package) in brought


def test_what_is_missing_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"onnx", "torchao", "pyarrow"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else object())
    assert missing("data=x", "PIL") is None
    said = "--to onnx needs the package onnx and torchao: pip install 'hpc_trainer[export,quantize]'"
    assert missing("--to onnx", "onnx", "onnxruntime", "torchao") == said
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_installed("--to onnx", "onnx", "torchao")
    with pytest.raises(ConfigError, match=r"table\.csv needs the package pyarrow: pip install 'hpc_trainer"):
        optional("pyarrow.csv", "table.csv")
