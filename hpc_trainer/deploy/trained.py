"""The model of a checkpoint, whole and on the CPU, with its task and with data to evaluate it on.

The weights of a checkpoint become one state_dict, however ranks shared them. Files of weights are written and read
here too.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from hpc_trainer.config.load import from_plain, section_from_plain
from hpc_trainer.config.schema.parallel import PrecisionConfig
from hpc_trainer.config.schema.task import CustomTaskConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.deploy.exported import prune_values
from hpc_trainer.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    DataError,
    HpcTrainerError,
    RunStateError,
)
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.torch_process import answer
from hpc_trainer.tasks.protocol import Task
from hpc_trainer.training.ability import Quantization, abilities, overridden
from hpc_trainer.training.build import HasShape, build_dataset, build_model, build_task
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.checkpoint.tensor_files import SavedTensor, whole_tree, write_tensors
from hpc_trainer.training.data.order import BatchSizes
from hpc_trainer.training.data.preprocessing import described, differences, without
from hpc_trainer.training.data.protocol import MapDataset
from hpc_trainer.training.evaluate import evaluate
from hpc_trainer.training.rng import seed_everything

Verb = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Function that takes a request and returns the answer."""


def serve(verbs: Mapping[str, Verb]) -> None:
    """Answer the request of the process that has started this one (`runtime/torch_process.py`)."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch.export.load would unpickle what it cannot read otherwise

    def without_progress(verb: Verb) -> Callable[[dict[str, Any], object], dict[str, Any]]:
        return lambda request, _: verb(request)

    answer({name: without_progress(verb) for name, verb in verbs.items()})


@dataclass(frozen=True, slots=True)
class Taken:
    """State of a module in a checkpoint, and the checkpoint's record of code, versions and data."""

    state: dict[str, Any]
    made_with: Mapping[str, Any]


def take_out(checkpoints: Path, step: int, *, name: str, over: tuple[str, str] | None = None) -> Taken:
    """Return the state_dict of the module `name` on the CPU, and the checkpoint's record of code, versions and data.

    Args:
        over: (another object, prefix of its names): its tensors replace those of the module.

    Raises:
        CheckpointError: the checkpoint holds no such module.
        CorruptCheckpointError: bytes have changed, or there is no checkpoint of this step.
        UntrustedFileError, OSError: the files are not trusted, or cannot be read.
    """
    notes: list[str] = []
    store = CheckpointStore(checkpoints, group=RankGroup(), keep_last=1, attempt=0, read_only=True, warn=notes.append)
    info = store.newest_valid(only=step)
    if info is None:
        raise CorruptCheckpointError("; ".join(notes) or f"{checkpoints} holds no checkpoint of step {step}.")

    def take(shared: Any, _: Any) -> dict[str, Any]:
        return whole_tree(_state_of(shared["objects"], name, over))  # type: ignore[no-any-return]

    return Taken(store.load(info, take), info.meta.get("made_with") or {})


def write_weights(path: Path, state: Mapping[str, Any]) -> None:
    """Write weights as torch.save does if the suffix is .pt, else as safetensors; they are on disk on return.

    Raises:
        RunStateError: the state holds more than tensors, and the format does not.
    """
    if path.suffix == ".pt":
        with path.open("xb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        return
    other = next((key for key, value in state.items() if not isinstance(value, torch.Tensor)), None)
    if other is not None:
        raise RunStateError(
            f"{other} of the model is not a tensor (get_extra_state), and safetensors holds only tensors. Use --to "
            "torch."
        )
    write_tensors(path, dict(state))


def read_weights(path: Path) -> dict[str, Any]:
    """Read what `write_weights` wrote. No code of the file runs: torch's format may hold only tensors and numbers."""
    if path.suffix == ".pt":
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
        return loaded
    return load_file(path)


def _state_of(objects: Mapping[str, Any], name: str, over: tuple[str, str] | None) -> dict[str, Any]:
    if name not in objects or not _is_state(objects[name]):
        listed = ", ".join(key for key, value in objects.items() if _is_state(value)) or "none"
        raise CheckpointError(f"the checkpoint has no module {name!r}. It has: {listed}. Use --object NAME.")
    state = dict(objects[name])
    if over is not None:
        instead, prefix = objects.get(over[0], {}), over[1]
        state |= {key: instead[prefix + key] for key in state if isinstance(instead.get(prefix + key), SavedTensor)}
    return state


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(entry, SavedTensor) for entry in value.values())


_MOST_LINES = 3


