"""Content of an export's folder: the file, load.py, and the card. The asking process has created the folder."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_trainer import __version__
from hpc_trainer.config.load import section_from_plain
from hpc_trainer.config.schema.data import TOKENIZER
from hpc_trainer.config.schema.features.compress import PruneConfig
from hpc_trainer.config.schema.model import CONFIG_FILE, HfConfig
from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.user_files import is_file, read_given
from hpc_trainer.deploy.card import as_page, form_of, load_lines, prepare_lines, weights_lines
from hpc_trainer.deploy.graphs import (
    IN_THE_FILE,
    open_file,
    quantize_file,
    quantize_model,
    trace,
    write_onnx,
    write_program,
)
from hpc_trainer.deploy.measure import NUM_SAMPLES, QUANTIZED, SAME, compare, counts, latencies, machine
from hpc_trainer.deploy.trained import (
    Data,
    DataShape,
    Taken,
    changes_model,
    data_of,
    deployed_model,
    shape_of,
    taken_of,
    write_weights,
)
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.prune.choose import pruned
from hpc_trainer.record.exported import CARD, CARD_FORMAT, CARD_TEXT, FORMATS, LOAD, prune_values, what_of
from hpc_trainer.record.files import sha256_of
from hpc_trainer.training.build import build_model
from hpc_trainer.training.data.preprocessing import described


@dataclass(frozen=True, slots=True)
class Subject:
    """Model to be exported, as it is deployed, and the data that it was built and trained for.

    The file must give the outputs of `model`. `original` is the same model before `--prune`.
    """

    config: TrainConfig
    shape: DataShape
    model: nn.Module
    original: nn.Module
    data: Data
    state: Mapping[str, Any]
    """Content of a file of weights: the checkpoint's own values, if no feature changes them."""


@dataclass(frozen=True, slots=True)
class Written:
    """A written file: its content, and its descriptions in the card and in load.py."""

    state: Mapping[str, Any]
    shape: DataShape | None
    told: dict[str, Any]
    lines: str


