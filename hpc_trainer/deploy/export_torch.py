"""`export` with torch: writes the file of the model, checks and measures it, and writes load.py and the card beside it.

The asking process has created the folder. A file is accepted only if its outputs are the model's, up to a tolerance.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_trainer import __version__
from hpc_trainer.config.schema.data import TOKENIZER
from hpc_trainer.config.schema.model import CONFIG_FILE, HfConfig
from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.user_files import is_file, read_given
from hpc_trainer.deploy.card import as_page, form_of, load_lines, prepare_lines, weights_lines
from hpc_trainer.deploy.exported import CARD, CARD_FORMAT, CARD_TEXT, FORMATS, LOAD, options_text
from hpc_trainer.deploy.graphs import (
    IN_THE_FILE,
    open_file,
    quantize_file,
    quantize_model,
    trace,
    write_onnx,
    write_program,
)
from hpc_trainer.deploy.trained import (
    Data,
    DataShape,
    Taken,
    changes_model,
    data_of,
    deployed_model,
    pruned,
    quantization_of,
    serve,
    shape_of,
    taken_of,
    write_weights,
)
from hpc_trainer.errors import ConfigError
from hpc_trainer.record.files import sha256_of
from hpc_trainer.runtime.machine import cpu
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
    """A written file: its content, its entries in the card, and the text of load.py."""

    state: Mapping[str, Any]
    shape: DataShape | None
    facts: dict[str, Any]
    load_text: str


def export(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write the export into the folder `request["folder"]`, and return the content of the card.

    If the model or its data cannot be built or evaluated here, a file of weights is still written, with a note on why.

    Raises:
        ConfigError: the model has no such form, or the file would give other outputs.
        CheckpointError, DataError, RunStateError: the checkpoint, the data or the run cannot be read.
    """
    config, taken = taken_of(request)
    to, quantize, folder = request["to"], request["quantize"], Path(request["folder"])
    path = folder / FORMATS[to].file
    is_same = quantize is None and request["prune"] is None
    is_plain = not FORMATS[to].has_graph and is_same and not (request["is_model"] and changes_model(config))
    written, notes = None, []
    if not is_plain or (request["is_model"] and request["measure"]):
        try:
            written = _write(_subject(config, taken, request), path, to, quantize, request)
        except Exception as error:  # errors of a user's code, among others
            if not is_plain:
                raise
            path.unlink(missing_ok=True)
            notes.append(f"Not measured: {error}")
    written = written or _write_plainly(config, taken, path, request)
    card = {
        "format": CARD_FORMAT, "made_by": f"hpc_trainer {__version__}", "run_id": request["run_id"],
        "step": request["step"], "weights": "raw" if request["over"] is None else "average", "to": to,
        "quantize": quantize, "prune": request["prune"], "file": path.name, "num_bytes": path.stat().st_size,
        "sha256": sha256_of(path),
        "built_for": None if written.shape is None else dataclasses.asdict(written.shape),
        "model": {"name": config.model.name, "class": config.model._target_, **counts(written.state)},
        **written.facts, "notes": notes,
    }  # fmt: skip
    (folder / LOAD).write_text(written.load_text, encoding="utf-8")
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_TEXT).write_text(as_page(card), encoding="utf-8")
    more = [TOKENIZER] if is_file(folder / TOKENIZER) else []
    if (
        isinstance(config.model, HfConfig)
        and (shape := written.shape) is not None
        and shape.input_shape
        and shape.num_classes
    ):
        hub = config.model.file_for(shape.input_shape, shape.num_classes)
        (folder / CONFIG_FILE).write_text(json.dumps(hub, indent=2) + "\n", encoding="utf-8")
        more.append(CONFIG_FILE)
    tensors = [tensor for tensor in written.state.values() if isinstance(tensor, torch.Tensor)]
    return {
        "more_files": more, "card": card, "num_tensors": len(tensors),
        "num_elements": sum(tensor.numel() for tensor in tensors), "num_bytes": card["num_bytes"],
    }  # fmt: skip


def _subject(config: TrainConfig, taken: Taken, request: Mapping[str, Any]) -> Subject:
    (data, _), prune = data_of(request), request["prune"]
    shape = shape_of(config, taken.made_with, data.samples)
    assert shape is not None
    original = model = deployed_model(config, shape, taken.state)
    if prune is not None:
        model = pruned(config, original, prune)
    is_same = model is original and not changes_model(config)
    return Subject(config, shape, model, original, data, taken.state if is_same else model.state_dict())


