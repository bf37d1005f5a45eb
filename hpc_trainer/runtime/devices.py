"""The kinds of device that a rank may compute on, and what the engine asks of each. A new kind is a class here.

Kinds: the CPU; `cuda`, which is ROCm too, as torch gives AMD's GPUs that name; `mps`, Apple's; `xla`, TPUs and what
else torch-xla drives. What only CUDA has (streams, pinned memory, allocator figures) stays where it is used.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from hpc_trainer.errors import ConfigError, HpcTrainerError


class DeviceKind:
    """What holds for the CPU; the other kinds say what is different."""

    type: ClassVar[str] = "cpu"
    """As torch names it (torch.device.type)."""
    backend: ClassVar[str] = "gloo"
    """Of torch.distributed."""
    has_float64: ClassVar[bool] = True
    has_stamps: ClassVar[bool] = True
    """`stamp` tells when work is done, not when it was asked for."""

    def device(self, local_rank: int) -> torch.device:
        """The device of a node's `local_rank`-th rank. Where Slurm binds one to each task, every rank sees one alone.

        Raises HpcTrainerError: there is none; ConfigError: this build of torch has none on any node.
        """
        del local_rank
        return torch.device(self.type)

    def select(self, device: torch.device) -> None:
        """Makes it the one that calls without a device mean."""

    def name(self, device: torch.device) -> str:
        """What decides the bits: a GPU's model; of a CPU the instructions that torch chose its kernels for."""
        del device
        return torch.backends.cpu.get_cpu_capability()

    def names(self, device: torch.device) -> list[str]:
        """By which the driver's own library knows it: UUID and place on the bus; [] where torch tells none."""
        del device
        return []

    def versions(self) -> dict[str, Any]:
        """Of libraries besides torch that compute."""
        return {}

    def synchronize(self, device: torch.device) -> None:
        """Waits for all that was launched."""

    def launch(self) -> None:
        """Starts what was only collected so far: XLA compiles and runs a graph at a time, others run at once."""

    def stamp(self) -> Any:
        """The moment at which all that was launched so far is done, for `seconds_between`. Waits for nothing."""
        return time.perf_counter()

    def seconds_between(self, first: Any, last: Any) -> float:
        """Seconds from one `stamp` to a later one. Of a GPU: asked when the device is known to have passed both."""
        seconds: float = last - first
        return seconds

    def is_in_use(self) -> bool:
        """True if this process has random numbers of this kind to keep, besides those of the CPU. Starts nothing."""
        return False

    def seed(self, number: int) -> None:
        """Seeds this kind's generator; 0 to 2**63 - 1."""

    def rng_state(self) -> torch.Tensor:
        """The state of the current device's generator, on the CPU."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Undoes `rng_state`."""
        torch.set_rng_state(state)


class CudaKind(DeviceKind):
    """NVIDIA's GPUs, and AMD's (ROCm)."""

    type = "cuda"
    backend = "nccl"  # of ROCm RCCL, by the same name

    def device(self, local_rank: int) -> torch.device:
        count = torch.cuda.device_count()
        if not count:
            seen = {key: os.environ[key] for key in _VISIBLE if key in os.environ}
            told = f"torch {torch.__version__} sees no GPU here ({seen or 'no device is hidden'})."
            if torch.version.cuda is None and torch.version.hip is None:
                raise ConfigError(
                    f"{told} It is a build for CPUs. Install one for CUDA (https://pytorch.org/get-started)."
                )
            raise HpcTrainerError(told)
        return torch.device(self.type, local_rank % count)

    def select(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def names(self, device: torch.device) -> list[str]:
        found: Any = torch.cuda.get_device_properties(device)
        try:
            place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
            return [str(found.uuid), place]
        except AttributeError:  # older than 2.4
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
        last.synchronize()  # has passed already, but where nobody has read anything from the device
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
            raise HpcTrainerError(
                f"torch {torch.__version__} sees no MPS device here: it is there on Apple's machines."
            )
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

        state = xm.get_rng_state()  # 64 bits without a sign, which tensors have not everywhere
        return torch.tensor(state - (state >> 63 << 64), dtype=torch.int64)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.seed(int(state) % 2**64)


# Site settings that hide GPUs from a process; the last two are ROCm's.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_KINDS = {kind.type: kind() for kind in (DeviceKind, CudaKind, MpsKind, XlaKind)}


def kind_of(device: torch.device | str) -> DeviceKind:
    """The kind of a device, or by its name.

    Raises KeyError: nobody taught the engine that kind.
    """
    return _KINDS[device if isinstance(device, str) else device.type]


def kinds_in_use() -> Iterator[DeviceKind]:
    """Those, besides the CPU, whose random numbers this process may draw."""
    return (kind for kind in _KINDS.values() if kind.is_in_use())