@dataclass(frozen=True, slots=True)
class DataShape:
    """Shape of the data that a model is built for; None for facts that the data do not state."""

    input_shape: tuple[int, ...] | None
    num_classes: int | None


def changes_model(config: TrainConfig) -> bool:
    """Return True if the deployed model is more than the checkpoint's weights in the model's class."""
    active = abilities(config)
    return any(overridden(active, hook) for hook in ("fit_weights", "deployed"))


def deployed_model(config: TrainConfig, shape: HasShape, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the model in evaluation mode; none of its weights takes a gradient.

    Args:
        shape: shape of the data that the model was trained on.
        weights: the model's state in a checkpoint, whole tensors.

    Raises:
        ConfigError: the model's class is not trusted, does not exist, or refuses its arguments.
        CheckpointError: the weights do not fit the model.
    """
    active = abilities(config)
    seed_everything(config.seed)
    model = build_model(config, shape)
    given = dict(weights)
    for fit_weights in overridden(active, "fit_weights"):
        given = fit_weights(model, given)
    try:
        model.load_state_dict(given)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        more = "" if len(lines) <= _MOST_LINES else f" .. and {len(lines) - _MOST_LINES} more"
        raise CheckpointError(
            f"the checkpoint's weights do not fit {type(model).__name__} as {config.model._target_} builds it now: "
            f"{' '.join(lines[:_MOST_LINES])}{more} If its code has changed since, restore the run's code "
            "(hpc-trainer show names the frozen copy)."
        ) from error
    for make in overridden(active, "deployed"):
        model = make(model)
    return model.eval().requires_grad_(False)


def pruned(config: TrainConfig, model: nn.Module, prune: str) -> nn.Module:
    """Return a copy of `model` that is pruned at once, without training.

    Args:
        config: the run's configuration.
        model: whole and on the CPU.
        prune: value of `--prune`, in the form of `prune_values`.

    Raises:
        ConfigError: this installation lacks the feature, or the feature cannot prune this model.
    """
    hooks = []
    if hasattr(config, "prune"):
        section = section_from_plain(type(config.prune), prune_values(prune))
        hooks = overridden(abilities(dataclasses.replace(config, prune=section)), "compressed")
    if not hooks:
        raise ConfigError(f"--prune {prune}: this installation has no feature that prunes. Leave --prune out.")
    for compress in hooks:
        model = compress(model)
    return model


def quantization_of(config: TrainConfig, model: nn.Module, kind: str) -> Quantization | None:
    """Return how the run's training rounded the layers of `model` to `kind`; None if it did not."""
    answers = (rounded(model, kind) for rounded in overridden(abilities(config), "rounded"))
    return next((answer for answer in answers if answer is not None), None)


@dataclass(frozen=True, slots=True)
class Data:
    """Evaluation samples, and the means to evaluate a model on them."""

    config: TrainConfig
    task: Task
    samples: MapDataset

    @property
    def batch_size(self) -> int:
        """Batch size of evaluations, as in the run."""
        return BatchSizes.given(self.config.train).eval_batch_size

    def figures(self, model: nn.Module, device: torch.device, precision: PrecisionConfig) -> dict[str, float]:
        """Return the metrics that the run's evaluation would give for `model`."""
        metrics = evaluate(
            model, self.samples, task=self.task, group=RankGroup(device=device), batch_size=self.batch_size,
            precision=precision, seed=self.config.seed,
        )  # fmt: skip
        assert metrics is not None
        return metrics

    def inputs(self, model: nn.Module, count: int) -> torch.Tensor:
        """Return the inputs that the task passes to `model` for the first samples, [at most count, ..], on the CPU.

        Raises:
            ConfigError: the task calls the model with other arguments than one tensor.
        """
        batch = self.samples.__getitems__(range(min(count, len(self.samples))))
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handle = model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
        )  # fmt: skip
        try:
            with torch.no_grad():
                self.task.loss(model, batch)
        finally:
            handle.remove()
        if not seen or any(kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) for args, kwargs in seen):
            raise ConfigError(
                f"task={self.config.task.name} calls the model with other arguments than one tensor, and a file with a "
                "graph takes exactly one. Use --to safetensors, or give the model a forward(inputs)."
            )
        inputs: torch.Tensor = seen[0][0][0]
        return inputs


