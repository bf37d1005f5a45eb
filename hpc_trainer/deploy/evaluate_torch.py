"""`eval` and `predict` with torch: metrics of a model on data, and a file with a prediction for each sample."""

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
    serve,
    shape_of,
    taken_of,
)
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.record.files import whole_file
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.training.build import build_model
from hpc_trainer.training.data.batches import map_tensors
from hpc_trainer.training.step import autocast, set_precision

_CPU = torch.device("cpu")


class Subject:
    """A run's model on its device, or an export's model on the CPU, with the data on which it is evaluated."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self.device, self.precision = _CPU, PrecisionConfig()
        if request["card"] is not None:
            self.data, self.model = self._exported(request)
            return
        config, taken = taken_of(request)
        self.data, notes = data_of(request)
        self.notes += notes
        shape = shape_of(config, taken.made_with, self.data.samples)
        check_same_shape(shape, self.data)
        assert shape is not None
        self.precision = config.precision
        set_precision(self.precision)
        self.device = self._place(config.hardware.device_type)
        self.model = deployed_model(config, shape, taken.state).to(self.device)

    def _exported(self, request: Mapping[str, Any]) -> tuple[Data, nn.Module]:
        config, card, folder = from_plain(request["config"]), request["card"], Path(request["folder"])
        data, notes = data_of(request)
        self.notes += notes
        built_for = card["built_for"]
        shape = DataShape(data.samples.input_shape, data.samples.num_classes)
        if built_for is not None:
            input_shape = built_for["input_shape"]
            shape = DataShape(None if input_shape is None else tuple(input_shape), built_for["num_classes"])
            check_same_shape(shape, data)
        model = open_file(folder / card["file"], card["to"], card["quantize"], lambda: build_model(config, shape))
        return data, model

    def _place(self, kind: str) -> torch.device:
        try:
            return kind_of(kind).device(0)
        except HpcTrainerError as error:
            self.notes.append(f"On the CPU, as this machine has no device of kind {kind}: {error}")
            return _CPU

    def facts(self) -> dict[str, Any]:
        """Return the other facts that both verbs show."""
        name = kind_of(self.device).name(self.device)
        return {
            "data": self.data.config.data.name, "num_samples": len(self.data.samples),
            "device": f"{self.device.type} ({name})", "notes": self.notes,
        }  # fmt: skip


def evaluate_model(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics on all samples. Raises as `open_data` and the task do."""
    subject = Subject(request)
    return {"metrics": subject.data.figures(subject.model, subject.device, subject.precision), **subject.facts()}


def predict(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write a prediction for each sample to `request["output"]` atomically, as JSON lines or arrays of numpy.

    Raises OSError, and what `open_data` and the task raise.
    """
    subject, output = Subject(request), Path(request["output"])
    known_classes = (request.get("data_facts") or {}).get("classes")
    classes = known_classes or getattr(subject.data.samples, "classes", None)
    names = [str(class_name) for class_name in classes] if isinstance(classes, Sequence) else None
    batches = _predictions(subject)
    with whole_file(output) as file:
        keys = _write_arrays(file, batches) if output.suffix == ".npz" else _write_lines(file, batches, names)
    return {"output": str(output), "keys": keys, **subject.facts()}


@torch.no_grad()
def _predictions(subject: Subject) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield for each batch `index`, the task's predictions, and `target` if batches are pairs."""
    data, task = subject.data, subject.data.task
    for start in range(0, len(data.samples), data.batch_size):
        rows = range(start, min(start + data.batch_size, len(data.samples)))
        batch = map_tensors(data.samples.__getitems__(rows), lambda values: values.to(subject.device))
        with autocast(subject.precision, subject.device.type):
            predictions = task.predictions(subject.model, batch)
        wrong = next((name for name, values in predictions.items() if len(values) != len(rows)), None)
        if wrong is not None:
            raise ConfigError(
                f"The task's predictions have {len(predictions[wrong])} values of {wrong} for a batch of {len(rows)} "
                "samples, and need one for each sample."
            )
        columns = {"index": np.asarray(rows), **{name: _numpy(values) for name, values in predictions.items()}}
        yield {**columns, "target": _numpy(batch[1])} if task.takes_pairs else columns


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _write_lines(
    file: IO[bytes], batches: Iterator[dict[str, np.ndarray[Any, Any]]], names: Sequence[str] | None
) -> list[str]:
    """Write a line of JSON for each sample, with the name of its class if it has one; return the keys."""
    keys: dict[str, None] = {}
    for batch in batches:
        columns = {name: array.tolist() for name, array in batch.items()}
        if names is not None and "class" in batch and batch["class"].ndim == 1:
            columns["class_name"] = [names[index] if index < len(names) else None for index in columns["class"]]
        keys |= dict.fromkeys(columns)
        for row in zip(*columns.values(), strict=True):
            file.write(json.dumps(dict(zip(columns, row, strict=True))).encode() + b"\n")
    return [*keys]


def _write_arrays(file: IO[bytes], batches: Iterator[dict[str, np.ndarray[Any, Any]]]) -> list[str]:
    """Write one numpy array for each key; return the keys."""
    parts = [*batches]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return [*arrays]


if __name__ == "__main__":
    serve({"eval": evaluate_model, "predict": predict})
