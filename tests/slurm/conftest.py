"""Fixtures: a real Slurm for the session, tidied after every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).resolve().parent
if str(_HERE.parents[1]) not in sys.path:  # plain "pytest" does not put the project's folder there
    sys.path.insert(0, str(_HERE.parents[1]))

from tests.slurm.scenarios.sample import VARIABLE, chosen  # noqa: E402
from tests.slurm.scenarios.table import ids  # noqa: E402
from tests.slurm.testbed import bed  # noqa: E402
from tests.slurm.testbed.cluster import SlurmCluster  # noqa: E402
from tests.slurm.testbed.spec import BedError, PackagesMissingError, SharedFolder, Spec  # noqa: E402

SHARED = "HPC_TRAINER_SHARED_FOLDER"
"""Variable with the kind of file system on which every test of this folder keeps its runs: nfs3, lustre, …"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a real Slurm, and may take long where the machine has other work."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.slurm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))


def pytest_report_header() -> str:
    """Which scenarios are not marked long in this session."""
    return f"scenarios: {', '.join(chosen(ids()))} (others: {VARIABLE}=all, or names)"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of scenarios that were played."""
    rows = []
    for outcome in ("passed", "failed", "xfailed", "xpassed", "error"):
        for report in terminalreporter.getreports(outcome):
            values = dict(getattr(report, "user_properties", []))
            if "scenario" in values and report.when == "call":
                name, hardware, release, causes = values["scenario"]
                rows.append(f"| {name} | {hardware} | {release} | {outcome} | {values['seconds']} | {causes} |")
    if rows:
        terminalreporter.section("scenarios")
        terminalreporter.write_line("| scenario | hardware | Slurm | outcome | seconds | causes |")
        terminalreporter.write_line("|---|---|---|---|---|---|")
        for row in sorted(rows):
            terminalreporter.write_line(row)


def _refuse(reason: str) -> None:
    if os.environ.get("HPC_TRAINER_REQUIRE_SLURM") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Beds:
    """The clusters that this session uses."""

    def __init__(self) -> None:
        self.clusters: dict[Spec, SlurmCluster] = {}
        self._started: list[Spec] = []

    def get(self, variant: str = "", share: SharedFolder | None = None) -> SlurmCluster:
        """Return a cluster of the release that the variable SLURM names; bring it up if need be.

        Clusters with a shared folder of another kind end first: they take the same ports.
        """
        if share is None and os.environ.get(SHARED):
            share = SharedFolder(os.environ[SHARED])
        spec = Spec(variant=variant, share=share)
        if spec not in self.clusters:
            for other in [other for other in self.clusters if share and other.share not in (None, share)]:
                self._end(other)
            try:
                if bed.up(spec, lambda text: print(text, file=sys.stderr)):
                    self._started.append(spec)
            except PackagesMissingError as error:
                _refuse(str(error))
            except BedError as error:
                if os.getuid() != 0:
                    _refuse(str(error))
                raise
            self.clusters[spec] = SlurmCluster.attach(spec)
        return self.clusters[spec]

    def _end(self, spec: Spec) -> None:
        del self.clusters[spec]
        if spec in self._started:
            self._started.remove(spec)
            bed.down(spec)

    def close(self) -> None:
        """Take down what this session brought up, and nothing else."""
        for spec in list(self.clusters):
            self._end(spec)


@pytest.fixture(scope="session")
def slurm_beds() -> Iterator[Beds]:
    beds = Beds()
    try:
        yield beds
    finally:
        beds.close()


@pytest.fixture(scope="session")
def slurm(slurm_beds: Beds) -> SlurmCluster:
    """The plain cluster."""
    return slurm_beds.get()


@pytest.fixture(scope="session")
def slurm_variant(slurm_beds: Beds) -> Callable[[str], SlurmCluster]:
    """A cluster by variant: noaccounting, norequeue, cancel, smallarray, usersignal, …"""
    return slurm_beds.get


@pytest.fixture(autouse=True)
def _tidy_clusters(slurm_beds: Beds) -> Iterator[None]:
    yield
    for cluster in slurm_beds.clusters.values():
        cluster.tidy()
