"""Slurm's terms: job states, and reasons for the state of a job. No other file spells a state out.

squeue, sacct and scontrol share the states. A state missing here comes from a newer release: it has no meaning for a
run, and is shown unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PENDING = "PENDING"
COMPLETING = "COMPLETING"
COMPLETED = "COMPLETED"
CANCELLED = "CANCELLED"
FAILED = "FAILED"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
PREEMPTED = "PREEMPTED"
NODE_FAIL = "NODE_FAIL"
TIMEOUT = "TIMEOUT"
DEADLINE = "DEADLINE"
BOOT_FAIL = "BOOT_FAIL"
CUT_OUT_OF_MEMORY = "OUT_OF_ME"
"""Slurm's OUT_OF_MEMORY as sacct truncates it."""
AT_WORK = frozenset({"RUNNING", "CONFIGURING", "STOPPED", "SUSPENDED", "SIGNALING", "RESIZING", "STAGE_OUT"})
"""States of a job that still has its nodes; `scontrol requeue Incomplete` works on it."""
HAS_NODES = AT_WORK | {COMPLETING}
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States of a job that was put back into the queue and waits until somebody releases it."""
TAKEN_BACK = frozenset({"REQUEUED", "REQUEUE_FED"})
NOT_BEGUN = frozenset({PENDING, *TAKEN_BACK, *HELD})
NOT_ENDED = HAS_NODES | {PENDING, "REQUEUED"}

# Slurm's reasons for the state of a job (squeue(1), "JOB REASON CODES").
#
# For a waiting job: what the reason means in plain words, and what the user can do. For an ending job: how it ends.

NONE = "None"
"""Reason that Slurm prints if it gives none."""

# End state by the reason of a job that is still COMPLETING (seen on 22.05; RaisedSignal is newer).
_ENDS = {
    "TimeLimit": TIMEOUT,
    "NodeDown": NODE_FAIL,
    "OutOfMemory": OUT_OF_MEMORY,
    "NonZeroExitCode": FAILED,
    "JobLaunchFailure": FAILED,
    "RaisedSignal": FAILED,
}
_SHELL_KILLED = ("JobLaunchFailure", "RaisedSignal")


@dataclass(frozen=True, slots=True)
class Reason:
    """Meaning of a reason (`says`) and what the user can do (`advice`); () if only waiting helps.

    The advice has the placeholders {run} and {job}.
    """

    says: str
    advice: tuple[str, ...] = ()


_ANEW = "hpc-trainer cancel {run}, then the same `hpc-trainer submit` with "
_RELEASE = ("scontrol release {job}",)
_NODES = ("sinfo -R says which nodes are out, and why",)
_OUT = Reason(
    "a node that it needs is down, drained or reserved",
    (*_NODES, "scontrol show reservation: a run that ends before a maintenance may start; " + _ANEW
     + "a shorter hardware.time_limit_min"),
)  # fmt: skip
_ACCOUNT = Reason("its account or QOS may not be used here", (_ANEW + "another cluster.account or hardware.qos",))

# Keys are beginnings of Slurm's reason: a list of nodes may follow it.
_REASONS = {
    NONE: Reason("Slurm has not looked at it yet"),
    "WaitingForScheduling": Reason("Slurm has not looked at it yet"),
    "Priority": Reason("jobs of higher priority are before it"),
    "Resources": Reason("it is its turn, and too few nodes, cores, GPUs or memory are free"),
    "BeginTime": Reason("it must not begin yet; a requeued job is held for two minutes"),
    "DependencyNeverSatisfied": Reason(
        "the job that it follows did not end as it must: it never starts",
        ("hpc-trainer cancel {run}, then hpc-trainer retry {run}",),
    ),
    "Dependency": Reason("it begins when the job that it follows has ended"),
    "JobArrayTaskLimit": Reason(
        "as many runs of its array are at work as cluster.array_parallelism allows",
        ("nothing: it starts when one of them ends. For later submits: a larger cluster.array_parallelism",),
    ),
    "JobHeldUser": Reason("it was held by you, or in your name", _RELEASE),
    "JobHeldAdmin": Reason("an administrator holds it", ("ask the administrators: they may scontrol release {job}",)),
    "JobHoldMaxRequeue": Reason("it was requeued more often than the site allows (MaxBatchRequeue)", _RELEASE),
    "launch failed requeued held": Reason("a node could not start it, so Slurm holds it", _RELEASE),
    "job requeued in held state": Reason("it was requeued to be held", _RELEASE),
    "user env retrieval failed": Reason("a node could not start it, so Slurm holds it", _RELEASE),
    "ReqNodeNotAvail": _OUT,
    "Nodes required for job are DOWN": _OUT,
    "NodeDown": _OUT,
    "FrontEndDown": Reason("the front end that would start it is down", _NODES),
    "ReservationInvalid": Reason(
        "the reservation that it asks for does not exist, or may not be used by it", (_ANEW + "another partition, or "
        "without a reservation",)
    ),
    "ReservationDeleted": Reason("the reservation that it asks for is gone", (_ANEW + "another partition, or without a "
    "reservation",)),
    "Reservation": Reason("the reservation that it asks for has not begun"),
    "PartitionDown": Reason("its partition starts no jobs now", ("sinfo shows when it is up again",)),
    "PartitionInactive": Reason("its partition starts no jobs now", ("sinfo shows when it is up again",)),
    "PartitionNodeLimit": Reason(
        "it asks for more nodes than its partition gives a job: unchanged, it will not start",
        (_ANEW + "fewer hardware.num_nodes, or another hardware.partition",),
    ),
    "PartitionTimeLimit": Reason(
        "its time limit is longer than its partition's: unchanged, it will not start",
        (_ANEW + "a shorter hardware.time_limit_min, or another hardware.partition",),
    ),
    "PartitionConfig": Reason(
        "its partition, as it is set up, cannot run it",
        ("scontrol show partition: limits, and who may use it", _ANEW + "another hardware.partition"),
    ),
    "BadConstraints": Reason(
        "no node has what it asks for: unchanged, it will not start",
        (_ANEW + "another hardware.constraint, GPU type, memory or number of cores", *_NODES),
    ),
    "Constraints": Reason(
        "too few nodes with the features that it asks for are free", ("sinfo -o '%N %f %T' shows features and states",)
    ),
    "MaxMemPerLimit": Reason(
        "it asks for more memory than a job may have: unchanged, it will not start",
        (_ANEW + "less memory (hardware.mem_gb_per_node, _per_gpu or _per_cpu)",),
    ),
    "InvalidAccount": _ACCOUNT, "AccountNotAllowed": _ACCOUNT, "InvalidQOS": _ACCOUNT, "QOSNotAllowed": _ACCOUNT,
    "QOSUsageThreshold": Reason(
        "its QOS starts no jobs of users who have used too much", (_ANEW + "another hardware.qos",)
    ),
    "AccountingPolicy": Reason("its account or QOS has reached a limit: it starts when other jobs end"),
    "DeadLine": Reason(
        "it can no longer end before its --deadline: it never starts",
        (_ANEW + "a shorter hardware.time_limit_min, or without cluster.sbatch.deadline",),
    ),
    "MaxPoweredUpNodes": Reason("as many nodes are powered up as the site allows: it starts when others are done"),
    "BurstBuffer": Reason("its burst buffer is not ready: space for it, or the data that it stages in"),
    "FedJobLock": Reason("another cluster of the federation is looking at it"),
    "MpiPortsBusy": Reason("the ports that its ranks would meet at are in use"),
    "NvidiaImexChannels": Reason("too few NVIDIA IMEX channels are free"),
    "PowerNotAvail": Reason("the site's limit on power leaves too little for it"),
    "PowerReserved": Reason("the power that it needs is reserved for others"),
    "JobLaunchFailure": Reason("its last start failed on a node", ("hpc-trainer why {run}, if it stays so",)),
    "SystemFailure": Reason("Slurm, a file system or the network failed when it was about to start", ("ask the site",)),
    "InactiveLimit": Reason("it was inactive for longer than the site allows"),
    "Licenses": Reason("the licences that it asks for are in use"),
    "Cleaning": Reason("what is left of its last start is being cleaned up"),
    "Prolog": Reason("the site's prolog runs on its nodes"),
    "SchedDefer": Reason("Slurm looks at it in its next round"),
}  # fmt: skip
_LIMIT = re.compile(r"(Assoc|QOS)?(?:iation)?(Grp|Max|Min)?(.*)")
_WHAT = {
    "job": "jobs", "submitjob": "jobs", "cpu": "cores", "gres": "GPUs", "mem": "memory", "node": "nodes",
    "license": "licences", "energy": "energy", "wall": "time", "bb": "burst buffer", "billing": "billing units",
}  # fmt: skip


def end_of(word: str) -> str | None:
    """Return the state that a job with this reason ends in; None if the reason does not say."""
    return _ENDS.get(word.partition(":")[0])


def says_shell_was_killed(word: str) -> bool:
    """Return True if the job ends because its batch shell was killed or never started."""
    return word.startswith(_SHELL_KILLED)


def says_held(word: str) -> bool:
    """Return True if a job with this reason waits until it is released."""
    return "held" in word.lower()


def explain_reason(word: str) -> Reason:
    """Explain Slurm's reason for a waiting job; for an unknown reason, name the place that explains it."""
    spaced = word.replace("_", " ")
    listed = next((reason for beginning, reason in _REASONS.items() if spaced.startswith(beginning)), None)
    return (
        listed
        or _limit(word)
        or Reason("a reason that hpc-trainer does not know", ("man squeue explains it, under JOB REASON CODES",))
    )


