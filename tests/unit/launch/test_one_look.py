"""A submit reads the status of its sweep once, and plans once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.launch import grids as grids_module
from hpc_trainer.launch.grids import plan_grid, submit_grid
from hpc_trainer.runs.spec import RunSpec
from tests.unit.launch.grids import make_grid
from tests.unit.runs.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        function = getattr(module, name)

        def call(*given: object, **named: object) -> object:
            calls[name] += 1
            return function(*given, **named)

        monkeypatch.setattr(module, name, call)

    counted(grids_module, "read_status")
    counted(grids_module, "build_plan")
    return calls


@pytest.mark.parametrize("executor", ["slurm", "local"])
@pytest.mark.parametrize("num_known", [0, 2, 3])
def test_once_whether_the_sweep_is_new_grows_or_is_all_known(
    executor: str, num_known: int, tmp_path: Path, fake_slurm: FakeSlurm, count: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("hpc_trainer.launch.submit._submit_local", lambda _: [])
    specs: list[RunSpec] = make_specs(3, f"cluster={executor}")
    if num_known:
        submit_grid(make_grid(tmp_path / "sweep", specs[:num_known], Executor(executor)))
    count.clear()
    calls = len(fake_slurm.calls())
    done = submit_grid(make_grid(tmp_path / "sweep", specs, Executor(executor)))
    assert count == {"build_plan": 1} | ({"read_status": 1} if num_known else {})
    if executor == "slurm":
        assert done.num_submitted == 3 - num_known
        asked = [call.split()[0] for call in fake_slurm.calls()[calls:]]
        assert asked.count("squeue") == (1 if num_known else 0)
        assert asked.count("sbatch") == (1 if num_known < 3 else 0)
        count.clear()
        assert not plan_grid(make_grid(tmp_path / "sweep", specs)).specs
        assert count["build_plan"] == 1