def export(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Write the export into the folder `asked["folder"]`, and return the content of the card.

    If the model or its data cannot be built or evaluated here, a file of weights is still written, and a note says why.

    Raises:
        ConfigError: the model has no such form, or the file would give other outputs.
        CheckpointError, DataError, RunStateError: the checkpoint, the data or the run cannot be read.
    """
    config, taken = taken_of(asked)
    to, quantize, folder = asked["to"], asked["quantize"], Path(asked["folder"])
    path = folder / FORMATS[to].file
    is_same = quantize is None and asked["prune"] is None
    is_plain = not FORMATS[to].has_graph and is_same and not (asked["is_model"] and changes_model(config))
    made, notes = None, []
    if not is_plain or (asked["is_model"] and asked["measure"]):
        try:
            made = _write(_subject(config, taken, asked), path, to, quantize, asked)
        except Exception as error:  # errors of a user's code, among others
            if not is_plain:
                raise
            path.unlink(missing_ok=True)
            notes.append(f"Not measured: {error}")
    made = made or _write_plainly(config, taken, path, asked)
    card = {
        "format": CARD_FORMAT, "made_by": f"hpc_trainer {__version__}", "run_id": asked["run_id"],
        "step": asked["step"], "weights": "raw" if asked["over"] is None else "average", "to": to,
        "quantize": quantize, "prune": asked["prune"], "file": path.name, "num_bytes": path.stat().st_size,
        "sha256": sha256_of(path),
        "built_for": None if made.shape is None else dataclasses.asdict(made.shape),
        "model": {"name": config.model.name, "class": config.model._target_, **counts(made.state)},
        **made.told, "notes": notes,
    }  # fmt: skip
    (folder / LOAD).write_text(made.lines, encoding="utf-8")
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_TEXT).write_text(as_page(card), encoding="utf-8")
    more = [TOKENIZER] if is_file(folder / TOKENIZER) else []
    if (
        isinstance(config.model, HfConfig)
        and (shape := made.shape) is not None
        and shape.input_shape
        and shape.num_classes
    ):
        hub = config.model.file_for(shape.input_shape, shape.num_classes)
        (folder / CONFIG_FILE).write_text(json.dumps(hub, indent=2) + "\n", encoding="utf-8")
        more.append(CONFIG_FILE)
    tensors = [tensor for tensor in made.state.values() if isinstance(tensor, torch.Tensor)]
    return {
        "more_files": more, "card": card, "num_tensors": len(tensors),
        "num_elements": sum(tensor.numel() for tensor in tensors), "num_bytes": card["num_bytes"],
    }  # fmt: skip


def _subject(config: TrainConfig, taken: Taken, asked: Mapping[str, Any]) -> Subject:
    (data, _), prune = data_of(asked), asked["prune"]
    shape = shape_of(config, taken.made_with, data.samples)
    assert shape is not None
    original = model = deployed_model(config, shape, taken.state)
    if prune is not None:
        model = pruned(original, section_from_plain(PruneConfig, prune_values(prune)))
    is_same = model is original and not changes_model(config)
    return Subject(config, shape, model, original, data, taken.state if is_same else model.state_dict())


def _write_plainly(config: TrainConfig, taken: Taken, path: Path, asked: Mapping[str, Any]) -> Written:
    """Write the weights, without building the model."""
    write_weights(path, taken.state)
    shape = shape_of(config, taken.made_with, None) if asked["is_model"] else None
    nothing = dict.fromkeys(("num_quantized", "inputs", "outputs", "same", "measured"))
    facts = _facts_of_data(asked, None)
    lines = weights_lines(asked["title"], config, asked["to"], None, shape)
    lines += _prepare_lines(config, facts, shape, asked) if asked["is_model"] else ""
    return Written(taken.state, shape, {**nothing, **facts}, lines)


def _prepare_lines(
    config: TrainConfig, facts: Mapping[str, Any], shape: DataShape | None, asked: Mapping[str, Any]
) -> str:
    """Return the text of `prepare` for load.py; the run's tokenizer file is copied beside load.py if it is found."""
    made, folder = facts["preprocessing"], Path(asked["folder"])
    sha256 = (made or {}).get("tokenizer_sha256")
    has_tokenizer = False
    if sha256 is not None:
        for path in config.data.tokenizer_files():
            with contextlib.suppress(OSError):
                text = read_given(path)
                has_tokenizer = hashlib.sha256(text).hexdigest() == sha256
            if has_tokenizer:
                (folder / TOKENIZER).write_bytes(text)
                break
    inputs = () if shape is None else shape.input_shape or ()
    return prepare_lines(made, asked["to"], inputs, has_tokenizer=has_tokenizer)


def _facts_of_data(asked: Mapping[str, Any], data: Data | None) -> dict[str, Any]:
    """Return class names and preprocessing from the checkpoint, or else from the present data."""
    fed = asked.get("fed") or {"classes": None, "preprocessing": None, "unknown": None}
    here = described(None if data is None else data.samples)
    if fed["unknown"] and data is not None:
        return here
    return {name: fed[name] or here[name] for name in ("classes", "preprocessing")}


def _write(subject: Subject, path: Path, to: str, quantize: str | None, asked: Mapping[str, Any]) -> Written:
    """Return the written file, after a check of its outputs and, if requested, a measurement."""
    original = subject.model
    inputs = subject.data.inputs(original, NUM_SAMPLES)
    what = what_of(to, quantize, asked["prune"])
    count: int | None = None
    model = original
    if quantize is not None and quantize not in IN_THE_FILE.get(to, ()):
        model = copy.deepcopy(original)
        count = quantize_model(model, quantize, subject.config.qat)
    _write_file(subject, model, path, inputs, to)

    def build() -> nn.Module:
        return build_model(subject.config, subject.shape)

    file = open_file(path, to, quantize, build)
    same = compare(file, model, inputs, SAME, what)
    if quantize is not None:
        if count is None:
            count = quantize_file(path, quantize)
            file = open_file(path, to, quantize, build)
        share = QUANTIZED[quantize] if asked["tolerance"] is None else asked["tolerance"]
        same = compare(file, original, inputs, share, what)
    with torch.no_grad():
        forms = {"inputs": form_of(inputs), "outputs": form_of(original(inputs))}
    facts = {
        "num_quantized": count, **forms, "same": same, **_facts_of_data(asked, subject.data),
        "measured": _measured(subject, file, inputs, path) if asked["measure"] else None,
    }  # fmt: skip
    if FORMATS[to].has_graph:
        lines = load_lines(asked["title"], to, quantize, facts)
    else:
        lines = weights_lines(asked["title"], subject.config, to, quantize, subject.shape)
    lines += _prepare_lines(subject.config, facts, subject.shape, asked)
    return Written(subject.state, subject.shape, facts, lines)


def _write_file(subject: Subject, model: nn.Module, path: Path, inputs: torch.Tensor, to: str) -> None:
    if FORMATS[to].has_graph:
        program = trace(model, inputs, to)
        (write_onnx if to == "onnx" else write_program)(program, path)
        return
    wanted = {name: value.shape for name, value in _tensors(build_model(subject.config, subject.shape)).items()}
    found = {name: value.shape for name, value in _tensors(model).items()}
    if found != wanted:
        name = next(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
        here, there = (list(each[name]) if name in each else "not there" for each in (found, wanted))
        raise ConfigError(
            f"--to {to} holds weights for {subject.config.model._target_}, and the model as it is deployed is another "
            f"one: {name} is {here}, and in that class {there}. Use --to torch_export or --to onnx, which hold what is "
            "computed, too."
        )
    write_weights(path, subject.state if model is subject.model else model.state_dict())


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _measured(subject: Subject, file: nn.Module, inputs: torch.Tensor, path: Path) -> dict[str, Any]:
    data, cpu, exact, original = subject.data, torch.device("cpu"), PrecisionConfig(), subject.original
    models = {"original": original, "exported": file}
    times = latencies(models, inputs)
    sizes = {"original": counts(original.state_dict())["num_bytes"], "exported": path.stat().st_size}
    return {
        **{
            name: {"num_bytes": sizes[name], "metrics": data.figures(model, cpu, exact), "latency": times[name]}
            for name, model in models.items()
        },
        "data": data.config.data.name, "num_samples": len(data.samples), "machine": machine(),
    }  # fmt: skip
