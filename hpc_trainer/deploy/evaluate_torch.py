"""Evaluation of a model on data (`eval`), and a prediction for each sample (`predict`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from hpc_trainer.config.load import from_plain
from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.deploy.graphs import open_file
from hpc_trainer.deploy.trained import (
    Data,
    DataShape,
    check_same_shape,
    data_of,
    deployed_model,
    shape_of,
    taken_of,
)
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.record.files import whole_file
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.training.build import build_model
from hpc_trainer.training.data.batches import map_tensors
from hpc_trainer.training.precision import autocast, set_precision

_CPU = torch.device("cpu")


class Asked:
    """A run's model on its device, or an export's model on the CPU, with the data on which it is evaluated."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self.device, self.precision = _CPU, PrecisionConfig()
        if asked["card"] is not None:
            self.data, self.model = self._exported(asked)
            return
        config, taken = taken_of(asked)
        self.data, notes = data_of(asked)
        self.notes += notes
        shape = shape_of(config, taken.made_with, self.data.samples)
        check_same_shape(shape, self.data)
        assert shape is not None
        self.precision = config.precision
        set_precision(self.precision)
        self.device = self._place(config.hardware.device_type)
        self.model = deployed_model(config, shape, taken.state).to(self.device)

    def _exported(self, asked: Mapping[str, Any]) -> tuple[Data, nn.Module]:
        config, card, folder = from_plain(asked["config"]), asked["card"], Path(asked["folder"])
        data, notes = data_of(asked)
        self.notes += notes
        built_for = card["built_for"]
        shape = DataShape(data.samples.input_shape, data.samples.num_classes)
        if built_for is not None:
            given = built_for["input_shape"]
            shape = DataShape(None if given is None else tuple(given), built_for["num_classes"])
            check_same_shape(shape, data)
        model = open_file(folder / card["file"], card["to"], card["quantize"], lambda: build_model(config, shape))
        return data, model

    def _place(self, kind: str) -> torch.device:
        try:
            return kind_of(kind).device(0)
        except HpcTrainerError as error:
            self.notes.append(f"On the CPU, as this machine has no device of kind {kind}: {error}")
            return _CPU

    def told(self) -> dict[str, Any]:
        """Return the other facts that both verbs show."""
        name = kind_of(self.device).name(self.device)
        return {
            "data": self.data.config.data.name, "num_samples": len(self.data.samples),
            "device": f"{self.device.type} ({name})", "notes": self.notes,
        }  # fmt: skip


def evaluate_model(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics on all samples. Raises as `open_data` and the task do."""
    subject = Asked(asked)
    return {"metrics": subject.data.figures(subject.model, subject.device, subject.precision), **subject.told()}


def predict(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Write a prediction for each sample to `asked["output"]` atomically, as JSON lines or arrays of numpy.

    Raises OSError, and as `open_data` and the task do.
    """
    subject, output = Asked(asked), Path(asked["output"])
    classes = (asked.get("fed") or {}).get("classes") or getattr(subject.data.samples, "classes", None)
    names = [str(class_name) for class_name in classes] if isinstance(classes, Sequence) else None
    batches = _predictions(subject)
    with whole_file(output) as file:
        keys = _as_arrays(file, batches) if output.suffix == ".npz" else _as_lines(file, batches, names)
    return {"output": str(output), "keys": keys, **subject.told()}


@torch.no_grad()
def _predictions(found: Asked) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield for each batch `index`, the task's predictions, and `target` if batches are pairs."""
    data, task = found.data, found.data.task
    for start in range(0, len(data.samples), data.batch_size):
        rows = range(start, min(start + data.batch_size, len(data.samples)))
        batch = map_tensors(data.samples.__getitems__(rows), lambda values: values.to(found.device))
        with autocast(found.precision, found.device.type):
            predictions = task.predictions(found.model, batch)
        wrong = next((name for name, values in predictions.items() if len(values) != len(rows)), None)
        if wrong is not None:
            raise ConfigError(f"{wrong} has {len(predictions[wrong])} predictions for a batch of {len(rows)} samples.")
        made = {"index": np.asarray(rows), **{name: _numpy(values) for name, values in predictions.items()}}
        yield {**made, "target": _numpy(batch[1])} if task.takes_pairs else made


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _as_lines(
    file: IO[bytes], batches: Iterator[dict[str, np.ndarray[Any, Any]]], names: Sequence[str] | None
) -> list[str]:
    keys: dict[str, None] = {}
    for batch in batches:
        columns = {name: array.tolist() for name, array in batch.items()}
        if names is not None and "class" in batch and batch["class"].ndim == 1:
            columns["class_name"] = [names[index] if index < len(names) else None for index in columns["class"]]
        keys |= dict.fromkeys(columns)
        for row in zip(*columns.values(), strict=True):
            file.write(json.dumps(dict(zip(columns, row, strict=True))).encode() + b"\n")
    return [*keys]


def _as_arrays(file: IO[bytes], batches: Iterator[dict[str, np.ndarray[Any, Any]]]) -> list[str]:
    parts = [*batches]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return [*arrays]
