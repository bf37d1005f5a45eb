"""Device mesh of a run: which ranks share layers, average gradients, and read which samples (config/mesh.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.mesh import DIMS, MeshShape, Place, mesh_shape
from hpc_trainer.config.schema.parallel import ParallelConfig, Strategy
from hpc_trainer.runtime.rank_group import RankGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """Mesh of the ranks, as one rank sees it.

    `devices` is torch's DeviceMesh, with those of the dimensions pp, dp_replicate, dp_shard, tp that have more than one
    rank (and dp_shard beside dp_replicate); None if no mesh is needed: a single rank, or plain DDP, whose group is all
    ranks. `model_group`: the ranks that hold one copy of the model together and read the same samples (tp × pp);
    None if that is this rank alone.
    """

    shape: MeshShape
    rank: int
    devices: DeviceMesh | None = None
    model_group: ProcessGroup | None = None

    @property
    def place(self) -> Place:
        """Stage, data-parallel number and tensor-parallel number of this rank."""
        return self.shape.place(self.rank)

    @property
    def data_rank(self) -> int:
        """Number of the part of each batch that this rank reads: 0 to num_data_ranks - 1."""
        return self.place.data

    @property
    def num_data_ranks(self) -> int:
        """Number of parts of each batch, ≥ 1."""
        return self.shape.num_data_ranks

    @property
    def stream(self) -> int | str:
        """Random stream of this rank, besides the seed (`MeshShape.stream`)."""
        return self.shape.stream(self.rank)

    @property
    def is_first_of_model(self) -> bool:
        """True on one of the ranks that read the same samples: its sums count when sums of all ranks are added up."""
        return self.place.tp == 0 and self.place.pp == self.shape.pp - 1

    @property
    def is_first_of_stage(self) -> bool:
        """True on one rank of each stage."""
        return self.place.tp == 0 and self.place.data == 0

    def dim(self, *names: str) -> DeviceMesh | None:
        """Return the part of the mesh along these dimensions, without dimensions of one rank; None if none is left."""
        wide = tuple(name for name in names if getattr(self.shape, name) > 1)
        return None if self.devices is None or not wide else self.devices[wide]

    def groups_of_stage(self) -> list[ProcessGroup | None]:
        """Return groups to send to, one after the other, to reach all ranks of this stage; with one stage, all ranks.

        Tensor-parallel neighbours come first, then data-parallel ranks.
        """
        if self.shape.pp == 1:
            return [None]
        dims = [self.dim(name) for name in ("tp", "dp_replicate", "dp_shard")]
        return [devices.get_group() for devices in dims if devices is not None]

    def data_groups(self) -> list[ProcessGroup | None]:
        """Return groups to reach the ranks that hold the same parts of this stage and read other samples; [] if none.

        A value reaches all these ranks if the first rank of each group sends it, one group after the other.
        """
        if self.num_data_ranks == 1:
            return []
        if self.devices is None:
            return [None]
        dims = [self.dim(name) for name in ("dp_replicate", "dp_shard")]
        return [devices.get_group() for devices in dims if devices is not None]

    @property
    def pipe_group(self) -> ProcessGroup | None:
        """Group of the ranks that hold the same place in each stage, by stage; None if there is one stage."""
        stages = self.dim("pp")
        return None if stages is None else stages.get_group()

    def copy_group(self) -> ProcessGroup | None:
        """Return the group that holds one copy of this stage's weights in parts (dp_shard × tp); None: this rank alone.

        Collective among all ranks: each call makes a new group if both dimensions have more than one rank.
        """
        wide = [name for name in ("dp_shard", "tp") if getattr(self.shape, name) > 1]
        if self.devices is None or not wide:
            return None
        if len(wide) == 1:
            return self.devices.get_group(wide[0])
        return _group_of_alike(self.shape, lambda place: (place.pp, place.data // self.shape.dp_shard))

    def data_devices(self) -> DeviceMesh | None:
        """Return the mesh for FSDP2: dp_shard, or dp_replicate and dp_shard; None for one data-parallel rank."""
        if self.devices is None or self.num_data_ranks == 1:
            return None
        return self.devices[tuple(name for name in _dims(self.shape) if name.startswith("dp_"))]


def build_mesh(parallel: ParallelConfig, group: RankGroup) -> Mesh:
    """Build the mesh of all ranks of `group`. Collective; call once per process, because it makes process groups.

    torch's mesh code is imported only if a dimension besides that of plain DDP has more than one rank.
    """
    shape = mesh_shape(parallel, group.world_size)
    if shape.world_size != group.world_size:
        raise ValueError(f"{shape} are {shape.world_size} ranks, and there are {group.world_size}.")
    is_plain = shape.model_size == 1 and parallel.strategy is not Strategy.fsdp
    if group.world_size == 1 or is_plain:
        return Mesh(shape=shape, rank=group.rank)
    from torch.distributed.device_mesh import init_device_mesh

    wide = _dims(shape)
    # With the device type, or FSDP would use GPUs of the machine for a run on the CPU.
    devices = init_device_mesh(group.device.type, tuple(getattr(shape, name) for name in wide), mesh_dim_names=wide)
    return Mesh(shape=shape, rank=group.rank, devices=devices, model_group=_model_group(shape, group, devices))


def _dims(shape: MeshShape) -> tuple[str, ...]:
    """Return the dimensions of more than one rank; with dp_replicate also dp_shard, because FSDP2 needs both."""
    return tuple(name for name in DIMS if getattr(shape, name) > 1 or (name == "dp_shard" and shape.dp_replicate > 1))


def _model_group(shape: MeshShape, group: RankGroup, devices: DeviceMesh) -> Any:
    if shape.model_size == 1:
        return None
    if shape.model_size == group.world_size:
        import torch.distributed as dist

        return dist.group.WORLD
    if shape.pp == 1:
        return devices.get_group("tp")
    if shape.tp == 1:
        return devices.get_group("pp")
    return _group_of_alike(shape, lambda place: place.data)


def _group_of_alike(shape: MeshShape, key: Callable[[Place], Any]) -> ProcessGroup | None:
    """Return the group of the ranks whose places have this rank's key; a new group unless it is all ranks.

    Collective: all ranks make all groups, in one order. For ranks that are not along one dimension of the mesh.
    """
    import torch.distributed as dist

    members: dict[Any, list[int]] = {}
    for rank in range(shape.world_size):
        members.setdefault(key(shape.place(rank)), []).append(rank)
    if len(members) == 1:
        return dist.group.WORLD
    mine: ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration(list(members.values()))  # type: ignore[no-untyped-call]
    return mine
