"""Which files an export may be, and that a folder is read only if it is what its card says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hpc_trainer.config.load import section_from_plain
from hpc_trainer.deploy.exported import (
    CARD,
    CONFIG,
    FORMATS,
    QUANTIZED,
    check_format,
    needed_package,
    prune_values,
    read_card,
)
from hpc_trainer.errors import ConfigError, RunStateError, UntrustedFileError
from hpc_trainer.features.prune import PruneConfig
from hpc_trainer.record.files import sha256_of


def test_every_pair_is_taken_or_refused_with_one_that_is_taken() -> None:
    for to, each in FORMATS.items():
        for kind in (None, *QUANTIZED):
            if kind is None or kind in each.quantized:
                check_format(to, kind)
                continue
            with pytest.raises(ConfigError, match=f"--to {to} --quantize {kind}: ") as error:
                check_format(to, kind)
            words = str(error.value).partition("Use ")[2].partition(",")[0].split()
            check_format(words[1], words[3])
    with pytest.raises(ConfigError, match=r"--to onx: there is no such format. Did you mean onnx\?"):
        check_format("onx", None)
    with pytest.raises(ConfigError, match=r"--quantize int3: there is no such kind. Did you mean int"):
        check_format("torch", "int3")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    gone = {"onnxscript", "torchao"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else real(name))
    with pytest.raises(ConfigError) as error:
        check_format("onnx", "int8")
    needs = (
        "--to onnx --quantize int8 needs the package onnxscript and torchao: pip install 'hpc_trainer[export,quantize]'"
    )
    assert str(error.value) == needs
    check_format("torch_export", None)


@pytest.mark.parametrize(
    ("to", "name", "built_for", "package"),
    [
        ("safetensors", "my_lab.nets.Net", {}, "my_lab"),
        ("safetensors", "hpc_trainer.models.mlp.Mlp", {}, None),
        ("torch", "torch.nn.Linear", {}, None),
        ("onnx", "my_lab.nets.Net", {}, None),  # the graph is in the file
        ("safetensors", "my_lab.nets.Net", None, None),  # load.py makes a dictionary
    ],
)
def test_an_export_needs_the_models_package_alone(to: str, name: str, built_for: object, package: str | None) -> None:
    assert needed_package({"to": to, "built_for": built_for, "model": {"class": name}}) == package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir(mode=0o755)
    (folder / "model.onnx").write_bytes(b"weights")
    card = {"format": 1, "to": "onnx", "quantize": None, "file": "model.onnx"}
    (folder / CARD).write_text(json.dumps({**card, "sha256": sha256_of(folder / "model.onnx")}))
    (folder / CONFIG).write_text("seed: 0\n")
    return folder


def test_a_card_is_read(folder: Path) -> None:
    assert read_card(folder)["file"] == "model.onnx"


@pytest.mark.parametrize(
    ("key", "value"),
    [("file", "../model.onnx"), ("to", "pickle"), ("quantize", "int3"), ("format", 2), ("file", "model.pt2")],
)
def test_a_card_of_another_kind_is_refused(folder: Path, key: str, value: object) -> None:
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, key: value}))
    with pytest.raises(RunStateError, match="written by another version of hpc_trainer, or changed"):
        read_card(folder)


def test_a_damaged_folder_is_refused(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"weighty")
    with pytest.raises(RunStateError, match=r"is not the file that card\.json describes"):
        read_card(folder)
    (folder / CARD).write_text("{")
    with pytest.raises(RunStateError, match="is not a card of"):
        read_card(folder)


@pytest.mark.parametrize("name", ["model.onnx", CARD, CONFIG, "."])
def test_what_others_may_write_is_refused(folder: Path, name: str) -> None:
    (folder / name).chmod(0o777)
    with pytest.raises(UntrustedFileError, match="others may write it"):
        read_card(folder)


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("0.5", {"method": "unstructured", "sparsity": 0.5}),
        (".9", {"method": "unstructured", "sparsity": 0.9}),
        ("channels:0.25", {"method": "channels", "sparsity": 0.25}),
        ("2:4", {"method": "n_m", "n": 2, "m": 4}),
    ],
)
def test_what_is_typed_for_prune_are_keys_of_its_section(typed: str, values: dict[str, object]) -> None:
    assert prune_values(typed) == values
    made = section_from_plain(PruneConfig, prune_values(typed))
    assert made.method.name == values["method"]


@pytest.mark.parametrize("typed", ["", "0.0", "1", "1.5", "4:2", "2:2", "0:4", "rows:0.5", "channels:1", "nan"])
def test_other_words_for_prune_are_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match=f"--prune {typed} must be the share"):
        prune_values(typed)
