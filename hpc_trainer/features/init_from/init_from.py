"""Existing weights as the first weights of a run: loaded into the whole model on the CPU, tensor by tensor.

The model is still whole, so ranks may share it afterwards in any way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from hpc_trainer.config.name_patterns import listed, parents, unfit
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import CheckpointError, ConfigError, StorageError
from hpc_trainer.features.init_from import InitFromConfig
from hpc_trainer.features.init_from.source import digest_of, files_in, is_checkpoint, is_wanted, renamed
from hpc_trainer.record.checkpoint_folders import committed, step_of
from hpc_trainer.record.files import sha256_of
from hpc_trainer.record.journal import FirstWeights, write_first_weights
from hpc_trainer.runtime.rank_group import RankGroup, on_each_rank, on_rank_zero
from hpc_trainer.training.ability import Ability, Building
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.checkpoint.tensor_files import FileRecord, OpenFiles, SavedTensor
from hpc_trainer.training.context import RunContext

WeightsOrError = FirstWeights | str
"""Record of loaded weights, or an error message: an error of all ranks is raised where no rank waits for another."""


def load(
    model: nn.Module, config: InitFromConfig, group: RankGroup, beat: Callable[[], None] = lambda: None
) -> FirstWeights:
    """Fill `model`, whole on the CPU. Every rank reads, and calls `beat` meanwhile. Collective.

    Raises:
        ConfigError: the content is not that of the plan, or it does not fit the model.
        CheckpointError: a file cannot be read.
    """
    assert config.path is not None
    assert config.digest is not None
    place = Path(config.path)

    planned = config.digest

    def problem() -> str | None:
        try:
            digest = digest_of(place, partial(sha256_of, beat=beat))
        except ConfigError as error:
            return str(error)
        except FileNotFoundError:
            return (
                f"init_from={place} is not there: it was moved or deleted since this run was planned, or this node "
                "does not see it. Put it back, or submit with another source."
            )
        if digest == planned:
            return None
        return (
            f"init_from={place} has changed since this run was planned: its digest was {planned[:12]}, and is "
            f"{digest[:12]}. Submit again: other weights are another run."
        )

    said = on_rank_zero(group, problem)
    if said is not None:
        raise ConfigError(said)
    take = partial(_take, model, config)
    result = _from_checkpoint(place, group, take) if is_checkpoint(place) else _from_files(place, group, take)
    if isinstance(result, str):
        raise ConfigError(result)
    return result


def _from_checkpoint(
    place: Path, group: RankGroup, take: Callable[[Mapping[str, Any]], WeightsOrError]
) -> WeightsOrError:
    """Load the model of a checkpoint. Collective. Raises CheckpointError, UntrustedFileError."""
    store = CheckpointStore(place.parent, group=group, keep_last=1, attempt=0, read_only=True)
    info = store.newest_valid(only=step_of(place))
    if info is None:
        raise CheckpointError(f"init_from={place} is damaged, or cannot be read now. Name another checkpoint.")
    return store.load(info, lambda shared, own: take(shared["objects"]["model"]))


def _from_files(place: Path, group: RankGroup, take: Callable[[Mapping[str, Any]], WeightsOrError]) -> WeightsOrError:
    """Load .safetensors files. Collective. Raises CheckpointError."""

    def read() -> tuple[WeightsOrError, None]:
        where = files_in(place)
        paths = {path.name: path for path in where.values()}
        records = [FileRecord(name, path.stat().st_size, 0) for name, path in paths.items()]
        folder = place.parent if place.is_file() else place
        with OpenFiles(folder, records, _open) as files:
            tensors = {name: tensor for file in paths for name, tensor in files.tensors(file).items() if name in where}
            return take(tensors), None

    return on_each_rank(group, read)[0]


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    """Open a file of any owner, also through links: nothing in it can run, and its digest is known."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@torch.no_grad()
def _take(model: nn.Module, config: InitFromConfig, saved: Mapping[str, Any]) -> WeightsOrError:
    """Fill `model` from `saved`; return a record of it, or an error message. Not collective; the same on all ranks."""
    tensors = {name: tensor for name, tensor in saved.items() if isinstance(tensor, SavedTensor)}
    try:
        there = renamed(tensors, config, f"init_from={config.path}")
    except ConfigError as error:
        return str(error)
    state = model.state_dict()
    here = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    wanted = [name for name in here if is_wanted(name, config)]
    wrong = "\n".join(_problems(config, here, wanted, {name: tensors[origin] for name, origin in there.items()}))
    if wrong:
        return wrong
    loaded = {name: there[name] for name in wanted if name in there}
    converted = []
    for name, origin in loaded.items():
        source, goal = tensors[origin], here[name]
        if source.dtype == goal.dtype:
            source.fill(goal)
            continue
        converted.append(name)
        copy = torch.empty(source.shape, dtype=source.dtype)
        source.fill(copy)
        goal.copy_(copy)
    model.load_state_dict(state)  # onto itself, so that a model's own hooks run
    used = set(loaded.values())
    return FirstWeights(
        path=str(config.path), digest=str(config.digest), loaded=loaded, converted=converted,
        begin_anew=[name for name in here if not is_wanted(name, config)],
        unused=[name for name in tensors if name not in used],
    )  # fmt: skip


