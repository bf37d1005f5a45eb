"""A batch script of ours as the tests read it: its flags, its set-up lines, and the words that srun gets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.launch.batch_job import setup_lines
from hpc_trainer.slurm.shape import Shape

HEAD = [
    "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
    "export HPC_TRAINER_JOB_START=$(date +%s)",
    "export SLURM_EXPORT_ENV=ALL",
]
FRAME = ["set +e", "", "# command", "export SUBMITIT_EXECUTOR=slurm"]
*GUARD, _AN_ENTRY, GUARD_ENDS, _ = setup_lines(["AN ENTRY"])
"""Around the lines of cluster.setup, where there are any."""


@dataclass(frozen=True, slots=True)
class Script:
    """`flags`: of the #SBATCH lines, "" for one without a value; `srun`: the words behind it; `tail`: what follows."""

    flags: Mapping[str, str]
    facts: list[str]
    setup: list[str]
    srun: list[str]
    tail: list[str]

    @property
    def command(self) -> list[str]:
        """The words of one rank."""
        return self.srun[self.srun.index("--") + 1 :]

    @property
    def srun_args(self) -> list[str]:
        """What stands between our options of srun and the command."""
        return self.srun[self.srun.index("--kill-on-bad-exit=1") + 1 : self.srun.index("--")]

    @property
    def sweep_dir(self) -> Path:
        return Path(self.command[self.command.index("--sweep-dir") + 1])

    @property
    def folder(self) -> Path:
        return Path(self.flags["output"]).parent

    @property
    def array(self) -> tuple[int, int] | None:
        """Elements, and how many of them at once."""
        found = re.fullmatch(r"0-(\d+)%(\d+)", self.flags.get("array", ""))
        return (int(found[1]) + 1, int(found[2])) if found else None

    @property
    def shape(self) -> Shape:
        flags = self.flags
        gpus = flags.get("gpus-per-node") or flags.get("gres", "gpu:0").removeprefix("gpu:")
        kind, _, count = gpus.rpartition(":")
        command = self.command
        by_torchrun = int(command[command.index("--torchrun") + 1]) if "--torchrun" in command else 1
        memory = {
            key: int(flags[key].removesuffix("M")) / 1024 if flags.get(key, "0") != "0" else None for key in _MEMORY
        }
        return Shape(
            num_nodes=int(flags["nodes"]), tasks_per_node=int(flags["ntasks-per-node"]), gpus_per_node=int(count),
            cpus_per_task=int(flags["cpus-per-task"]), mem_gb_per_node=memory["mem"],
            mem_gb_per_gpu=memory["mem-per-gpu"], mem_gb_per_cpu=memory["mem-per-cpu"], gpu_type=kind or None,
            partition=flags.get("partition"), qos=flags.get("qos"), constraint=flags.get("constraint"),
            exclude=flags.get("exclude"), account=flags.get("account"), time_limit_min=int(flags["time"]),
            signal_lead_s=int(flags["signal"].removeprefix("USR2@")),
            gpu_request="gres" if "gres" in flags else "gpus_per_node",  # none: a script tells no more than no GPUs
            ranks_per_task=by_torchrun, whole_node="exclusive" in flags and flags.get("mem") == "0",
        )  # fmt: skip


_MEMORY = ("mem", "mem-per-gpu", "mem-per-cpu")


def read_script(text: str) -> Script:
    """Reads a script by the rules of sbatch and bash; a line that is no part of ours is an assertion."""
    lines = text.rstrip("\n").split("\n")
    assert lines[0] == "#!/bin/bash"
    begin = lines.index(HEAD[0])
    flags = {}
    for line in filter(None, lines[1:begin]):
        found = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.+))?", line)
        assert found or line in ("# Parameters", "# setup"), line
        if found:
            words = shlex.split(found[2] or "")
            assert found[1] not in flags, line
            assert len(words) == (found[2] is not None), line
            flags[found[1]] = words[0] if words else ""
    srun = max(number for number, line in enumerate(lines) if line.startswith("srun "))
    end = srun - len(FRAME)
    head = begin + len(HEAD)
    assert lines[begin:head] == HEAD
    assert lines[end:srun] == FRAME
    facts = [line for line in lines[head:end] if line.startswith("export HPC_TRAINER_")]
    setup = lines[head + len(facts) : end]
    if setup:
        assert setup[: len(GUARD)] == GUARD
        assert setup[-1] == GUARD_ENDS
        setup = setup[len(GUARD) : -1]
    words = shlex.split(lines[srun])
    assert shlex.join(words) == lines[srun], "every word is quoted"
    assert len(flags.keys() & set(_MEMORY)) <= 1, "Slurm takes one"
    return Script(flags=flags, facts=facts, setup=setup, srun=words[1:], tail=lines[srun + 1 :])