def _write_plainly(config: TrainConfig, taken: Taken, path: Path, request: Mapping[str, Any]) -> Written:
    """Write the weights, without building the model."""
    write_weights(path, taken.state)
    shape = shape_of(config, taken.made_with, None) if request["is_model"] else None
    nothing = dict.fromkeys(("num_quantized", "inputs", "outputs", "same", "measured"))
    facts = _facts_of_data(request, None)
    lines = weights_lines(request["title"], config, request["to"], None, shape)
    lines += _prepare_lines(config, facts, shape, request) if request["is_model"] else ""
    return Written(taken.state, shape, {**nothing, **facts}, lines)


def _prepare_lines(
    config: TrainConfig, facts: Mapping[str, Any], shape: DataShape | None, request: Mapping[str, Any]
) -> str:
    """Return the text of `prepare` for load.py; the run's tokenizer file is copied beside load.py if it is found."""
    preprocessing, folder = facts["preprocessing"], Path(request["folder"])
    sha256 = (preprocessing or {}).get("tokenizer_sha256")
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
    return prepare_lines(preprocessing, request["to"], inputs, has_tokenizer=has_tokenizer)


def _facts_of_data(request: Mapping[str, Any], data: Data | None) -> dict[str, Any]:
    """Return class names and preprocessing from the checkpoint, or else from the present data."""
    facts = request.get("data_facts") or {"classes": None, "preprocessing": None, "unknown": None}
    here = described(None if data is None else data.samples)
    if facts["unknown"] and data is not None:
        return here
    return {name: facts[name] or here[name] for name in ("classes", "preprocessing")}


def _write(subject: Subject, path: Path, to: str, quantize: str | None, request: Mapping[str, Any]) -> Written:
    """Write the file, check its outputs and, if requested, measure it; return what was written."""
    original = subject.model
    inputs = subject.data.inputs(original, NUM_SAMPLES)
    options = options_text(to, quantize, request["prune"])
    count: int | None = None
    model = original
    if quantize is not None and quantize not in IN_THE_FILE.get(to, ()):
        model = copy.deepcopy(original)
        count = quantize_model(model, quantize, quantization_of(subject.config, model, quantize))
    _write_file(subject, model, path, inputs, to)

    def build() -> nn.Module:
        return build_model(subject.config, subject.shape)

    file = open_file(path, to, quantize, build)
    same = compare(file, model, inputs, SAME, options)
    if quantize is not None:
        if count is None:
            count = quantize_file(path, quantize)
            file = open_file(path, to, quantize, build)
        share = TOLERANCES[quantize] if request["tolerance"] is None else request["tolerance"]
        same = compare(file, original, inputs, share, options)
    with torch.no_grad():
        forms = {"inputs": form_of(inputs), "outputs": form_of(original(inputs))}
    facts = {
        "num_quantized": count, **forms, "same": same, **_facts_of_data(request, subject.data),
        "measured": _measured(subject, file, inputs, path) if request["measure"] else None,
    }  # fmt: skip
    if FORMATS[to].has_graph:
        lines = load_lines(request["title"], to, quantize, facts)
    else:
        lines = weights_lines(request["title"], subject.config, to, quantize, subject.shape)
    lines += _prepare_lines(subject.config, facts, subject.shape, request)
    return Written(subject.state, subject.shape, facts, lines)


def _write_file(subject: Subject, model: nn.Module, path: Path, inputs: torch.Tensor, to: str) -> None:
    if FORMATS[to].has_graph:
        program = trace(model, inputs, to)
        (write_onnx if to == "onnx" else write_program)(program, path)
        return
    built = {name: value.shape for name, value in _tensors(build_model(subject.config, subject.shape)).items()}
    deployed = {name: value.shape for name, value in _tensors(model).items()}
    if deployed != built:
        name = next(name for name in {**built, **deployed} if built.get(name) != deployed.get(name))
        here, there = (list(shapes[name]) if name in shapes else "missing" for shapes in (deployed, built))
        raise ConfigError(
            f"--to {to} holds only weights, and {subject.config.model._target_} builds other weights than the exported "
            f"model has: {name} is {here} in the export and {there} in that class. Use --to torch_export or --to onnx, "
            "which hold the computation too."
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
        "data": data.config.data.name, "num_samples": len(data.samples), "machine": _machine(),
    }  # fmt: skip


# --- latency, sizes, and comparison of outputs ---

BATCHES = (1, 64)
_WARM_UP, _FEWEST, _MOST = 3, 5, 50
_BUDGET_S = 3.0


