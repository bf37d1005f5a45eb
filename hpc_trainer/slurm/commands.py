"""Slurm commands: bounded in time, in the C locale, with errors that say what was asked and answered.

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
from subprocess import CompletedProcess

from hpc_trainer.errors import MissingCommandError, RefusedError, SilentError, SlurmError, UnclearError


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
                f"{argv[0]} finds no Slurm controller: this host is none of a cluster's, or its slurm.conf cannot be "
                "read. cluster=local runs on this machine.",
                said,
            )
        raise kind(f"{' '.join(argv[:2])} failed ({done.returncode}): {said}", said)
    return done.stdout


def call(argv: Sequence[str], text: str, environ: Mapping[str, str], timeout_s: float) -> CompletedProcess[str]:
    """Run a command with `text` on standard input and return its output and exit code, whatever they are.

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

    A surrounding job's SLURM_* and SBATCH_* would change what sbatch submits, and sbatch hands the rest on to the new
    job (--export=ALL). Variables that name the cluster and the user's identity there stay. Paths to the copy of the
    frozen code on this node's disk are removed: on another node such a path is free, and another user could put
    modules there.
    """
    copies = _frozen_copies()
    is_inside = any(key in os.environ for key in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"))
    kept = {
        key: value
        for key, value in os.environ.items()
        if not ((key.startswith(_OF_LAUNCHERS) and key not in _SITE) or (is_inside and key in _OF_ANOTHER_JOB))
    }
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
    """Parse `scontrol -o show nodes`: NodeHostName by NodeName (scontrol(1)); lines without both are skipped."""
    return dict(re.findall(r"^NodeName=(\S+) .*?\bNodeHostName=(\S+)", text, re.MULTILINE))
