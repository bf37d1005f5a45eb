"""A controller that plays the sites of shipped profiles: their partitions, GPUs, cores, memory, features and limits.

Only slurmctld runs. It takes or refuses a job by its configuration alone, and holds it: no node ever answers. What it
is told here are the sites' facts where documents tell them (conf/ names the sources), and not what a profile asks.
Names of partitions (Perlmutter, the Alliance, MareNostrum), memory (JSC, MareNostrum, Sherlock, Jean Zay) and several
limits are stand-ins: there an accepted job shows that Slurm takes the options, not that the figures are right.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.testbed import bed, chroot, config, daemons
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.enter import daemon_host
from tests.slurm.testbed.processes import daemons as living_daemons
from tests.slurm.testbed.processes import end
from tests.slurm.testbed.spec import Spec


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a site."""

    name: str
    count: int
    cpus: int
    memory_mb: int
    gres: str = ""
    features: str = ""


@dataclass(frozen=True)
class Site:
    """`partitions`: name, groups of nodes, limit, and further options; the first one is the default."""

    nodes: tuple[Nodes, ...]
    partitions: tuple[tuple[str, str, str, str], ...]


DAY, TWO_DAYS, WEEK = "1-00:00:00", "2-00:00:00", "7-00:00:00"


def _one(count: int, cpus: int, memory_mb: int, gres: str, partition: str, limit: str, more: str = "") -> Site:
    return Site((Nodes("n", count, cpus, memory_mb, gres),), ((partition, "n", limit, more),))


SITES: dict[str, Site] = {
    "nersc/perlmutter": Site(
        (
            Nodes("a", 8, 128, 256_000, "gpu:4", "gpu,a100,hbm40g"),
            Nodes("b", 4, 128, 256_000, "gpu:4", "gpu,a100,hbm80g"),
        ),
        (("gpu_ss11", "a,b", TWO_DAYS, ""),),
    ),
    "olcf/frontier": Site(
        (Nodes("n", 200, 56, 512_000, "gpu:8", "nvme"),),
        (("batch", "n", "12:00:00", ""), ("extended", "n", DAY, "MaxNodes=64")),
    ),
    "csc/lumi": Site(
        (Nodes("n", 8, 56, 512_000, "gpu:8"),),
        (("standard-g", "n", TWO_DAYS, "OverSubscribe=EXCLUSIVE"), ("dev-g", "n", "03:00:00", "MaxNodes=32")),
    ),
    "csc/lumi_shared": Site(
        (Nodes("n", 8, 56, 512_000, "gpu:8"),),
        (("dev-g", "n", "03:00:00", "MaxNodes=32"), ("small-g", "n", "3-00:00:00", "MaxNodes=4")),
    ),
    "csc/roihu": Site(
        (Nodes("n", 8, 288, 868 * 1024, "gpu:gh200:4"),),
        (("gputest", "n", "00:15:00", "MaxNodes=2"), ("gpumedium", "n", "1-12:00:00", "MaxNodes=4")),
    ),
    "cscs/clariden": Site(
        (Nodes("n", 8, 288, 460_000, "gpu:4"),),
        (
            ("debug", "n", "01:30:00", "MaxNodes=4 OverSubscribe=EXCLUSIVE"),
            ("normal", "n", "12:00:00", "OverSubscribe=EXCLUSIVE"),
        ),
    ),
    "jsc/jupiter": _one(8, 288, 480_000, "gpu:4", "booster", DAY, "OverSubscribe=EXCLUSIVE"),
    "jsc/juwels_booster": _one(8, 48, 512_000, "gpu:4", "booster", DAY, "OverSubscribe=EXCLUSIVE"),
    "cineca/leonardo": _one(8, 32, 512_000, "gpu:4", "boost_usr_prod", DAY),
    "bsc/marenostrum5": _one(8, 80, 512_000, "gpu:4", "acc", "3-00:00:00"),
    "idris/jean_zay": Site(
        (
            Nodes("v", 8, 40, 160_000, "gpu:4", "v100,v100-32g"), Nodes("o", 4, 24, 360_000, "gpu:8", "v100,v100-32g"),
            Nodes("a", 4, 64, 512_000, "gpu:8", "a100"), Nodes("h", 4, 96, 512_000, "gpu:4", "h100"),
        ),
        (("gpu_p13", "v,a,h", "4-04:00:00", ""), ("gpu_p2", "o", "4-04:00:00", "")),
    ),
    "ncsa/delta": Site(
        (Nodes("a", 8, 64, 256_000, "gpu:a100:4"), Nodes("h", 4, 96, 2_048_000, "gpu:h200:8")),
        (
            ("gpuA100x4", "a", TWO_DAYS, ""), ("gpuA100x4-preempt", "a", TWO_DAYS, "PriorityTier=0 GraceTime=300"),
            ("gpuH200x8", "h", TWO_DAYS, "MaxNodes=1"),
        ),
    ),
    "mila/mila": Site(
        (
            Nodes("g", 8, 64, 1_024_000, "gpu:a100l:4", "ampere,nvlink,80gb"),
            Nodes("l", 8, 48, 1_024_000, "gpu:l40s:4", "lovelace,48gb"),
            Nodes("h", 2, 192, 2_048_000, "gpu:h100:8", "hopper,nvlink,80gb"),
        ),
        (
            ("main", "g,l", "5-00:00:00", ""), ("long", "g,l", WEEK, "PriorityTier=0"),
            ("short-unkillable", "g,l,h", "03:00:00", ""),
        ),
    ),
    "alliance/narval": _one(8, 48, 510_000, "gpu:a100:4", "gpubase", WEEK),
    "alliance/fir": _one(8, 48, 1_152_000, "gpu:h100:4", "gpubase", WEEK),
    "alliance/nibi": _one(8, 112, 2_048_000, "gpu:h100:8", "gpubase", WEEK),
    "alliance/rorqual": _one(8, 64, 510_000, "gpu:h100:4", "gpubase", WEEK),
    "alliance/trillium": _one(8, 96, 767_000, "gpu:h100:4", "compute", DAY),
    "alliance/killarney": Site(
        (Nodes("h", 4, 48, 2_048_000, "gpu:h100:8"), Nodes("l", 8, 64, 512_000, "gpu:l40s:4")),
        (("gpubase", "h,l", WEEK, ""),),
    ),
    "tacc/vista": Site(
        (Nodes("n", 8, 72, 116_000),),
        (("gh-dev", "n", "02:00:00", "MaxNodes=8"), ("gh", "n", TWO_DAYS, "MaxNodes=64")),
    ),
    "tacc/horizon": Site(
        (Nodes("n", 8, 72, 240_000),),
        (("gb-dev", "n", "02:00:00", "MaxNodes=16"), ("gb", "n", TWO_DAYS, "MaxNodes=128")),
    ),
    "kempner/kempner": Site(
        (
            Nodes("a", 8, 64, 1_024_000, "gpu:4", "gpu,a100,cc8.0"),
            Nodes("h", 8, 96, 1_536_000, "gpu:4", "gpu,h100,cc9.0"),
            Nodes("k", 8, 64, 1_536_000, "gpu:4", "gpu,h200,cc9.0"),
        ),
        (
            ("kempner", "a", TWO_DAYS, ""), ("kempner_h100", "h", TWO_DAYS, ""), ("kempner_h200", "k", TWO_DAYS, ""),
            ("kempner_requeue", "a,h,k", WEEK, "PriorityTier=0"),
        ),
    ),
    "surf/snellius": Site(
        (Nodes("a", 8, 72, 480 * 1024, "gpu:a100:4"), Nodes("h", 8, 64, 720 * 1024, "gpu:h100:4")),
        (("gpu_a100", "a", "5-00:00:00", ""), ("gpu_h100", "h", "5-00:00:00", "")),
    ),
    "stanford/sherlock": _one(8, 32, 256_000, "gpu:4", "gpu", TWO_DAYS),
}  # fmt: skip
"""Site by the name of its file in conf/cluster/."""