def open_data(config: TrainConfig, facts: Mapping[str, Any] | None = None, given: Collection[str] = ()) -> Data:
    """Build the task and the evaluation samples.

    Args:
        facts: `classes` and `preprocessing` of the model, which apply to the samples too; None for those of the data.
        given: keys of `data` that the user gave, which take precedence.

    Raises:
        ConfigError, DataError: the task or the data cannot be built here.
    """
    task = build_task(config)
    if facts is not None and facts["preprocessing"] is not None:
        facts = {**facts, "preprocessing": without(facts["preprocessing"], given)}
    samples = build_dataset(config, "eval", task, abilities(config), facts)
    if not len(samples):
        raise DataError(f"data={config.data.name} has no evaluation samples.")
    return Data(config, task, samples)


def data_of(request: Mapping[str, Any]) -> tuple[Data, list[str]]:
    """Return the data on which a model is evaluated, and a note for each difference from its training data."""
    config, facts = from_plain(request["config"]), request.get("data_facts")
    notes: list[str] = []
    if facts is None:
        return open_data(config), notes
    if request.get("own_data") is not None:
        facts, notes = _with_own_data(config, facts, request["own_data"])
    data = open_data(config, facts, request["given"])
    now, name = described(data.samples), config.data.name
    was = facts["preprocessing"]
    if was is not None:
        notes += differences(was, now["preprocessing"], name)
    if request["is_new_data"] and facts["unknown"]:
        fixes = {"mean and std": "Set data.mean and data.std.", "tokenizer": "Check that its tokens are the model's."}
        notes.append(
            f"An older version did not record the model's {facts['unknown']}, so data={name} is read by its own files "
            f"and keys. {fixes.get(facts['unknown'], '')}".rstrip()
        )
    if facts["classes"] and now["classes"] and facts["classes"] != now["classes"]:
        notes.append(
            f"No class of data={name} has the name of a class of the model, so classes are matched by number: "
            f"{now['classes'][0]} is {facts['classes'][0]}."
        )
    return data, notes


def _with_own_data(
    config: TrainConfig, facts: Mapping[str, Any], plain: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the encoding by the run's own table as it is today, for checkpoints that lack it, and a note."""
    own = dataclasses.replace(config, data=section_from_plain(type(config.data), plain))
    try:
        described_now = described(build_dataset(own, "train", build_task(own)))
    except (HpcTrainerError, ValueError) as error:
        note = (
            "The scaling of the model's inputs is not recorded, and its own table cannot be read, so the new rows are "
            f"scaled by their own statistics: {error}"
        )
        return {**facts, "unknown": None}, [note]
    note = (
        f"The scaling of the model's inputs is not recorded: it is taken from data.path={plain.get('path')} as that "
        "file is now."
    )
    return {**described_now, "unknown": None}, [note]


def shape_of(config: TrainConfig, made_with: Mapping[str, Any], samples: MapDataset | None) -> DataShape | None:
    """Return the shape that the model was built for, from the checkpoint, else the present data; None if unknown."""
    facts = made_with.get("dataset")
    if isinstance(facts, dict) and {"input_shape", "num_classes"} <= facts.keys():
        # A user's own task accepts data without a shape, which a checkpoint holds as [].
        has_shape = facts["input_shape"] or not isinstance(config.task, CustomTaskConfig)
        return DataShape(tuple(facts["input_shape"]) if has_shape else None, facts["num_classes"])
    return None if samples is None else DataShape(samples.input_shape, samples.num_classes)


def check_same_shape(was: DataShape | None, data: Data) -> None:
    """Raise ConfigError if the model was built for data of another shape, or for fewer classes than these data."""
    if was is None:
        return
    now, name = data.samples, f"data={data.config.data.name}"
    if None not in (was.input_shape, now.input_shape) and tuple(now.input_shape or ()) != was.input_shape:
        raise ConfigError(
            f"{name} has inputs of the shape {list(now.input_shape or ())}, and the model was built for "
            f"{list(was.input_shape or ())}. Choose data of that shape, or set the keys of data.* that give it."
        )
    if was.num_classes is not None and now.num_classes is not None and now.num_classes > was.num_classes:
        raise ConfigError(
            f"{name} has {now.num_classes} classes, and the model was built for {was.num_classes}, so targets and "
            "outputs cannot be compared. Choose data with at most as many classes."
        )


def taken_of(request: Mapping[str, Any]) -> tuple[TrainConfig, Taken]:
    """Return the configuration and the weights of the checkpoint that a request names."""
    over = None if request["over"] is None else (request["over"][0], request["over"][1])
    taken = take_out(Path(request["checkpoints"]), request["step"], name=request["name"], over=over)
    return from_plain(request["config"]), taken
