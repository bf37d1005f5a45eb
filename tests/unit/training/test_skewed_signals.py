"""Stop signals that reach the ranks up to half a second apart, or one of them alone: no hang, one agreed checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.seeds import chosen_seed
from tests.unit.training.ranks import child_environment

CHILD = Path(__file__).with_name("skewed_child.py")


@pytest.mark.long
@pytest.mark.parametrize("num_stops", [3, pytest.param(200, marks=pytest.mark.timeout(1000))])
def test_ranks_agree_whenever_the_signals_come(tmp_path: Path, num_stops: int) -> None:
    seed = chosen_seed()
    ranks = []
    for rank in range(2):
        command = [sys.executable, str(CHILD), str(rank), str(tmp_path), str(seed)]
        with (tmp_path / f"rank-{rank}.log").open("w") as log:
            command.append(str(num_stops))
            ranks.append(warm.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=child_environment()))
    try:
        codes = [rank.wait(timeout=200 + 4 * num_stops) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    logs = "\n".join((tmp_path / f"rank-{rank}.log").read_text()[-3000:] for rank in range(2))
    assert codes == [0, 0], logs
    ends = [json.loads((tmp_path / f"ends-{rank}.json").read_text()) for rank in range(2)]
    assert len(ends[0]) == num_stops
    assert ends[0] == ends[1], "the same step on both ranks"
    # What was being written may be the checkpoint that counts: as many steps as a busy disk let pass since then.
    told = (tmp_path / "rank-0.log").read_text()
    for step, saved in ends[0]:
        assert saved == step or f"step {saved} is saved: the {step - saved} steps after it" in told, (step, saved, told)