def latencies(models: Mapping[str, Callable[[torch.Tensor], Any]], inputs: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Return the median and quartiles in seconds and the number of calls of each model, by batch size.

    The models take turns, so that other load of the machine affects all of them alike.
    """
    results: dict[str, dict[str, Any]] = {name: {} for name in models}
    for size in BATCHES:
        batch = inputs.repeat(-(-size // len(inputs)), *[1] * (inputs.ndim - 1))[:size].contiguous()
        times = _times(models, batch)
        for name, durations in times.items():
            low, middle, high = statistics.quantiles(durations, n=4, method="inclusive")
            results[name][str(size)] = {"median_s": middle, "low_s": low, "high_s": high, "n": len(durations)}
    return results


@torch.no_grad()
def _times(models: Mapping[str, Callable[[torch.Tensor], Any]], batch: torch.Tensor) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in models}
    begin = time.perf_counter()
    for turn in range(_WARM_UP + _MOST):
        is_late = time.perf_counter() - begin > _BUDGET_S
        if is_late and min(map(len, times.values())) >= _FEWEST:
            break
        is_warm = turn >= _WARM_UP or (is_late and turn > 0)
        # The order changes each turn: what a call leaves behind (caches, a used share of the cores) affects both.
        for name, model in sorted(models.items(), reverse=turn % 2 == 0):
            start = time.perf_counter()
            model(batch)
            if is_warm:
                times[name].append(time.perf_counter() - start)
    return times


def _machine() -> dict[str, Any]:
    """Return facts about the machine of the measurement, without names of users or hosts."""
    processor = cpu()
    return {
        "processor": processor["model"] or platform.machine(), "num_cores": processor["count"],
        "num_threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }  # fmt: skip


def counts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of elements in all floating-point tensors, their bytes, and the share of zeros."""
    tensors = [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()]
    total = sum(tensor.numel() for tensor in tensors)
    zeros = sum(int((tensor == 0).sum()) for tensor in tensors)
    return {
        "num_numbers": total,
        "num_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "sparsity": zeros / total if total else 0.0,
    }


NUM_SAMPLES = 64
SAME = 1e-4
"""Largest difference for a file that holds the same numbers, as a share of the largest output: kernels differ."""
TOLERANCES = {"int8": 0.05, "dynamic_int8": 0.1, "int4": 0.3}
"""Largest difference for a file with fewer bits, from the original in fp32, as a share of the largest output."""


@torch.no_grad()
def compare(
    file: Callable[[torch.Tensor], Any], model: Callable[[torch.Tensor], Any], inputs: torch.Tensor, share: float,
    options: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the difference of the outputs of `file` and `model`, on a batch of all inputs and one of the first input.

    Args:
        share: largest difference that is allowed, as a share of the largest output.
        options: the options of `export` that make the file, for messages.

    Raises:
        ConfigError: the difference is larger, the shapes differ, or an output is not finite.
    """
    pairs = [(file(batch), model(batch)) for batch in (inputs, inputs[:1])]
    for output, wanted in pairs:
        if not isinstance(wanted, torch.Tensor):
            raise ConfigError(
                f"{options}: the model returns a {type(wanted).__name__}, and only single tensors can be compared. Let "
                "forward return one tensor, or use --to safetensors --no-measure."
            )
        if not isinstance(output, torch.Tensor) or output.shape != wanted.shape:
            raise ConfigError(
                f"{options}: the file's outputs have another shape than the model's. Nothing was written. Use another "
                "--to."
            )
        if not bool(wanted.isfinite().all()):
            raise ConfigError(
                f"{options}: some outputs of the model on validation samples are not finite and cannot be compared. "
                "Export another checkpoint: --best, or --step."
            )
    largest = max(float(wanted.abs().max()) for _, wanted in pairs)
    differences = [float((output.double() - wanted.double()).abs().max()) for output, wanted in pairs]
    difference = float("inf") if any(map(math.isnan, differences)) else max(differences)
    tolerance = share * max(largest, torch.finfo(torch.float32).tiny)
    if not difference <= tolerance:
        raise ConfigError(
            f"{options}: the file's outputs differ from the model's by up to {difference:.3g} on {len(inputs)} "
            f"validation samples; allowed is {tolerance:.3g}, {share:g} of the largest output. Nothing was written. "
            f"Use another --to or --quantize{', or a larger --tolerance' if share != SAME else ''}."
        )
    return {
        "num_samples": len(inputs), "max_abs_difference": difference, "tolerance": tolerance, "largest_output": largest
    }  # fmt: skip


if __name__ == "__main__":
    serve({"export": export})
