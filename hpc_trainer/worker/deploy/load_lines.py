"""The text of `load.py`: about ten lines that load an exported file where there is no trainer."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hpc_trainer.config.schema.model.shipped import CustomModelConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runs.exported import FORMATS
from hpc_trainer.worker.deploy.card import form_text
from hpc_trainer.worker.deploy.deployed import DataShape

_HERE = "here = Path(__file__).parent\n"
_ONNX = """session = onnxruntime.InferenceSession(here / "{file}", providers=["CPUExecutionProvider"])


def model(inputs):
    \"\"\"numpy to numpy: {inputs} to outputs {outputs}.\"\"\"
    return session.run(None, {{"inputs": inputs}})[0]
"""


def load_lines(title: str, to: str, quantize: str | None, told: Mapping[str, Any]) -> str:
    """Of a file with a graph.

    Args:
        told: what the card says of the model's inputs and outputs.
    """
    file = FORMATS[to].file
    takes, gives = (form_text(told[name]) for name in ("inputs", "outputs"))
    if to == "onnx":
        body = _ONNX.format(file=file, inputs=takes, outputs=gives)
        return f'"""{title}."""\n\nfrom pathlib import Path\n\nimport onnxruntime\n\n{_HERE}{body}'
    more = "import torchao.quantization  # noqa: F401 -- operations of the file are torchao's\n" if quantize else ""
    return (
        f'"""{title}: {takes} to outputs {gives}."""\n\nfrom pathlib import Path\n\nimport torch\n{more}\n'
        f'{_HERE}model = torch.export.load(here / "{file}").module()\n'
    )


def weights_lines(title: str, config: TrainConfig, to: str, quantize: str | None, shape: DataShape | None) -> str:
    """Of a file of weights: into the model; into a dictionary, where nobody knows how the model is built.

    Args:
        shape: of the data; None: it is not known, or the loop is a person's own.
    """
    reader, read = "from safetensors.torch import load_file", f'load_file(here / "{FORMATS[to].file}")'
    if to == "torch":
        reader, read = "import torch", f'torch.load(here / "{FORMATS[to].file}", weights_only=True)'
    if config.train.main is not None or shape is None:
        return (
            f'"""{title}."""\n\nfrom pathlib import Path\n\n{reader}\n\n{_HERE}'
            f"weights = {read}\n# Build the model as {config.train.main or 'the run'} does, then: "
            "model.load_state_dict(weights)\n"
        )
    module, _, name = config.model._target_.rpartition(".")
    model = config.model
    kind = type(model)
    given: dict[str, Any] = {} if shape.input_shape is None else {"input_shape": shape.input_shape}
    if shape.num_classes is not None:
        given["num_classes"] = shape.num_classes
    imports = [reader, f"from {module} import {name}"]
    standard = "from pathlib import Path"
    if isinstance(model, CustomModelConfig):
        where = f"\n\nRun it where {module.partition('.')[0]} can be imported."
        built = f"model = {name}(**{model.kwargs!r})"
        if given:
            standard, built = f"import inspect\n{standard}", _built_own(name, given, model.kwargs)
    else:
        where, names = "", [each.name for each in fields(kind) if each.name not in ("name", "_target_")]
        values = {key: getattr(model, key) for key in names}
        words = [type(each) for each in values.values() if isinstance(each, enum.Enum)]
        for source in sorted({each.__module__ for each in (kind, *words)}):
            here = {each.__name__ for each in (kind, *words) if each.__module__ == source}
            imports.append(f"from {source} import {', '.join(sorted(here))}")
        listed = ", ".join(f"{key}={_written(value)}" for key, value in values.items())
        known = ", ".join(f"{key}={value!r}" for key, value in given.items())
        built = f"model = {name}({kind.__name__}({listed}), {known})"
    assign = ""
    if quantize:
        imports.append("import torchao.quantization  # noqa: F401 -- tensors of the file are torchao's")
        assign = ", assign=True"
    return (
        f'"""{title}.{where}"""\n\n{standard}\n\n' + "\n".join(sorted(imports)) + "\n\n"
        f"{_HERE}{built}\nmodel.load_state_dict({read}{assign})\nmodel.eval()\n"
    )


def _built_own(name: str, given: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str:
    """A class is given what it has arguments for, as in the run; one sees them only where it can be imported."""
    return (
        f"shape = {given!r}\n"
        f"arguments = inspect.signature({name}).parameters\n"
        "takes_all = any(each.kind is each.VAR_KEYWORD for each in arguments.values())\n"
        "given = {name: value for name, value in shape.items() if takes_all or name in arguments}\n"
        f"model = {name}(**given, **{kwargs!r})"
    )


def _written(value: Any) -> str:
    """As Python reads it."""
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
