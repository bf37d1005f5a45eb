"""Rules of `hardware/`, `cluster/` and `monitor/`, and of `cluster.sbatch`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.config import script_words
from hpc_trainer.config.environment import environment_problems
from hpc_trainer.config.packages import missing
from hpc_trainer.config.rules.declared_rules import within
from hpc_trainer.config.schema.cluster import (
    ClusterConfig,
    Executor,
    GpuRequest,
    HardwareConfig,
    Launcher,
    PoolConfig,
    TimeLimit,
)
from hpc_trainer.config.schema.output import EVENTS, MonitorConfig, NotifyConfig, OnOverheat
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.script_words import Word, shown
from hpc_trainer.errors import did_you_mean, valid


def monitor_problems(monitor: MonitorConfig, executor: Executor) -> Iterator[str]:
    """Yield each problem with `monitor`."""
    if monitor.on_overheat is OnOverheat.move:
        yield from _move_problems(monitor, executor)
    folder = monitor.prometheus_dir
    if folder is None:
        return
    if script_words.has_control(folder) or not Path(folder).is_absolute():
        yield (
            f"monitor.prometheus_dir={folder!r} must be the absolute path of the folder on each node that "
            "node_exporter reads (--collector.textfile.directory). Use for example /var/lib/node_exporter."
        )
    if not monitor.telemetry_every_s:
        yield "monitor.prometheus_dir shows samples, but monitor.telemetry_every_s=0 takes none. Set it to 15."
    problem = missing("monitor.prometheus_dir", "prometheus_client")
    if problem is not None:
        yield problem


_MAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+|[a-z_][a-z0-9_-]*")


def notify_problems(notify: NotifyConfig, executor: Executor) -> Iterator[str]:
    """Yield each problem with `notify`."""
    wrong = next((event for event in notify.events if event not in EVENTS), None)
    if wrong is not None:
        yield f"notify.events names {wrong!r}. {valid(wrong, EVENTS)}"
    if notify.webhook_env is not None and not script_words.ENV_NAME.fits(notify.webhook_env):
        # The value is not shown: it may be the secret itself.
        yield (
            "notify.webhook_env must be the name of an environment variable (letters, digits, _), and not the address: "
            "that is a secret. Type: export MY_WEBHOOK=ADDRESS, and use notify.webhook_env=MY_WEBHOOK."
        )
    if notify.command is not None and (script_words.has_control(notify.command) or not notify.command.strip()):
        yield f"notify.command={notify.command!r} must be one line of shell. Put more lines into a script."
    if notify.mail is not None and not _MAIL.fullmatch(notify.mail):
        yield f"notify.mail={notify.mail!r} must be one address or user name, as anna@example.org."
    if notify.mail is not None and executor is not Executor.slurm:
        yield "notify.mail is Slurm's mail, and cluster.executor=local has none. Use notify.command, or cluster=slurm."


def _move_problems(monitor: MonitorConfig, executor: Executor) -> Iterator[str]:
    if executor is not Executor.slurm:
        yield (
            "monitor.on_overheat=move asks Slurm for another node, but cluster.executor=local has only this machine. "
            "Use monitor.on_overheat=warn, or cluster=slurm."
        )
    if not monitor.telemetry_every_s:
        yield (
            "monitor.on_overheat=move needs samples, but monitor.telemetry_every_s=0 takes none. Set it to 5, or use "
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
    "clusters": "one cluster= for each grid",
    "constraint": "hardware.constraint",
    "cpus-per-gpu": "hardware.cpus_per_gpu",
    "cpus-per-task": "hardware.cpus_per_task",
    "error": "hpc-trainer logs",
    "exclude": "hardware.exclude",
    "export": "cluster.environment.inherit and cluster.env",
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
    "begin": "a pending job blocks no other; submit later instead",
    "comment": "hpc-trainer uses the comment to recognise its jobs",
    "dependency": "job ids change when runs come back; runs follow each other by after=SWEEP/RUN (docs/chain.md)",
    "requeue": "interrupted runs are requeued automatically",
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
            yield f"{what}: sbatch has no such option. {nearest}".rstrip()
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


_MEMORY_KEYS = ("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu")
# sbatch's --signal keeps the lead in 16 bits.
_LONGEST_LEAD_S = 2**16 - 1


def hardware_problems(hardware: HardwareConfig) -> tuple[str, ...]:
    """Return each problem with `hardware`."""
    return tuple(_hardware(hardware))


def _hardware(hardware: HardwareConfig) -> Iterator[str]:
    memory = {f"hardware.{key}": getattr(hardware, key) for key in _MEMORY_KEYS}
    chosen = {key: value for key, value in memory.items() if value is not None}
    for key, value in chosen.items():
        if 0 < value < 1 / 1024:  # rounded to 0 MB it would be sbatch's --mem=0: all memory of the node
            yield f"{key}={value:g} is less than 1 MB, and Slurm counts in MB. Use {key}=1."
    if len(chosen) > 1:
        listed = ", ".join(f"{key}={value:g}" for key, value in chosen.items())
        first, *others = chosen
        unset = " ".join(f"{key}=null" for key in others)
        yield f"{listed}: Slurm takes one memory flag. Keep one of them, for example {first}: add {unset}."
    if not hardware.gpus_per_node:
        for key in ("cpus_per_gpu", "mem_gb_per_gpu"):
            if getattr(hardware, key) is not None:
                other = key.replace("_per_gpu", "_per_task" if key.startswith("cpus") else "_per_node")
                yield f"hardware.{key}={getattr(hardware, key):g} needs gpus_per_node ≥ 1. Use hardware.{other}."
    elif hardware.tasks_per_node not in (None, hardware.gpus_per_node):
        yield (
            f"hardware.tasks_per_node={hardware.tasks_per_node} must equal gpus_per_node={hardware.gpus_per_node}: "
            f"each GPU has one rank. Use {hardware.gpus_per_node} or null."
        )
    if hardware.gpu_types and hardware.gpu_type not in hardware.gpu_types:
        yield (
            f"hardware.gpu_types={hardware.gpu_types} must hold hardware.gpu_type={hardware.gpu_type}. Leave it out: "
            "hardware=first:A,B sets it."
        )
    if hardware.gpu_request is GpuRequest.none:
        for key, value in (("mem_gb_per_gpu", hardware.mem_gb_per_gpu), ("gpu_type", hardware.gpu_type)):
            if value is not None:
                yield (
                    f"hardware.{key}={value} needs an option that asks for GPUs, and hardware.gpu_request=none gives "
                    f"none. Leave it out: hardware.{key}=null."
                )
    if hardware.cpus_per_gpu is not None and hardware.cpus_per_task is not None:
        yield "hardware.cpus_per_gpu and hardware.cpus_per_task both set the cores of a rank. Keep one of them."
    yield from script_words.word_problem("hardware.partition", hardware.partition, script_words.PARTITION)
    yield from script_words.word_problem("hardware.qos", hardware.qos, script_words.QOS)
    yield from script_words.word_problem("hardware.constraint", hardware.constraint, script_words.CONSTRAINT)
    yield from script_words.word_problem("hardware.exclude", hardware.exclude, script_words.HOSTS)
    yield from script_words.word_problem("hardware.gpu_type", hardware.gpu_type, script_words.GPU_TYPE)


def pool_problems(hardware: HardwareConfig, pool: PoolConfig) -> tuple[str, ...]:
    """Return each problem with runs that share a GPU in a pool."""
    per_gpu, per_node = pool.per_gpu, pool.per_node
    if pool.jobs is None or per_gpu <= 1:
        return ()
    if not hardware.gpus_per_node:
        return (
            f"pool.per_gpu={per_gpu}: runs without a GPU (hardware.gpus_per_node=0) have none to share. Leave it out: "
            f"pool.per_node={per_gpu} runs that many side by side.",
        )
    if hardware.num_nodes * hardware.gpus_per_node > 1:
        where = f"hardware.num_nodes={hardware.num_nodes}, hardware.gpus_per_node={hardware.gpus_per_node}"
        return (
            f"pool.per_gpu={per_gpu}: only runs with one GPU and one rank can share a GPU, and these have more "
            f"({where}). Use hardware.num_nodes=1 hardware.gpus_per_node=1, or leave out pool.per_gpu.",
        )
    if isinstance(per_node, int) and per_node > 1 and per_node % per_gpu:
        below = per_node // per_gpu * per_gpu
        nearest = f"{below} or {below + per_gpu}" if below else f"{per_gpu}"
        return (
            f"pool.per_node={per_node} must be a multiple of pool.per_gpu={per_gpu}: each GPU of a slot has as many "
            f"runs. Use pool.per_node={nearest}.",
        )
    return ()


def site_notes(hardware: HardwareConfig, cluster: ClusterConfig) -> tuple[str, ...]:
    """Return notes if the shape is longer or larger than the site's facts allow, or pays for more than it uses.

    These are no problems: the facts may be old, and Slurm decides.
    """
    return (*_time_limit_note(hardware, cluster), *_whole_node_note(hardware, cluster))


def _whole_node_note(hardware: HardwareConfig, cluster: ClusterConfig) -> tuple[str, ...]:
    """Return a note if fewer GPUs are asked for than the profile's name has, where a job pays for whole nodes."""
    match = re.search(r"/.*_x(\d+)$", hardware.name)
    asked = hardware.num_nodes * hardware.gpus_per_node
    if cluster.site.whole_nodes is not True or match is None or not 0 < asked < int(match[1]):
        return ()
    return (
        f"cluster={cluster.name} (facts of {cluster.site.checked or 'unknown age'}) gives and charges whole nodes: "
        f"hardware.gpus_per_node={hardware.gpus_per_node} leaves GPUs of hardware={hardware.name} idle. Use "
        f"hardware.gpus_per_node={match[1]}, or run several in one job, by the same submit with cluster=local "
        "local.max_parallel=N inside it.",
    )


