"""The lists of forms in which one trained run is exported: files of `sweep/`, and words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.deploy.export import EVERY, Form, forms_of
from hpc_trainer.deploy.exported import FORMATS
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid


def test_the_file_that_is_shipped_has_what_it_is_compared_with_and_each_way() -> None:
    forms = forms_of(["sweep=compress"])
    assert Form(to="onnx") in forms
    assert {form.quantize for form in forms} == {None, "int8", "dynamic_int8", "int4"}
    assert {"0.5", "2:4", "channels:0.5"} <= {form.prune for form in forms}
    assert len({form.name for form in forms}) == len(forms)
    assert all(form.to in FORMATS for form in forms)


def test_a_file_or_words_of_a_persons_own(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "small.yaml").write_text(
        '# @package _global_\nsweep:\n  forms:\n    - {to: torch, prune: 0.5}\n    - {to: torch, prune: "0.5"}\n'
    )
    assert forms_of(["sweep=small"], [tmp_path]) == (Form(to="torch", prune="0.5"),)
    assert forms_of(["sweep.forms=[{to: onnx, quantize: int8, prune: 'channels:0.5'}]"]) == (
        Form(to="onnx", quantize="int8", prune="channels:0.5"),
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sweep=digits_grid"], "is a grid and lists no forms"),
        (["sweep=compress", "optim.lr=1"], "optim.lr=1: an export uses the run as it was trained"),
        (["sweep.forms=[{to: onyx}]"], "Did you mean onnx?"),
        (["sweep.forms=[{to: onnx, quantize: int3}]"], "--quantize int3"),
        (["sweep.forms=[{to: onnx, prune: 2}]"], "--prune 2"),
        (["sweep.forms=[{quantize: int8}]"], "A form needs the key `to`"),
        (["sweep.forms=[{to: onnx, bits: 3}]"], "A form needs the key `to`"),
    ],
)
def test_lists_that_cannot_be(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forms_of(words)
    assert told in str(caught.value)


def test_every_form_is_each_format_with_each_number_format() -> None:
    assert len(EVERY) == sum(1 + len(each.quantized) for each in FORMATS.values())
    assert all(form.prune is None for form in EVERY)


def test_a_list_of_forms_is_no_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"sweep\.forms lists the forms in which `export` writes one trained run"):
        freeze_grid(["experiment=digits", "cluster=local", "sweep=compress"])