def _problems(
    config: InitFromConfig, here: Mapping[str, torch.Tensor], wanted: list[str], there: Mapping[str, SavedTensor]
) -> Iterator[str]:
    """Yield why the weights do not fit the model, a line each, by the names of the model."""
    where = f"init_from={config.path}"
    for key in ("include", "exclude"):
        patterns = [
            pattern for pattern in getattr(config, key) if not any(fnmatchcase(name, pattern) for name in there)
        ]
        yield from unfit(f"init_from.{key}", patterns, here, "weight of the model")
    places = {_memory(here[name]) for name in wanted if name in there}
    missing = [name for name in wanted if name not in there and _memory(here[name]) not in places]
    if missing:
        unused = [name for name in there if name not in here]
        yield (
            f"{where} has no {listed(missing)}, and the model has"
            + (f"; the model has no {listed(unused)}" if unused else "")
            + f". Rename them (init_from.rename), or initialise them anew: init_from.exclude={parents(missing)[:5]}."
        )
    other = [name for name in wanted if name in there and not _fits(here[name], there[name])]
    if other:
        forms = [f"{name} {_form(there[name])} and not {_form(here[name])}" for name in other]
        yield (
            f"{where} has other shapes than the model: {listed(forms)}. Initialise them anew: "
            f"init_from.exclude={parents(other)[:5]}, or choose the model that they belong to."
        )


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of the tensor's memory: the same for tied weights; two empty tensors have two."""
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride())


def _fits(here: torch.Tensor, there: SavedTensor) -> bool:
    return tuple(here.shape) == there.shape and (
        here.dtype == there.dtype or (here.dtype.is_floating_point and there.dtype.is_floating_point)
    )


def _form(tensor: torch.Tensor | SavedTensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class InitFromAbility(Ability):
    loads_always: ClassVar[bool] = False
    _run: RunContext | None = None
    _has_saved = False

    def __new__(cls, config: TrainConfig) -> InitFromAbility:
        """Return a `BaseAbility` for a run with adapters."""
        return super().__new__(BaseAbility if config.train.lora.rank > 0 else cls)

    def see_whole(self, model: nn.Module, building: Building) -> None:
        """Load the weights into the whole model. Collective in a run; an estimate loads none."""
        run = self._run = building.run
        if run is None:
            return
        self._has_saved = run.group.broadcast(run.is_rank_zero and bool(committed(run.store.folder)))
        if self._has_saved and not self.loads_always:
            return
        first_weights = load(model, self.config.init_from, run.group, run.beat)
        if run.is_rank_zero:
            write_first_weights(run.paths, first_weights)
            print(first_weights.line())

    def restored(self) -> None:
        """Raise StorageError if the run has saved but no checkpoint can be read: the weights have no source then."""
        is_left_out = self._has_saved and not self.loads_always
        if is_left_out and self._run is not None and self._run.saved_step is None:
            raise StorageError(
                "no checkpoint of this run can be read. The run expected one and has not loaded init_from. The next "
                "start begins at step 0 if the damaged checkpoints were moved away."
            )


class BaseAbility(InitFromAbility):
    """Loading of the base weights that no checkpoint of the run has: adapters are trained beside them."""

    loads_always: ClassVar[bool] = True

    def fit_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Load the source again, as each start does. Raises ConfigError if the source has changed, or is gone."""
        load(model, self.config.init_from, RankGroup())
        return weights


ABILITY = InitFromAbility
