"""What `plan` and `submit` say of runs that were submitted before."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.cli.show_plan import print_plan
from hpc_trainer.launch.known import Known
from hpc_trainer.launch.plan import build_plan
from hpc_trainer.record.states import RunState
from tests.unit.launch.grids import make_grid
from tests.unit.record.builders import make_specs


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.OUT_OF_MEMORY])
@pytest.mark.parametrize("retry_failed", [False, True])
def test_failed_runs_stay_as_they_are_only_where_they_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: RunState, retry_failed: bool
) -> None:
    (spec,) = make_specs(1, "cluster=slurm")
    known = Known(states={spec.run_id: state})
    print_plan(build_plan(make_grid(tmp_path, [spec]), known, retry_failed=retry_failed))
    assert ("1 failed run(s) stay as they are" in capsys.readouterr().out) is not retry_failed
