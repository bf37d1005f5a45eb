"""Scenarios of tests/slurm/scenarios with the runs on a shared folder of each kind: the promises hold there too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import Beds
from tests.slurm.scenarios.checks import Reference, check_stays, wait_until_gone
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import all_scenarios
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import SharedFolder

_PLAYED = (
    ("preempted_with_grace", "testbed_x4"),
    ("one_array_element_requeued", "testbed_x1"),
    ("node_without_power", "testbed_x4"),
    ("preempted_without_grace_where_slurm_cancels", "testbed_x1"),
    ("cancelled_while_saving", "testbed_x1"),
)
_CANCEL_S = 90.0
_KINDS = ("nfs3", "nfs4", "nfs60", "lustre", "all")


@pytest.fixture(scope="session")
def undisturbed(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Reference]:
    """The undisturbed run of each (hardware, seed), on this machine's own disk."""
    kept: dict[tuple[str, int], Reference] = {}

    def get(hardware: str, seed: int) -> Reference:
        if (hardware, seed) not in kept:
            scene = Scene(slurm, tmp_path_factory.mktemp(f"undisturbed-{hardware}-{seed}"), hardware)
            scene.submit(pace_s=0, seeds=(seed,))
            scene.wait_until_done()
            kept[hardware, seed] = Reference.of(scene.run)
        return kept[hardware, seed]

    return get


# A sample for `make test`; `make shared-folder` plays the others.
_SAMPLE = {("preempted_with_grace", "nfs3")}


def _cases() -> list[Any]:
    cases = [(kind, name, hardware) for kind in _KINDS for name, hardware in _PLAYED]
    return [
        pytest.param(*case, marks=() if (case[1], case[0]) in _SAMPLE else pytest.mark.long, id=f"{case[1]}-{case[0]}")
        for case in cases
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "name", "hardware"), _cases())
def test_a_promise_holds_on_a_shared_folder(
    slurm_beds: Beds,
    undisturbed: Callable[[str, int], Reference],
    kind: str,
    name: str,
    hardware: str,
    tmp_path: Path,
) -> None:
    each = all_scenarios()[name]
    undisturbed(hardware, 0)  # before the clock: the first one that needs it would pay for all
    scene = Scene(slurm_beds.get(each.variant, SharedFolder(kind, seed=1)), tmp_path, hardware)
    each.play(scene, undisturbed)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_cancel_reaches_a_successor_that_the_login_shell_may_not_know_yet(
    slurm_beds: Beds, kind: str, tmp_path: Path
) -> None:
    """hpc-trainer cancel right after the journal's end: whatever its clients saw, the run leaves within 90 s."""
    scene = Scene(slurm_beds.get(share=SharedFolder(kind, seed=1)), tmp_path, "testbed_x1")
    scene.submit(pace_s=0.02)
    scene.slurm.run("scontrol", "update", f"jobid={scene.run.job_id}", "requeue=0")
    scene.wait_for_step(20)
    (scene.gates / "pace_s").write_text("2")  # five minutes for what is left: it does not end by itself
    scene.signal("USR2")
    scene.wait_for_end(0)
    scene.driver.run("cancel", "scene")
    begin = time.monotonic()
    wait_until_gone(scene)
    assert time.monotonic() - begin <= _CANCEL_S
    assert not scene.run.is_done
    check_stays(scene, "CANCELLED", "cancelled")
