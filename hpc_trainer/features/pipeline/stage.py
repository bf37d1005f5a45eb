"""One rank's stage of a pipeline, cut out of the whole model, and that whole model for checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.pipeline.cut import Between, Measured, Stage, keep, measure, stages_of
from hpc_trainer.features.pipeline.step import Place, run_parts
from hpc_trainer.models.parts import parts_of
from hpc_trainer.runtime.own_process import OwnProcess
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.tensors import is_sharded
from hpc_trainer.training.ability import Building
from hpc_trainer.training.checkpoint.objects import set_whole
from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES, DTYPES, Box, Shard, pack_sharded, unpack
from hpc_trainer.training.data.batches import StandIn
from hpc_trainer.training.optim.build import counts_here
from hpc_trainer.training.parallel.fully_sharded import gathered_dtype, share_among_data_ranks
from hpc_trainer.training.parallel.mesh import Mesh
from hpc_trainer.training.parallel.share import SYNC_BUFFERS, VotingLoss
from hpc_trainer.training.rng import random_state_kept

Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Whole:
    """Description of the whole model of which a module is one stage.

    Args:
        forms: number format and shape by name, for each entry of the whole model's state_dict, in its order.
        trained: names of the weights that the optimizer has, in their order.
        buffers: names of the buffers among `forms`.
        owned: names that this stage writes; weights in two stages are written by the first one.
        is_writer: this rank is the first of its stage: it writes what the stage's ranks hold alike.
    """

    forms: Mapping[str, Form]
    trained: tuple[str, ...]
    buffers: frozenset[str]
    owned: frozenset[str] = frozenset()
    is_writer: bool = True

    @classmethod
    def of(cls, model: nn.Module) -> Whole:
        """Describe a whole model, before a stage is cut out of it."""
        state = model.state_dict()
        return cls(
            forms={name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()},
            trained=tuple(name for name, weight in model.named_parameters() if weight.requires_grad),
            buffers=frozenset(name for name, _ in model.named_buffers() if name in state),
        )

    @property
    def has_buffers(self) -> bool:
        """True if the whole model has buffers, as in `WholeModel`."""
        return bool(self.buffers)

    def state(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole model's state_dict, as `WholeModel.state` does."""
        return {name: _shard(held.get(name), form, self, name) for name, form in self.forms.items()}

    def optimizer_state(
        self,
        state: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Sequence[str]],
        names: Sequence[str],
        owned: Collection[str],
    ) -> tuple[dict[str, Any], list[list[str]]]:
        """Return the state and groups of the whole model's optimizer, as `WholeModel.optimizer_state` does."""
        mine = {name: pack_sharded(values) for name, values in state.items()}
        described = {
            name: {
                "structure": structure,
                "whole": {leaf: [DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for leaf, tensor in tensors.items()},
                "cut": {leaf: [DTYPE_NAMES[shard.dtype], list(shard.shape)] for leaf, shard in shards.items()},
            }
            for name, (tensors, shards, structure) in mine.items()
        }
        group = _all_ranks()
        reports = group.gather({"state": described, "groups": [list(names_of) for names_of in groups]})
        listed = [{name for report in reports for name in report["groups"][index]} for index in range(len(groups))]
        ordered = [[name for name in names if name in group_names] for group_names in listed]
        merged: dict[str, Any] = {}
        for name in itertools.chain(*ordered):  # in the order of one rank
            teller = next((rank for rank, report in enumerate(reports) if name in report["state"]), None)
            if teller is None:  # no state yet
                continue
            entry = reports[teller]["state"][name]
            tensors, shards, _ = mine.get(name, ({}, {}, None))
            whole = {
                leaf: _form_shard(form, tensors.get(leaf) if group.rank == teller else None)
                for leaf, form in entry["whole"].items()
            }
            cut = {
                leaf: shards[leaf] if leaf in shards and name in owned else _form_shard(form, None)
                for leaf, form in entry["cut"].items()
            }
            merged[name] = unpack(whole, entry["structure"], cut)
        return merged, ordered


def _shard(here: torch.Tensor | None, form: Form, whole: Whole, name: str) -> Any:
    is_owner = here is not None and name in whole.owned
    if is_owner and is_sharded(here):
        return here
    dtype, shape = form
    return Shard(shape, dtype, Box.whole(shape), here if is_owner and whole.is_writer else None)


def _form_shard(form: Sequence[Any], local: torch.Tensor | None) -> Shard:
    dtype, shape = DTYPES[form[0]], tuple(form[1])
    return Shard(shape, dtype, Box.whole(shape), local)


def _all_ranks() -> RankGroup:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    backend = torch.distributed.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return RankGroup(rank=rank, world_size=world_size, device=device)


def cut_out(model: nn.Module, building: Building) -> Stages:
    """Reduce `model`, which is whole and on the CPU, to this rank's stage, in place. Collective in a run.

    Weights keep the names that they have in the whole model, in checkpoints too.

    Raises:
        ConfigError: the model cannot be cut into that many stages, its forward pass fails, or a stage would have
            nothing to train.
    """
    config, mesh = building.config, building.mesh
    is_channels_last = config.train.channels_last and building.run is not None  # an estimate counts bytes
    inputs = _inputs(building)
    stages = stages_of(
        model, mesh.shape.pp, inputs=inputs, precision=config.precision,
        device_type=building.device.type, param_dtype=gathered_dtype(config.parallel),
        measured=None if building.run is None else _measured(model, building, building.run.group, inputs),
    )  # fmt: skip
    stage, whole = stages[mesh.place.pp], Whole.of(model)
    names = [set(_names(model, other)) for other in stages]
    _check_ties(model, names)
    for other, held in zip(stages, names, strict=True):
        if not held.intersection(whole.trained):
            raise ConfigError(
                f"parallel.pipeline_parallel={other.num_stages}: stage {other.index} of {type(model).__name__} would "
                f"hold {[part.name for part in other.parts]} and nothing to train. Use fewer stages."
            )
    keep(model, stage)
    before = set().union(*names[: stage.index])
    set_whole(
        model,
        dataclasses.replace(whole, owned=frozenset(names[stage.index] - before), is_writer=mesh.is_first_of_stage),
    )
    run_parts(model, stage, config.precision, channels_last=is_channels_last)
    shared = {
        name: [other.index for other, held in zip(stages, names, strict=True) if name in held] for name in whole.trained
    }
    shared = {name: at for name, at in shared.items() if len(at) > 1}
    return Stages(stage=stage, whole=whole, shared=shared)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Stages of a pipeline, as this rank sees them.

    `stage` is that of this rank, and `whole` describes the whole model. `shared` has the weights that several stages
    hold, with the indices of these stages.
    """

    stage: Stage
    whole: Whole
    shared: dict[str, list[int]]

    def share(self, config: TrainConfig, mesh: Mesh, loss: VotingLoss) -> tuple[nn.Module, dict[str, Any]]:
        """Return (the model of `loss`, shared among its data-parallel ranks; the other fields of PipelineStepper).

        Collective; builds groups. Build optimizers after it: FSDP replaces the weights.
        """
        model, data_group = loss.model, _data_group(mesh)
        place = Place(
            stage=self.stage, num_data=mesh.num_data_ranks, tells_loss=mesh.is_first_of_model,
            pipe_group=mesh.pipe_group, data_group=data_group,
        )  # fmt: skip
        module = model
        if config.parallel.strategy is Strategy.fsdp or mesh.shape.tp > 1:  # DDP knows no DTensors
            module = share_among_data_ranks(model, mesh, config.parallel, data_group)
        elif mesh.num_data_ranks > 1:
            # No forward pass of a pipeline lets DDP lay its buckets out anew: they are the same in every step.
            no_buffers: dict[str, Any] = {SYNC_BUFFERS: False}  # the stepper hands them out, once a step
            module = DistributedDataParallel(
                model,
                process_group=data_group,
                gradient_as_bucket_view=True,
                bucket_cap_mb=config.parallel.bucket_cap_mb,
                **no_buffers,
            )
        here, slots = dict(model.named_parameters()), {name: slot for slot, name in enumerate(self.whole.trained)}
        is_counted = {name: self.shared.get(name, [self.stage.index])[0] == self.stage.index for name in here}
        is_counted = {name: is_first and counts_here(here[name], mesh) for name, is_first in is_counted.items()}
        return module, {
            "place": place,
            "schedule_name": config.parallel.pipeline_schedule.value,
            "task": loss.task,
            "norm_slots": {id(here[name]): slots[name] for name in here if name in slots and is_counted[name]},
            "num_slots": len(slots),
            "tied": [(here[name], group) for name, group in self._groups(mesh) if name in here],
        }

    def _groups(self, mesh: Mesh) -> Iterator[tuple[str, Any]]:
        """Yield each weight in several stages with the group of ranks that hold the same shard of it. Collective."""
        made: dict[tuple[int, ...], Any] = {}
        for name, stages in self.shared.items():
            key = tuple(stages)
            if len(key) == self.stage.num_stages:
                made[key] = mesh.pipe_group
            elif key not in made:
                in_stage = mesh.num_data_ranks * mesh.shape.tp
                members = [[at * in_stage + place for at in key] for place in range(in_stage)]
                groups = [dist.new_group(ranks) for ranks in members]  # all ranks make all groups, in one order
                made[key] = groups[mesh.rank % in_stage]
            yield name, made[key]


def _data_group(mesh: Mesh) -> Any:
    """Return the group of this stage's data-parallel ranks; None if that is this rank alone."""
    devices = mesh.dim("dp_replicate", "dp_shard")  # one of them: HSDP is refused
    return None if devices is None else devices.get_group()


def _measured(model: nn.Module, building: Building, group: RankGroup, inputs: Between) -> Measured:
    """Return, on all ranks, the measurements that a separate process makes for rank 0. Collective.

    The user's model never runs on fake tensors in the process of a rank. If the separate process dies or its pass
    fails, rank 0 measures a pass with real values.
    """
    parts_of(model)  # raises its own error, without a process
    answer = {}
    if group.is_rank_zero:
        answer = _asked(building, inputs)
        if "error" in answer:
            print(
                f"parallel.pipeline_parallel: a forward pass of {type(model).__name__} with real values decides where "
                f"to cut, because a pass without values failed ({answer['error']})."
            )
            answer = _measured_with_values(model, building, inputs)
    answer = group.broadcast(answer)
    if "error" in answer:
        raise ConfigError(
            f"parallel.pipeline_parallel={building.mesh.shape.pp}: a forward pass of {type(model).__name__} tells "
            f"where to cut, and it failed ({answer['error']}). Fix the model, or use parallel=fsdp."
        )
    return Measured.from_plain(answer)


def _asked(building: Building, inputs: Between) -> dict[str, Any]:
    try:
        samples = StandIn.of(building.dataset, building.task, 1).to_plain()
    except Exception as error:  # the user's data set may raise anything, and the other ranks wait for an answer
        return {"error": f"{type(error).__name__}: {error}"}
    asked = {
        "config": to_plain(building.config),
        "samples": samples,
        "inputs": inputs.to_plain(),
        "device_type": building.device.type,
    }
    with OwnProcess("hpc_trainer.features.pipeline.measure") as process:
        return process.ask(asked)


@random_state_kept()
def _measured_with_values(model: nn.Module, building: Building, inputs: Between) -> dict[str, Any]:
    """Return the measurements by `measure.py` of a pass of the first sample, repeated, through the parts of `model`."""
    config, device = building.config, building.device
    try:
        (first, _) = building.samples or building.dataset.__getitems__(range(1))
        measured = measure(
            model, inputs=inputs, precision=config.precision, device_type=device.type,
            param_dtype=gathered_dtype(config.parallel), example=first.expand(inputs.shape).to(device),
        )  # fmt: skip
    except Exception as error:  # the user's code may raise anything, and the other ranks wait for an answer
        return {"error": f"{type(error).__name__}: {error}"}
    return measured.to_plain()


def _inputs(building: Building) -> Between:
    """Return the form of one micro-batch, with the first sample's number format."""
    micro = building.config.train.given_micro_batch_size
    assert micro is not None, "micro_batch_size=auto and stages are refused together"
    (inputs, _) = building.samples or building.dataset.__getitems__(range(1))
    return Between((micro, *inputs.shape[1:]), inputs.dtype)


def _names(model: nn.Module, stage: Stage) -> Iterator[str]:
    """Yield the names of the tensors that a stage keeps, as in the whole model's state_dict."""
    needed = {name for part in stage.parts for name in part.needs}
    for name in model.state_dict():
        if any(name == path or name.startswith(path + ".") for path in needed):
            yield name


def _check_ties(model: nn.Module, names: Sequence[set[str]]) -> None:
    """Raise ConfigError if two names of one tensor are in different stages: each rank knows its own names only."""
    first: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(weight), name)
        if other != name and any((name in held) != (other in held) for held in names):
            raise ConfigError(
                f"{other} and {name} of {type(model).__name__} are one tensor in different stages. Give it one name, "
                "and let both parts use that (Part.uses in hpc_trainer/models/parts.py)."
            )