def _time_limit_note(hardware: HardwareConfig, cluster: ClusterConfig) -> tuple[str, ...]:
    site = cluster.site
    own = [
        limit
        for limit in site.time_limits
        if limit.partition in (None, hardware.partition) and limit.qos in (None, hardware.qos)
    ]
    own = [limit for limit in own if limit.qos is not None] or own  # a QOS may give more time than its partition
    nodes = hardware.num_nodes
    fitting = [
        limit for limit in own if limit.min_nodes <= nodes and (limit.max_nodes is None or nodes <= limit.max_nodes)
    ]
    of_site = f"cluster={cluster.name} (facts of {site.checked or 'unknown age'})"
    if own and not fitting:
        most = max(limit.max_nodes or 0 for limit in own)
        return (f"{of_site} gives {_queue(own[0])} at most {most} nodes, but hardware.num_nodes={nodes}.",)
    tight = min(fitting, key=lambda limit: limit.max_time_min, default=None)
    if tight is None or hardware.time_limit_min <= tight.max_time_min:
        return ()
    sizes = f" for {tight.min_nodes} to {tight.max_nodes} nodes" if tight.max_nodes is not None else ""
    return (
        f"{of_site} gives {_queue(tight)} at most {tight.max_time_min} minutes{sizes}, but "
        f"hardware.time_limit_min={hardware.time_limit_min}. Use hardware.time_limit_min={tight.max_time_min}: a "
        "longer run is requeued and continues.",
    )


