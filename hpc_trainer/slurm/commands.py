"""Slurm commands: bounded in time, in the C locale, with errors that state request and answer; and sbatch.

The cluster that answers here, the host names of its nodes and the name of the user are found here too.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from hpc_trainer.config.environment import IMAGE_FACTS, STAGE_KEY, STAGED
from hpc_trainer.errors import MissingCommandError, NoRoomError, RefusedError, SilentError, SlurmError, UnclearError


def user_name() -> str:
    """Return the name of the user who runs this process; the user id if there is no name."""
    # Not getpass.getuser(): it trusts $LOGNAME, which is wrong after sudo and in containers.
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


# Under load slurmctld takes up to its MessageTimeout (10 s by default) to answer, and clients retry once.
DEFAULT_TIMEOUT_S = 60.0

# Variables of a surrounding job, step or torchrun; sbatch and our workers obey them.
_OF_LAUNCHERS = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "PMI_", "PMIX_")

# On a login node these are the user's; inside a job or torchrun they are that job's devices and ranks.
_OF_ANOTHER_JOB = (
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL",
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip

# The user's own filters and formats (SQUEUE_STATES, SCANCEL_NAME, ..): with them an answer would lack jobs.
_OF_A_PERSON = ("SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_", "SCONTROL_")
_FROZEN_CODE = "HPC_TRAINER_FROZEN_CODE"  # runtime/start.py, a layer above
_BY_TORCHRUN = "HPC_TRAINER_BY_TORCHRUN"  # runtime/rank_env.py
# What a job's script sets for its ranks (config/environment.py).
_OF_A_START = (STAGE_KEY, IMAGE_FACTS, STAGED, _BY_TORCHRUN)
_SITE = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
LOST = re.compile(
    r"timed out|Zero Bytes|Unable to contact slurm controller(?! \(connect)|(send|receive) failure|Communication"
    r"|Unexpected message|Transport endpoint|Connection reset|Broken pipe",
    re.IGNORECASE,
)
"""Pattern of a command's error when a request was sent and its answer was lost (slurm_errno.c, communication errors).

