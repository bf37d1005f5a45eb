"""Kinds of device on which a rank may compute, the interface that the engine needs, and the memory of one rank.

A new kind is a class here. Kinds: the CPU; `cuda`, which includes ROCm because torch gives AMD's GPUs that name; `mps`,
Apple's; `xla`, TPUs and other devices of torch-xla. Abilities that only CUDA has (streams, pinned memory, allocator
figures) are used without this interface.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.errors import ConfigError, HpcTrainerError, TooLargeError


class DeviceKind:
    """Kind of the CPU; the other kinds override methods in which they differ."""

    type: ClassVar[str] = "cpu"
    """Name in torch (torch.device.type)."""
    backend: ClassVar[str] = "gloo"
    """Backend of torch.distributed."""
    has_float64: ClassVar[bool] = True
    has_stamps: ClassVar[bool] = True
    """True if `stamp` measures when work is done, not when it was launched."""

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a node's `local_rank`-th rank; a rank sees only one if Slurm binds devices to tasks.

        Raises:
            HpcTrainerError: there is no such device here.
            ConfigError: this build of torch finds no such device on any node.
        """
        del local_rank
        return torch.device(self.type)

    def select(self, device: torch.device) -> None:
        """Make `device` the default device of torch's calls that name no device."""

    def take_share(self, device: torch.device, per_gpu: int) -> None:
        """Bound the memory that this process may take of a device which `per_gpu` processes share."""

    def name(self, device: torch.device) -> str:
        """Return the name that determines bitwise results: a GPU's model, or the CPU instructions that torch uses."""
        del device
        return torch.backends.cpu.get_cpu_capability()

    def names(self, device: torch.device) -> list[str]:
        """Return the device's names in the driver's own library: UUID and place on the bus; [] if torch knows none."""
        del device
        return []

    def versions(self) -> dict[str, Any]:
        """Return the versions of the libraries besides torch that compute."""
        return {}

    def synchronize(self, device: torch.device) -> None:
        """Wait until all launched work is done."""

    def launch(self) -> None:
        """Start the operations collected so far: XLA compiles and runs whole graphs, other kinds run each at once."""

    def stamp(self) -> Any:
        """Return a mark of the time when all work launched so far is done, for `seconds_between`. Waits for nothing."""
        return time.perf_counter()

    def seconds_between(self, first: Any, last: Any) -> float:
        """Return the seconds from one `stamp` to a later one. On a GPU, call it once the device has passed both."""
        seconds: float = last - first
        return seconds

    def is_in_use(self) -> bool:
        """Return True if this kind has random state to keep, besides the CPU's. The call does not start the device."""
        return False

    def seed(self, number: int) -> None:
        """Seed this kind's generator with a number in [0, 2**63 - 1]."""

    def rng_state(self) -> torch.Tensor:
        """Return the state of the current device's generator, as a tensor on the CPU."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that `rng_state` returned."""
        torch.set_rng_state(state)


_CONTEXT_BYTES = 512 * 2**20
"""About what a process takes of a GPU beside torch's allocator: the CUDA context and the code of kernels."""