def _queue(limit: TimeLimit) -> str:
    names = {"partition": limit.partition, "QOS": limit.qos}
    return " and ".join(f"{kind} {name}" for kind, name in names.items() if name is not None) or "every job"


def cluster_problems(config: TrainConfig) -> Iterator[str]:
    """Yield each problem with `cluster`."""
    cluster, hardware = config.cluster, config.hardware
    yield from script_words.word_problem("cluster.account", cluster.account, script_words.ACCOUNT)
    yield from script_words.word_problem("cluster.top_up_partition", cluster.top_up_partition, script_words.PARTITION)
    yield from script_words.word_problem("cluster.master_addr", cluster.master_addr, script_words.ADDRESS)
    if cluster.signal_lead_s is not None:
        longest = min(hardware.time_limit_min * 60 - 1, _LONGEST_LEAD_S)
        yield from within("cluster.signal_lead_s", cluster.signal_lead_s, f"[1, {longest}]")
    for name, value in cluster.env.items():
        if not script_words.ENV_NAME.fits(name) or script_words.has_control(value):
            yield f"cluster.env.{name}={value!r}: a variable is a name (letters, digits, _) and one line of text."
    for line in cluster.setup:
        yield from script_words.setup_problem(line)
    yield from sbatch_problems(cluster.sbatch)
    for argument in cluster.srun_args:
        yield from script_words.srun_problem(argument)
    if cluster.python is not None:
        yield from script_words.python_problem(cluster.python)
    yield from environment_problems(cluster, hardware)
    yield from _launcher_problems(config)


def _launcher_problems(config: TrainConfig) -> Iterator[str]:
    if config.hardware.launcher is not Launcher.torchrun:
        return
    if config.cluster.executor is not Executor.slurm:
        yield (
            "hardware.launcher=torchrun starts the ranks of Slurm's nodes, and cluster.executor=local starts them "
            "itself. Use hardware.launcher=srun, or cluster=slurm."
        )
    if config.train.command is not None:
        yield (
            "hardware.launcher=torchrun starts workers, and train.command is a program of your own. Use "
            "hardware.launcher=srun, and for a torchrun in the command train.command_per=node."
        )
