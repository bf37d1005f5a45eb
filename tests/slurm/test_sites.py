"""Each shipped profile on a Slurm that has the partitions, GPUs, features and limits of its site."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_trainer import api
from hpc_trainer.hardware.check import find_shipped
from hpc_trainer.hardware.profiles import read_profiles
from hpc_trainer.slurm.inventory import read_inventory
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.sites import SITES, PlayedSites
from tests.slurm.testbed.spec import BedError, base_folder

OFTEN = ("mila/mila",)
"""The site that is played with each `make test`; the others are long."""
PROFILES = {profile.name: profile for profile in read_profiles() if profile.cluster is not None}
GRID = ("experiment=digits", "model=mlp", "snapshot=off", "seed=0,1")


@pytest.fixture(scope="module")
def sites() -> Iterator[PlayedSites]:
    if os.getuid() != 0:
        pytest.skip("the test bed's daemons need root")
    try:
        played = PlayedSites(base_folder() / f"sites-{os.getpid()}")
    except BedError as error:
        pytest.skip(str(error))
    try:
        yield played
    finally:
        played.close()


def test_every_cluster_of_a_profile_is_played() -> None:
    assert {profile.cluster for profile in PROFILES.values()} == set(SITES)


@pytest.fixture
def at(sites: PlayedSites, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], SlurmCluster]:
    """Put this process on the login node of a site. No process is started for each command: that takes a second."""

    def enter(site: str) -> SlurmCluster:
        slurm = sites.play(site)
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, slurm.env[name])
        monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.chdir(tmp_path)
        return slurm

    return enter


@pytest.mark.parametrize(
    "site", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.long) for name in SITES]
)
def test_a_small_grid_is_planned_and_accepted(at: Callable[[str], SlurmCluster], site: str) -> None:
    slurm = at(site)
    for name, profile in PROFILES.items():
        if profile.cluster != site:
            continue
        words = (*GRID, f"hardware={name}", f"sweep_name={profile.path.stem}")
        planned = api.plan(*words)
        assert (planned.problems, planned.notes) == ((), ()), "the site's facts, or Slurm, refuse its own profile"
        assert [start is not None for start in planned.starts] == [True], "sbatch --test-only tells a start"
        api.submit(*words)
        queue = slurm.run("squeue", "-h", "-r", "-o", "%P %l %D %T").stdout.splitlines()
        assert len(queue) == 2
        assert {line.split()[3] for line in queue} <= {"PENDING", "CONFIGURING"}
        assert profile["partition"] in (None, queue[0].split()[0])
        slurm.run("scancel", *slurm.run("squeue", "-h", "-o", "%A").stdout.split())
        slurm.wait_for(lambda: not slurm.run("squeue", "-h").stdout, 30, "an empty queue")


@pytest.mark.long
def test_what_a_site_lacks_is_told_with_the_nearest_it_has(at: Callable[[str], SlurmCluster]) -> None:
    at("nersc/perlmutter")
    for word, message in (
        ("hardware.constraint='gpu&hbm81g'", "Did you mean hbm80g?"),
        ("hardware.gpus_per_node=8", "must be at most 4"),
        ("hardware.partition=gpu_ss12", "Did you mean gpu_ss11?"),
        ("hardware.time_limit_min=4000", "must be at most 2880"),
    ):
        (problem,) = api.plan(*GRID, "hardware=nersc/perlmutter_x4", word).problems
        assert message in problem


@pytest.mark.long
@pytest.mark.parametrize("site", ["cscs/clariden", "idris/jean_zay", "tacc/horizon", "tacc/vista"])
def test_discover_recognises_a_site_whose_name_nobody_confirms(at: Callable[[str], SlurmCluster], site: str) -> None:
    """The played Slurm has a ClusterName of its own."""
    at(site)
    found = find_shipped(read_inventory(), [])
    assert {profile.name: profile.is_fit for profile in found} == {
        name: True for name, profile in PROFILES.items() if profile.cluster == site
    }
