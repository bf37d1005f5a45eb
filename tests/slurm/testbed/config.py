"""The configuration files of a test bed's cluster."""

from __future__ import annotations

import os
from pathlib import Path

from tests.slurm.testbed import clocks
from tests.slurm.testbed.enter import daemon_host
from tests.slurm.testbed.spec import CPUS_PER_NODE, GPUS_PER_NODE, HOST_RELEASE, NODES, Spec

# Nothing may listen beyond loopback: the two No…InAddrAny make slurmctld and the others bind the
# address they are known by, and every address below is 127.0.0.1.
_MAIN = """\
ClusterName={cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={munge_socket}
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldLogFile={log}/slurmctld.log
SlurmdLogFile={log}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
StateSaveLocation={spool}/ctld
SlurmdSpoolDir={spool}/%n
MailProg={mail}
MpiDefault=none
# Virtual nodes on one host: no cgroups (but see the variant `cgroups`), and the sizes below instead of the host's own.
ProctrackType=proctrack/linuxproc
{task}JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency={accounting_every_s}
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
# Quick, for tests: real sites have KillWait=30 and think for seconds before they start a job.
KillWait=6
SlurmdTimeout=60
EpilogMsgTime=0
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue={requeue}
MaxArraySize={max_array}
MaxJobCount={max_jobs}
{accounting}
{extra}{prolog}GresTypes=gpu
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} \
RealMemory=8000 Gres=gpu:a100:{gpus} State=UNKNOWN
PartitionName=DEFAULT Nodes={nodes} State=UP DefaultTime=01:00:00 MaxTime=1-00:00:00 \
PreemptMode=OFF OverSubscribe=NO
PartitionName=main Default=YES PriorityTier=10
PartitionName=high PriorityTier=20
PartitionName=short PriorityTier=10 DefaultTime=00:05:00 MaxTime=00:10:00
PartitionName=preempt PriorityTier=1 PreemptMode={preempt_mode} GraceTime=20
PartitionName=preempt0 PriorityTier=1 PreemptMode={preempt_mode} GraceTime=0
"""

_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={munge_socket}
AccountingStorageTRES=gres/gpu"""

_SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd_port}
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile={run}/slurmdbd.pid
LogFile={log}/slurmdbd.log
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
"""


def _accounting(spec: Spec) -> str:
    if not spec.accounting:
        return "AccountingStorageType=accounting_storage/none"
    text = _ACCOUNTING.format(dbd_port=spec.dbd_port, munge_socket=spec.munge_socket)
    if spec.variant == "smallarray":
        # Without this a QOS's MaxSubmitJobs is recorded but never applied.
        text += "\nAccountingStorageEnforce=limits,qos"
    return text


def _extra(spec: Spec) -> str:
    """What one variant has besides."""
    if spec.variant == "usersignal":
        # 23.02 gave the switch another place.
        key = "SlurmctldParameters=preempt_" if spec.release == HOST_RELEASE else "PreemptParameters="
        return f"{key}send_user_signal\n"
    lines = {
        # A site's own codes, which are ours by accident: 75 is "saved, requeued", 76 "no progress".
        "requeueexit": "RequeueExit=75,76\n",
        # There are no cgroups here: Slurm adds up a step's memory every second and ends it above its share.
        "memorylimit": "JobAcctGatherParams=OverMemoryKill\n",
        # A control group (version 1) bounds a step's memory: the kernel kills it, and Slurm says OUT_OF_MEMORY.
        "cgroups": "TaskPlugin=task/cgroup\n",
        # Slurm binds each task to cores. Its nodes have the host's own ones, and no more.
        "affinity": "TaskPlugin=task/affinity\n",
    }
    return lines.get(spec.variant, "")


def mail_program(spec: Spec) -> Path:
    """Slurm's MailProg: it starts the program that a test puts beside it, with `.test` at the end of its name."""
    return spec.conf.parent / "mail"


def slurm_conf(spec: Spec) -> str:
    """The text of slurm.conf."""
    return _MAIN.format(
        cluster=spec.cluster_name,
        host=daemon_host(),
        ctld_port=spec.ctld_port,
        munge_socket=spec.munge_socket,
        run=spec.run,
        log=spec.log,
        mail=mail_program(spec),
        spool=spec.spool,
        requeue=0 if spec.variant == "norequeue" else 1,
        max_array={"smallarray": 21, "large": 20_001}.get(spec.variant, 1001),
        max_jobs=50_000 if spec.variant == "large" else 10_000,
        accounting=_accounting(spec),
        accounting_every_s=1 if spec.variant == "memorylimit" else 10,
        task="" if spec.variant in ("cgroups", "affinity") else "TaskPlugin=task/none\n",
        extra=_extra(spec),
        prolog=f"TaskProlog={clocks.prolog(spec)}\n" if clocks.wanted(spec) else "",
        nodes=f"n[1-{len(NODES)}]",
        first=spec.node_ports[0],
        last=spec.node_ports[-1],
        cpus=len(os.sched_getaffinity(0)) if spec.variant == "affinity" else CPUS_PER_NODE,
        gpus=GPUS_PER_NODE,
        preempt_mode="CANCEL" if spec.variant == "cancel" else "REQUEUE",
    )


def slurmdbd_conf(spec: Spec) -> str:
    """The text of slurmdbd.conf (no password: the database's socket lies where only root is)."""
    return _SLURMDBD.format(
        munge_socket=spec.munge_socket,
        host=daemon_host(),
        dbd_port=spec.dbd_port,
        run=spec.run,
        log=spec.log,
    )


def gres_conf(spec: Spec) -> str:
    """The text of gres.conf.

    With a bare Count slurmd finds fewer GPUs than configured and the node is drained; with File
    it also sets CUDA_VISIBLE_DEVICES, as on a real node.
    """
    files = f"{spec.folder}/dev/gpu[0-{GPUS_PER_NODE - 1}]"
    return f"AutoDetect=off\nNodeName=n[1-{len(NODES)}] Name=gpu Type=a100 File={files}\n"


def cgroup_conf(spec: Spec) -> str:
    """The text of cgroup.conf: newer releases look for cgroup v2 even when nothing uses it."""
    if spec.variant == "cgroups":
        return "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"
    return "" if spec.release == HOST_RELEASE else "CgroupPlugin=disabled\n"


def write_all(spec: Spec) -> None:
    """Write every configuration file."""
    etc = spec.conf.parent
    for name, text in (
        ("slurm.conf", slurm_conf(spec)),
        ("gres.conf", gres_conf(spec)),
        ("cgroup.conf", cgroup_conf(spec)),
    ):
        (etc / name).write_text(text)
    mail_program(spec).write_text('#!/bin/sh\nif [ -x "$0.test" ]; then exec "$0.test" "$@"; fi\n')
    mail_program(spec).chmod(0o755)
    if spec.accounting:
        path = etc / "slurmdbd.conf"
        path.touch(mode=0o600)  # slurmdbd refuses a file that others may read
        path.write_text(slurmdbd_conf(spec))
    if clocks.wanted(spec):
        clocks.write(spec)
