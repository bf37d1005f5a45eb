"""Plays the table of scenarios: pytest tests/slurm/scenarios -k cancelled_while_saving (HPC_TRAINER_SCENARIOS=all)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.scenarios.checks import Reference, References
from tests.slurm.scenarios.sample import SAMPLE, VARIABLE, chosen
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import Scenario, all_scenarios, ids, short
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import default_release

Variants = Callable[[str], SlurmCluster]


@pytest.fixture(scope="session")
def references(slurm_variant: Variants, tmp_path_factory: pytest.TempPathFactory) -> References:
    """The undisturbed run of each (hardware, seed), trained when it is first asked for."""
    kept: dict[tuple[str, int], Reference] = {}

    def get(hardware: str, seed: int) -> Reference:
        if (hardware, seed) not in kept:
            scene = Scene(slurm_variant(""), tmp_path_factory.mktemp(f"undisturbed-{hardware}-{seed}"), hardware)
            scene.submit(pace_s=0, seeds=(seed,))
            scene.wait_until_done()
            kept[hardware, seed] = Reference.of(scene.run)
        return kept[hardware, seed]

    return get


def _rows() -> Iterator[object]:
    played = chosen(ids())
    for name, each in sorted(all_scenarios().items()):
        for hardware in each.hardware:
            fault = each.fault(default_release(), hardware)
            marks = [pytest.mark.timeout(each.timeout_s)]
            if f"{name}-{short(hardware)}" not in played:
                marks.append(pytest.mark.long)
            if fault:
                marks.append(pytest.mark.xfail(strict=True, raises=AssertionError, reason=fault))
            yield pytest.param(each, hardware, marks=marks, id=f"{name}-{short(hardware)}")


@pytest.mark.parametrize(("each", "hardware"), list(_rows()))
def test_scenario(
    each: Scenario,
    hardware: str,
    slurm_variant: Variants,
    references: References,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    references(hardware, 0)  # before the clock: the first one that needs it would pay for all
    scene = Scene(slurm_variant(each.variant), tmp_path, hardware)
    begin = time.monotonic()
    try:
        each.play(scene, references)
    finally:
        causes = [str(record["cause"]) for run in scene.runs for record in run.records("end")]
        record_property("scenario", (each.name, hardware, scene.slurm.release, " ".join(causes)))
        record_property("seconds", round(time.monotonic() - begin, 1))


def test_the_variable_names_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert set(chosen(ids())) == set(SAMPLE) <= set(ids())
    monkeypatch.setenv(VARIABLE, "timed_out_after_ten_minutes, no_progress")
    assert sorted(chosen(ids())) == ["no_progress-x1", "no_progress-x4", "timed_out_after_ten_minutes-x1"]
    monkeypatch.setenv(VARIABLE, "no_such")
    with pytest.raises(ValueError, match="unknown no_such"):
        chosen(ids())
