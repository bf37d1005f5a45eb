"""A CPU's memory, which nobody counts there: what is not there is not taken."""

from __future__ import annotations

from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.features.memory.search import HostMemory


def test_a_pass_that_a_cpu_has_no_memory_for_is_not_even_tried() -> None:
    ran: list[int] = []
    held = HostMemory(HardwareConfig()).held()
    probe = HostMemory(HardwareConfig(mem_gb_per_node=(held + 100e6) / 2**30))
    assert probe.measure(lambda: ran.append(1), lambda: 10_000_000) == 10_000_000
    assert probe.measure(lambda: ran.append(2), lambda: 10**12) == 10**12
    assert ran == [1]
    assert HostMemory(HardwareConfig()).limit() > held, "what the machine has free counts where the profile is silent"