def _limit(word: str) -> Reason | None:
    """Explain a reason that names a limit (`AssocGrpGRES`, `QOSMaxJobsPerUserLimit`, some hundred more); else None."""
    source, kind, rest = _LIMIT.fullmatch(word).groups()  # type: ignore[union-attr]  # it fits any text
    if source is None and kind is None:
        return None
    rest = rest.lower()
    whose = {"Assoc": "your account", "QOS": "its QOS"}.get(source, "the site")
    what = next((name for part, name in _WHAT.items() if rest.startswith(part)), "resources")
    if kind == "Min" or "perjob" in rest or "pernode" in rest:
        more, less = ("less", "more") if kind == "Min" else ("more", "less")
        says = f"it asks for {more} {what} than {whose} lets a job have: unchanged, it will not start"
        return Reason(says, (f"{_ANEW}{less} of that, or another hardware.qos",))
    is_own = "peruser" in rest or (source, kind) == ("Assoc", "Max")
    whom = "you" if is_own else "an account" if "peracc" in rest else "all its jobs together"
    if "runmin" in rest:
        return Reason(f"the jobs at work hold as much time ({what} times minutes left) as {whose} allows {whom}")
    if "min" in rest or what == "time":
        says = f"the time ({what} times minutes) that {whose} allows {whom} is used up"
        return Reason(says, (_ANEW + "another cluster.account or hardware.qos, or wait until the site gives more",))
    return Reason(f"{whose} allows {whom} no more {what} at a time: it starts when other jobs end")