def share_of_memory(total_bytes: int, per_gpu: int) -> int:
    """Return the bytes that torch may allocate in each of `per_gpu` processes on a GPU, so that none takes another's.

    Args:
        total_bytes: memory of the GPU.
        per_gpu: number of processes on the GPU.
    """
    share = total_bytes // per_gpu
    return share if per_gpu == 1 else max(share // 2, share - _CONTEXT_BYTES)


class CudaKind(DeviceKind):
    """NVIDIA's GPUs, and AMD's (ROCm)."""

    type = "cuda"
    backend = "nccl"  # on ROCm RCCL, under the same name

    def device(self, local_rank: int) -> torch.device:
        count = torch.cuda.device_count()
        if not count:
            seen = {key: os.environ[key] for key in _VISIBLE if key in os.environ}
            problem = f"torch {torch.__version__} sees no GPU here ({seen or 'no device is hidden'})."
            if torch.version.cuda is None and torch.version.hip is None:
                raise ConfigError(
                    f"{problem} It is a build for CPUs. Install one for CUDA (https://pytorch.org/get-started)."
                )
            raise HpcTrainerError(problem)
        return torch.device(self.type, local_rank % count)

    def select(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def take_share(self, device: torch.device, per_gpu: int) -> None:
        if per_gpu > 1:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(share_of_memory(total, per_gpu) / total, device)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def names(self, device: torch.device) -> list[str]:
        properties: Any = torch.cuda.get_device_properties(device)
        try:
            place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
            return [str(properties.uuid), place]
        except AttributeError:  # torch older than 2.4
            return []

    def versions(self) -> dict[str, Any]:
        if torch.version.hip is not None:
            return {"hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
        return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def stamp(self) -> Any:
        # The host runs ahead of the device: its clock would tell when kernels were launched.
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, first: Any, last: Any) -> float:
        last.synchronize()  # already passed, unless nothing was read from the device
        return float(first.elapsed_time(last)) / 1000

    def is_in_use(self) -> bool:
        # Asking CUDA for its state would start it, and take 0.5 GB of GPU memory from a run on the CPU.
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def seed(self, number: int) -> None:
        torch.cuda.manual_seed(number)

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)


class MpsKind(DeviceKind):
    """Apple's GPUs: one in each machine."""

    type = "mps"
    has_float64 = False  # Metal has none
    has_stamps = False

    def device(self, local_rank: int) -> torch.device:
        if not self.is_in_use():
            raise HpcTrainerError(f"torch {torch.__version__} sees no MPS device here: only Apple's machines have one.")
        return super().device(local_rank)

    def name(self, device: torch.device) -> str:
        return torch.backends.mps.get_name()

    def synchronize(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def is_in_use(self) -> bool:
        return torch.backends.mps.is_available()

    def seed(self, number: int) -> None:
        torch.mps.manual_seed(number)

    def rng_state(self) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state)


class XlaKind(DeviceKind):
    """TPUs, through torch-xla (`pip install 'hpc_trainer[xla]'`); PJRT_DEVICE=CPU tries it without one."""

    type = "xla"
    has_stamps = False

    def device(self, local_rank: int) -> torch.device:
        try:
            import torch_xla
        except ImportError as error:
            raise HpcTrainerError(
                f"it needs torch-xla of torch's own release, and torch is {torch.__version__}: {error}. "
                "pip install 'hpc_trainer[xla]'."
            ) from error
        device: torch.device = torch_xla.device()
        return device

    def name(self, device: torch.device) -> str:
        import torch_xla.core.xla_model as xm

        return str(xm.xla_device_hw(device))  # TPU, CPU, ..

    def versions(self) -> dict[str, Any]:
        import torch_xla

        return {"torch_xla": torch_xla.__version__}

    def synchronize(self, device: torch.device) -> None:
        import torch_xla

        torch_xla.sync(wait=True)

    def launch(self) -> None:
        import torch_xla

        torch_xla.sync()

    def is_in_use(self) -> bool:
        return "torch_xla" in sys.modules

    def seed(self, number: int) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(number)

    def rng_state(self) -> torch.Tensor:
        import torch_xla.core.xla_model as xm

        state = xm.get_rng_state()  # unsigned 64 bits, which tensors do not support everywhere
        return torch.tensor(state - (state >> 63 << 64), dtype=torch.int64)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.seed(int(state) % 2**64)


# Site settings that hide GPUs from a process; the last two are ROCm's.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_KINDS = {kind.type: kind() for kind in (DeviceKind, CudaKind, MpsKind, XlaKind)}


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the kind of a device, given the device or the name of its type.

    Raises:
        KeyError: the engine has no such kind.
    """
    return _KINDS[device if isinstance(device, str) else device.type]


def kinds_in_use() -> Iterator[DeviceKind]:
    """Return the kinds, besides the CPU, whose random numbers this process may draw."""
    return (kind for kind in _KINDS.values() if kind.is_in_use())


_GIB = 2**30  # what Slurm calls G
# Messages of libraries whose own allocations fail, with no error type of their own. The first is the CPU allocator's.
_WORDS = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error`, or an error that it was raised from, reports that memory ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError, TooLargeError)):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in _WORDS):
            return True
        error = error.__cause__
    return False


def profile_bytes(hardware: HardwareConfig) -> int | None:
    """Return the bytes of host memory that the hardware profile gives one rank; None if the profile names none."""
    if hardware.mem_gb_per_node is not None:
        return int(hardware.mem_gb_per_node * _GIB) // hardware.ranks_per_node
    if hardware.mem_gb_per_cpu is not None:
        return int(hardware.mem_gb_per_cpu * hardware.cpus_per_rank * _GIB)
    return None if hardware.mem_gb_per_gpu is None else int(hardware.mem_gb_per_gpu * _GIB)


def device_name(device: torch.device) -> str:
    """Return the name of a device: `NVIDIA A100-SXM4-40GB`, or `cpu`."""
    return device.type if device.type == "cpu" else kind_of(device).name(device)