# Nodes of this machine, so that it is no mistake to keep runs in a temporary folder. Nothing listens at these ports.
_FIRST_PORT = 30_000
# Nodes that are said to be powered down count as usable, without a slurmd: a job that could start waits for them to
# boot, which they never do. PrivateData=cloud shows them.
_POWERED_DOWN = """\
EnforcePartLimits=ALL
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=60
ResumeTimeout=36000
PrivateData=cloud
"""


class PlayedSites:
    """One controller that becomes one site after the other: nothing but its configuration changes."""

    def __init__(self, folder: Path) -> None:
        self.spec = Spec(variant="noaccounting", folder=folder)
        daemons.require_packages(self.spec)
        if self.spec.chrooted:
            chroot.ensure_built(self.spec, print)
        bed._prepare(self.spec)
        if self.spec.chrooted:
            chroot.mount(self.spec)
        daemons.start_munged(self.spec)

    def play(self, name: str) -> SlurmCluster:
        """Start the controller anew as this site, with an empty queue."""
        self._stop_controller()
        (self.spec.conf.parent / "gres.conf").write_text("AutoDetect=off\n")
        self.spec.conf.write_text(slurm_conf(self.spec, SITES[name], name))
        shutil.rmtree(self.spec.spool / "ctld")
        (self.spec.spool / "ctld").mkdir()
        daemons.start_slurmctld(self.spec)
        return SlurmCluster.attach(self.spec)

    def _stop_controller(self) -> None:
        alive = living_daemons(self.spec)
        end([pid for name, pid in alive.items() if name == "slurmctld"], 20)

    def close(self) -> None:
        """End the controller and munged, and remove their folder."""
        bed.down(self.spec)


def slurm_conf(spec: Spec, site: Site, name: str) -> str:
    """The text of slurm.conf for a site: the test bed's own, with other nodes and partitions."""
    head = config.slurm_conf(spec).partition("NodeName=")[0]
    lines = [
        head.replace(f"ClusterName={spec.cluster_name}", f"ClusterName={name.rpartition('/')[2].replace('_', '')}")
    ]
    lines.append(_POWERED_DOWN)
    groups = {}
    port = _FIRST_PORT
    for nodes in site.nodes:
        groups[nodes.name] = f"{nodes.name}[1-{nodes.count}]"
        more = (f" Gres={nodes.gres}" if nodes.gres else "") + (f" Feature={nodes.features}" if nodes.features else "")
        lines.append(
            f"NodeName={groups[nodes.name]} NodeHostname={daemon_host()} NodeAddr=127.0.0.1 "
            f"Port=[{port}-{port + nodes.count - 1}] CPUs={nodes.cpus} "
            f"RealMemory={nodes.memory_mb}{more} State=CLOUD"
        )
        port += nodes.count
    for index, (partition, names, limit, more) in enumerate(site.partitions):
        hosts = ",".join(groups[each] for each in names.split(","))
        default = "YES" if index == 0 else "NO"
        lines.append(
            f"PartitionName={partition} Nodes={hosts} Default={default} MaxTime={limit} State=UP {more}".rstrip()
        )
    return "\n".join(lines) + "\n"
