"""A recorded GPU in every rank of a test: one that lowers its clocks while the file `hot` names its node.

Imported by the sitecustomize.py of a test's folder, in each process of its jobs, before anything asks for NVML.
The shared loop computes on the CPU there, so its ranks are given the GPU that a rank on `cuda` would look for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pynvml

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.observe import sampler
from hpc_trainer.observe.host_counters import Notes
from hpc_trainer.observe.nvidia import NvidiaDevices
from hpc_trainer.runtime.rank_env import RankEnv
from tests.unit.observe.counters.nvml_player import Card, Library

NODE = os.environ.get("SLURMD_NODENAME", "")
_POWER_CAP, _HW_THERMAL = 0x4, 0x40
SITE = """import os, sys
if "SLURM_PROCID" in os.environ:
    sys.path.append({root!r})
    from tests.slurm.scenarios import hot_node
    hot_node.play({hot!r})
"""


def site_text(hot: Path) -> str:
    """What sitecustomize.py says. `hot`: the file that names the node."""
    return SITE.format(root=str(Path(__file__).resolve().parents[3]), hot=str(hot))


def play(hot: str) -> None:
    """pynvml has four recorded GPUs in this process, and its rank one of them."""

    class _Card(Card):
        @property
        def reasons(self) -> int:
            is_hot = Path(hot).exists() and Path(hot).read_text() == NODE
            return _HW_THERMAL if is_hot else _POWER_CAP

        @reasons.setter
        def reasons(self, value: int) -> None:
            """The file says it."""

    pynvml.nvmlLib = Library(*(_Card(uuid=f"GPU-{NODE}-{number}") for number in range(4)))

    def devices_of(config: TrainConfig, env: RankEnv, notes: Notes, gpu: Sequence[str]) -> NvidiaDevices | None:
        return NvidiaDevices.find(notes, uuid=None, index=env.local_rank)

    sampler.devices_of = devices_of