The controller may have carried out the request. "(connect failure)" does not match: nothing was sent."""
_NOBODY = re.compile("Unable to contact", re.IGNORECASE)
_NO_CLUSTER = "Could not establish a configuration source"
"""Text that Slurm's commands print, after three other lines, on a host without a cluster's configuration."""


def has_slurm() -> bool:
    """Return True if sbatch is on PATH."""
    return shutil.which("sbatch") is not None


def run_slurm(argv: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, script: str | None = None) -> str:
    """Run a Slurm command and return its standard output.

    Args:
        script: lines for a command that reads many requests from standard input (scontrol, sacctmgr). A request that
            fails does not fail the others, so the exit code is ignored if the command printed anything.

    Raises:
        MissingCommandError: the command is not on PATH.
        SilentError: the command took longer than `timeout_s` seconds, could not be started, or did not reach the
            controller.
        UnclearError: the command was killed.
        RefusedError: the command's exit code is not 0.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_OF_A_PERSON)}
    environ = {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}  # lists of elements whole
    try:
        done = call(argv, script or "", environ, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise SilentError(f"{argv[0]} did not answer within {timeout_s:g} s.") from error
    if done.returncode and (script is None or not done.stdout):
        said = done.stderr.strip()
        is_silent = LOST.search(said) or _NOBODY.search(said)
        kind = SilentError if is_silent else UnclearError if done.returncode < 0 else RefusedError
        if _NO_CLUSTER in said:
            raise SilentError(
                f"{argv[0]} finds no Slurm controller: this host belongs to no cluster, or its slurm.conf cannot be "
                "read. cluster=local runs on this machine.",
                said,
            )
        raise kind(f"{' '.join(argv[:2])} failed ({done.returncode}): {said}", said)
    return done.stdout


def call(argv: Sequence[str], text: str, environ: Mapping[str, str], timeout_s: float) -> CompletedProcess[str]:
    """Run a command with `text` on standard input and return its output and exit code; no exit code is an error.

    Raises:
        MissingCommandError: the command is not on PATH.
        SilentError: the command could not be started.
        TimeoutExpired: the command took longer than `timeout_s` seconds and was killed.
    """
    try:
        return subprocess.run(
            list(argv), input=text, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=environ,
            check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise MissingCommandError(
            f"{argv[0]} is not on PATH. Is this a Slurm login node? cluster=local runs on this machine."
        ) from error
    except OSError as error:
        raise SilentError(f"{argv[0]} could not be started: {error}") from error


def submit_environment() -> dict[str, str]:
    """Return the environment without the variables of a surrounding job.

    A surrounding job's SLURM_* and SBATCH_* would change what sbatch submits, and sbatch passes the other variables to
    the new job (--export=ALL). Variables that name the cluster and the user's identity there stay. Paths to the copy of
    the frozen code on this node's disk are removed: on another node such a path is free, and another user could put
    modules there.
    """
    copies = _frozen_copies()
    is_inside = any(key in os.environ for key in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"))
    kept = {
        key: value
        for key, value in os.environ.items()
        if not (
            (key.startswith(_OF_LAUNCHERS) and key not in _SITE)
            or (is_inside and key in _OF_ANOTHER_JOB)
            or key in _OF_A_START
        )
    }
    if STAGED in os.environ:  # as with frozen code: on another node the place of this copy is free
        copy = os.environ[STAGED]
        entries = [entry for entry in kept.get("PATH", "").split(os.pathsep) if not f"{entry}/".startswith(f"{copy}/")]
        kept = {key: value for key, value in kept.items() if not f"{value}/".startswith(f"{copy}/")}
        kept["PATH"] = os.pathsep.join(entries)
    if copies:
        del kept[_FROZEN_CODE]
        path = [entry for entry in kept.pop("PYTHONPATH", "").split(os.pathsep) if entry]
        path = [entry for entry in path if not f"{entry}/".startswith(copies)]
        kept |= {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    return kept


def _frozen_copies() -> tuple[str, ...]:
    """Return the folders of the frozen code that this process imports, each with a slash at its end."""
    try:
        copies = json.loads(os.environ.get(_FROZEN_CODE, "{}"))
    except ValueError:
        return ()
    return tuple(f"{folder}/" for folder in copies.values()) if isinstance(copies, dict) else ()


def cluster_name() -> str:
    """Return the name of the cluster that answers here (ClusterName).

    Raises:
        SlurmError: scontrol does not answer, or prints no name.
    """
    try:
        name = parse_cluster_name(run_slurm(["scontrol", "show", "config"], timeout_s=15.0))
    except SlurmError as error:
        raise type(error)(f"scontrol does not say which cluster this is ({error})", error.said) from error
    if name is None:
        raise UnclearError("scontrol does not say which cluster this is (no ClusterName)")
    return name


def parse_cluster_name(config: str) -> str | None:
    """Return ClusterName from the output of `scontrol show config`; None if it is missing."""
    match = re.search(r"^ClusterName\s*= (\S+)\s*$", config, re.MULTILINE)
    return match[1] if match else None


def node_hosts() -> dict[str, str]:
    """Return the host name of each node that this user may see, by node name.

    Raises:
        SlurmError: scontrol does not answer.
    """
    return parse_node_hosts(run_slurm(["scontrol", "-o", "show", "nodes"], timeout_s=15.0))


def parse_node_hosts(text: str) -> dict[str, str]:
    """Return NodeHostName by NodeName of `scontrol -o show nodes` (scontrol(1)); lines without both are skipped."""
    return {node.name: node.host for node in parse_nodes(text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """Facts that the controller reports about itself (scontrol show config); None: not reported."""

    cluster: str | None
    version: tuple[int, int] | None
    """Release, as (22, 5)."""
    clock: float | None
    """Time of its clock when it answered, in seconds since 1970."""
    propagated_limits: frozenset[str]
    """Limits of the submitting shell that jobs get, as setrlimit(2) names them without RLIMIT_; `ALL` for all."""
    kept_limits: frozenset[str]
    """Limits that jobs do not get from the shell, whatever `propagated_limits` says."""
    said: str = ""
    """Slurm's answer, unchanged."""


def read_controller(timeout_s: float = 15.0) -> Controller:
    """Ask the controller for its release, clock and rules.

    Raises:
        SlurmError: scontrol does not answer.
    """
    return parse_controller(run_slurm(["scontrol", "show", "config"], timeout_s=timeout_s))


def parse_controller(text: str) -> Controller:
    """Parse `scontrol show config`, whose first line has the time at which the controller answered."""
    values = dict(re.findall(r"^(\w+) *= (.*?) *$", text, re.MULTILINE))
    version = re.match(r"(\d+)\.(\d+)", values.get("SLURM_VERSION", ""))
    clock = re.search(r"^Configuration data as of (\d+)$", text, re.MULTILINE)
    propagated, kept = (
        frozenset(values.get(key, "").replace("(null)", "").upper().split(","))
        for key in ("PropagateResourceLimits", "PropagateResourceLimitsExcept")
    )
    return Controller(
        cluster=parse_cluster_name(text),
        version=(int(version[1]), int(version[2])) if version else None,
        clock=float(clock[1]) if clock else None,
        propagated_limits=propagated - {"", "NONE"},
        kept_limits=kept - {""},
        said=text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node (scontrol show nodes)."""

    name: str
    host: str
    architecture: str | None
    """Architecture that `uname -m` prints on the node; None if the node has never reported."""
    has_gpus: bool
    usable_cpus: int | None = None
    """CPUs that jobs can get (CPUEfctv), without those that the site keeps for itself; None in older releases."""
    kept_memory_mb: int = 0
    """Memory that the site keeps for itself (MemSpecLimit)."""


def read_nodes(timeout_s: float = 15.0) -> list[Node]:
    """Return the nodes that this user may see.

    Raises:
        SlurmError: scontrol does not answer.
    """
    return parse_nodes(run_slurm(["scontrol", "-o", "show", "nodes"], timeout_s=timeout_s))


def parse_nodes(text: str) -> list[Node]:
    """Parse `scontrol -o show nodes`; lines without a host name are skipped."""
    nodes = []
    for line in text.splitlines():
        values = dict(re.findall(r"\b(NodeName|NodeHostName|Arch|Gres|CPUEfctv|MemSpecLimit)=(\S+)", line))
        usable, kept = values.get("CPUEfctv", ""), values.get("MemSpecLimit", "")
        if {"NodeName", "NodeHostName"} <= values.keys():
            nodes.append(
                Node(
                    name=values["NodeName"],
                    host=values["NodeHostName"],
                    architecture=values.get("Arch"),
                    has_gpus=re.search(r"\bgpu:", values.get("Gres", "")) is not None,
                    usable_cpus=int(usable) if usable.isdecimal() and int(usable) else None,
                    kept_memory_mb=int(kept) if kept.isdecimal() else 0,
                )
            )
    return nodes


# Calls of sbatch: submit a batch script, or ask whether and when it could start. The answer decides the error.

# sbatch itself retries a busy controller for minutes; a user does not wait that long.
TIMEOUT_S = 90.0

# sbatch's messages when the controller refused (followed by the text of slurm_errno.c), and its own refusals before it
# asks. Every other failure may come after the job was accepted: a site's wrapper, a kill, a new release.
_REFUSED = re.compile(
    r"Batch job submission failed: .*(?:invalid|requested|not permitted|not available|not allowed|not usable|denied"
    r"|violates|exceed|disabled|too (?:long|many|large|big)|not specified|no such|problem|unspecified error|is not"
    r"|must be|required|specification|expired|in use|can ?not be|\(connect failure\))"
    r"|error: (?:Invalid|Unable to open|unrecognized|Unable to resolve|Script arguments|.* is not a valid)"
    r"|error: (?:QOS|Assoc)[A-Z]\w+"
    r"|fatal: |(?:unrecognized|invalid|ambiguous) option|option .* requires an argument"
    r"|This does not look like a batch script",
    re.IGNORECASE,
)

# A shell's exit codes for a program that was killed (128 + signal), could not be run, or is missing.
_SHELLS_CODES = range(126, 255)

# Reasons of acct_policy.c: a limit on the number of submitted jobs passes with time, the others never do for this job.
_REASON = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")
_SUBMIT_REASON = re.compile(r"\b(?:QOS|Assoc)(?:Max|Grp)Submit")

# slurmctld's own limit, and its general messages without a reason.
_FULL = re.compile(
    r"temporarily unable to accept job|job queue full|Resource temporarily unavailable|job submit limit", re.IGNORECASE
)

# --test-only prints these for drained or powered-down nodes too; sbatch itself would accept the job and wait (22.05).
_OF_NODES = re.compile(
    r"node configuration is not available|nodes are busy|Required nodes? not available", re.IGNORECASE
)


def submit_script(script: Path, *, options: Sequence[str] = (), timeout_s: float = TIMEOUT_S) -> str:
    """Submit a batch script with one sbatch call and return the job id.

    Args:
        options: further command-line options, for example `--begin=now+60`.

    Raises:
        NoRoomError: a submit limit is reached.
        RefusedError: Slurm refused with a known message.
        MissingCommandError: sbatch is not on PATH.
        SilentError, UnclearError: any other failure. The scheduler may have the job.
    """
    code, output, said = _run(["sbatch", *options, str(script)], "", timeout_s)
    message = _error_text(said)
    # The text after the number shows that the number is complete; in a truncated answer it would be another job's id.
    match = re.search(r"Submitted batch job (\d+)\s", output) or re.fullmatch(r"\s*(\d+)(?:;\S+)?\s*\n\s*", output)
    if match:  # whatever happened to sbatch afterwards: it prints this when the controller has accepted the job
        return match[1]
    if code == 0:
        raise UnclearError(
            f"the answer of sbatch cannot be read: {output.strip()[:300] or message or 'nothing'!r}. {_AGAIN}"
        )
    if code is None or code < 0 or LOST.search(message):
        raise SilentError(f"sbatch did not hear from the controller: {message or 'no answer'}. {_AGAIN}")
    if code not in _SHELLS_CODES and _has_no_room(message):
        raise NoRoomError(f"no room for more jobs: {message}", message)
    if code in _SHELLS_CODES or not _REFUSED.search(said):
        raise UnclearError(
            f"sbatch ended with code {code} and no known refusal of Slurm: {message or 'no message'}. {_AGAIN}"
        )
    raise RefusedError(
        f"sbatch did not accept the job: {message}. Nothing of this array was submitted. (Without a working Slurm "
        "here, cluster=local runs on this machine.)",
        message,
    )


_AGAIN = (
    "The controller may have the job all the same: run the same command again in a minute; it asks Slurm first and "
    "submits only what is missing."
)


def estimate_start(text: str, options: Sequence[str] = ()) -> str | None:
    """Ask Slurm whether and when a script could start; submit nothing.

    Args:
        options: further command-line options, for example `--exclude=n1`; they override the script's options.

    Returns:
        The start, in local time as Slurm prints it; None if Slurm names no start.

    Raises:
        NoRoomError: a submit limit is reached; the job itself may be fine.
        RefusedError: Slurm would refuse the job; the error has Slurm's own message.
        MissingCommandError, SilentError: Slurm gives no answer.
    """
    code, output, errors = _run(["sbatch", "--test-only", *options], text, timeout_s=30.0)
    message = _error_text(errors)
    if code == 0:
        start = re.search(r"to start at (\S+)", f"{output}\n{message}")
        return start[1] if start else None
    if code is None or code < 0 or LOST.search(message):
        raise SilentError(f"sbatch --test-only did not answer: {message}")
    if _has_no_room(message):
        raise NoRoomError(message, message)
    raise RefusedError(message, message)


def is_of_nodes(refusal: RefusedError) -> bool:
    """Return True if `estimate_start` was refused because of the nodes' present state, not the job's request."""
    return bool(_OF_NODES.search(refusal.said))


def _has_no_room(message: str) -> bool:
    reasons = _REASON.findall(message)
    return bool(_SUBMIT_REASON.search(message)) if reasons else bool(_FULL.search(message))


def _run(argv: list[str], text: str, timeout_s: float) -> tuple[int | None, str, str]:
    """Return (exit code or None after `timeout_s`, standard output, standard error)."""
    try:
        done = call(argv, text, {**submit_environment(), "LC_ALL": "C"}, timeout_s)
    except subprocess.TimeoutExpired as error:
        said = bytes(error.stderr or b"").decode(errors="replace")  # bytes also in text mode (CPython issue 87597)
        return None, bytes(error.stdout or b"").decode(errors="replace"), f"{said} (no answer within {timeout_s:g} s)"
    return done.returncode, done.stdout, done.stderr


def _error_text(text: str) -> str:
    """Join sbatch's error lines without their prefix; use all lines if none is marked as an error."""
    marked = [line for line in text.splitlines() if "error:" in line or "failure" in line]
    lines = (re.sub(r"^.*?error:\s*", "", line).strip() for line in marked or text.splitlines())
    return "; ".join(dict.fromkeys(filter(None, lines)))


def megabytes(gigabytes: float) -> int:
    """Return an amount of memory as sbatch takes it, in whole MB."""
    return round(gigabytes * 1024)
