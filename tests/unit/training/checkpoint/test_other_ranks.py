"""A run that goes on with another strategy on another number of ranks computes what the undisturbed one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.reading import read_lines
from tests.unit.training.ranks import run_child

pytestmark = pytest.mark.dist
UNDISTURBED = ["none:1:0"]


def metrics(folder: Path, *attempts: str) -> dict[str, dict[int, float]]:
    folder.mkdir()
    run_child(Path(__file__).with_name("other_ranks_child.py"), folder, *attempts)
    records = list(read_lines(RunPaths(folder / "run").metrics))
    return {
        key: {record["step"]: record[key] for record in records if key in record}
        for key in ("loss", "grad_norm", "eval_loss")
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    return metrics(tmp_path_factory.mktemp("undisturbed") / "it", *UNDISTURBED)


@pytest.mark.long
@pytest.mark.parametrize(
    "attempts",
    [
        ["ddp:2:8", "fsdp:2:15", "none:1:0"],
        pytest.param(["none:1:5", "fsdp:4:11", "zero1:2:17", "ddp:4:0"], marks=pytest.mark.long),
        pytest.param(["zero1:4:5", "fsdp:2:11", "fsdp:4:17", "zero1:2:0"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_the_losses_are_those_of_one_rank(
    tmp_path: Path, undisturbed: dict[str, dict[int, float]], attempts: list[str]
) -> None:
    found = metrics(tmp_path / "it", *attempts)
    assert list(found["loss"]) == list(range(1, 25))
    # Wished in the heartbeat of the step after, so voted on in the evaluation there, or in one step more.
    wishes = [int(attempt.split(":")[2]) + 1 for attempt in attempts[:-1]]
    stops = [step if step % 6 == 0 else step + 1 for step in wishes]
    journal = Journal(RunPaths(tmp_path / "it" / "run")).read()
    assert [attempt.resumed_step for attempt in journal] == [0, *stops]
    assert found["loss"] == pytest.approx(undisturbed["loss"], rel=1e-6)
    assert found["eval_loss"] == pytest.approx(undisturbed["eval_loss"], rel=1e-6)
    assert found["grad_norm"] == pytest.approx(undisturbed["grad_norm"], rel=1e-4)
