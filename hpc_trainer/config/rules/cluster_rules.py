"""Rules of `monitor/` and of `cluster.sbatch`: options of sbatch(1) that are no key of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.config import script_words as words
from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.monitor import MonitorConfig, OnOverheat
from hpc_trainer.config.script_words import Word, shown
from hpc_trainer.errors import did_you_mean


def monitor_problems(monitor: MonitorConfig, executor: Executor) -> Iterator[str]:
    """Yield each problem with `monitor`."""
    if monitor.on_overheat is OnOverheat.move:
        yield from _move_problems(monitor, executor)
    folder = monitor.prometheus_dir
    if folder is None:
        return
    if words.has_control(folder) or not Path(folder).is_absolute():
        yield (
            f"monitor.prometheus_dir={folder!r} must be the absolute path of the folder on each node that "
            "node_exporter reads (--collector.textfile.directory). Use for example /var/lib/node_exporter."
        )
    if not monitor.telemetry_every_s:
        yield "monitor.prometheus_dir shows samples, and monitor.telemetry_every_s=0 takes none. Set that to 15, or so."
    problem = missing("monitor.prometheus_dir", "prometheus_client")
    if problem is not None:
        yield problem


def _move_problems(monitor: MonitorConfig, executor: Executor) -> Iterator[str]:
    if executor is not Executor.slurm:
        yield (
            "monitor.on_overheat=move asks Slurm for another node, and cluster.executor=local has this machine alone. "
            "Use monitor.on_overheat=warn, or cluster=slurm."
        )
    if not monitor.telemetry_every_s:
        yield (
            "monitor.on_overheat=move needs samples, and monitor.telemetry_every_s=0 takes none. Set that to 5, or use "
            "monitor.on_overheat=warn."
        )


_FREE = frozenset({
    "acctg-freq", "batch", "bb", "bbf", "cluster-constraint", "container", "container-id", "contiguous",
    "core-spec", "cores-per-socket", "cpu-freq", "deadline", "delay-boot", "exclusive", "extra-node-info",
    "gpu-bind", "gpu-freq", "gres-flags", "hint", "hold", "kill-on-invalid-dep", "licenses", "mail-type",
    "mail-user", "mcs-label", "mem-bind", "mincpus", "network", "nice", "no-kill", "nodefile", "nodelist",
    "oom-kill-step", "overcommit", "oversubscribe", "power", "prefer", "priority", "profile", "propagate", "reboot",
    "reservation", "resv-ports", "segment", "sockets-per-node", "spread-job", "stepmgr", "switches", "thread-spec",
    "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task", "use-min-nodes", "wait-all-nodes", "wckey",
})  # fmt: skip
_OURS = {
    "account": "cluster.account",
    "array": "the grid itself, and cluster.array_parallelism",
    "chdir": "the folder in which you submit",
    "clusters": "a cluster= for each grid",
    "constraint": "hardware.constraint",
    "cpus-per-gpu": "hardware.cpus_per_gpu",
    "cpus-per-task": "hardware.cpus_per_task",
    "error": "hpc-trainer logs",
    "exclude": "hardware.exclude",
    "export": "cluster.env",
    "export-file": "cluster.env",
    "gpus": "hardware.gpus_per_node",
    "gpus-per-node": "hardware.gpus_per_node",
    "gpus-per-socket": "hardware.gpus_per_node",
    "gpus-per-task": "hardware.gpus_per_node",
    "gres": "hardware.gpu_type and hardware.gpu_request",
    "job-name": "sweep_name",
    "mem": "hardware.mem_gb_per_node",
    "mem-per-cpu": "hardware.mem_gb_per_cpu",
    "mem-per-gpu": "hardware.mem_gb_per_gpu",
    "no-requeue": "hpc-trainer cancel",
    "nodes": "hardware.num_nodes",
    "ntasks": "hardware.tasks_per_node",
    "ntasks-per-core": "hardware.tasks_per_node",
    "ntasks-per-gpu": "hardware.tasks_per_node",
    "ntasks-per-node": "hardware.tasks_per_node",
    "ntasks-per-socket": "hardware.tasks_per_node",
    "open-mode": "hpc-trainer logs",
    "output": "hpc-trainer logs",
    "partition": "hardware.partition",
    "qos": "hardware.qos",
    "signal": "cluster.signal_lead_s",
    "time": "hardware.time_limit_min",
    "wait": "submit --wait",
    "wrap": "--command",
}
_UNNEEDED = {
    "begin": "a job that waits holds up nothing; submit later",
    "comment": "hpc-trainer uses the comment to recognise its jobs",
    "dependency": "hpc-trainer sets it for jobs that follow each other",
    "requeue": "runs come back by themselves",
}
_VALUE = Word(re.compile(r"[A-Za-z0-9_./:+@-][A-Za-z0-9_.,:@%+=/*\[\]-]*"), "END")


def sbatch_problems(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield each problem with options for the batch script."""
    for name, value in options.items():
        what = f"cluster.sbatch holds {shown(str(name))}"
        option = str(name).removeprefix("--").replace("_", "-")
        if option in _UNNEEDED:
            yield f"{what}, which hpc_trainer sets itself. Remove it: {_UNNEEDED[option]}."
        elif option in _OURS:
            yield f"{what}, which hpc_trainer sets itself. Use {_OURS[option]}."
        elif name not in _FREE:
            nearest = did_you_mean(option, _FREE) or f"It takes {', '.join(sorted(_FREE))}."
            yield f"{what}: no option of sbatch by that name. {nearest}".rstrip()
        elif not _is_word(value):
            yield (
                f"cluster.sbatch.{name}={shown(str(value))} must be true (an option without a value), a number, or one "
                "plain word as Slurm takes it, like END: no spaces, quotes or shell characters. Leave it out, or null."
            )


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and _VALUE.fits(value))


def sbatch_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return option -> value, True for an option without a value; null and false are left out."""
    return {name: value for name, value in options.items() if value is not None and value is not False}
