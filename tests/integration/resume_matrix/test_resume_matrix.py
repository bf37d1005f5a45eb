"""A run that was interrupted once, five times, or right after an fp16 overflow has the bits of the undisturbed one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.states import DONE
from hpc_trainer.training.build import build_dataset, build_task
from hpc_trainer.verify.resume import first_difference, other_files, other_metrics, read_trace
from tests import warm
from tests.integration.resume_matrix.cells import (
    AXES,
    CELLS,
    LONG,
    NUM_STEPS,
    POINTS,
    SAMPLE,
    STEPS_PER_EPOCH,
    TABLE,
    all_pairs,
    overrides,
    pairs,
)
from tests.seeds import chosen_seed
from tests.unit.training.train_here import config_of

ROOT = Path(__file__).resolve().parents[3]
_LIMIT_S = 280
_LONG_LIMIT_S = 900


def holds(
    name: str, folder: Path, of_ranks: Sequence[Path] = (), seen: Path | None = None, limit_s: float | None = None
) -> None:
    """Play a cell and compare its runs with the undisturbed one.

    Args:
        name: the cell's.
        folder: for logs, and for the runs where `of_ranks` does not say.
        of_ranks: the folder of runs as each rank sees it, in turn.
        seen: the same as this process sees it.
        limit_s: seconds that the ranks may take.
    """
    limit_s = limit_s or (_LONG_LIMIT_S if name in LONG else _LIMIT_S)
    cell = CELLS[name]
    world_size = int(cell["ranks"])
    seed = chosen_seed()  # of the four interruptions besides the cell's own
    ranks = []
    for rank in range(world_size):
        place = of_ranks[rank % len(of_ranks)] if of_ranks else folder
        words = [name, str(rank), str(place), str(seed)]
        command = [sys.executable, "-m", "tests.integration.resume_matrix.rank", *words]
        with (folder / f"rank-{rank}.log").open("w") as log:
            ranks.append(warm.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(timeout=limit_s) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    logs = "\n".join(f"{path.name}\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("rank-*.log")))
    assert codes == [0] * world_size, logs
    folder = seen or folder
    undisturbed = read_trace(RunPaths(folder / "undisturbed"), world_size)
    for rank in range(world_size):
        assert list(undisturbed.steps(rank)) == list(range(1, NUM_STEPS + 1))
    assert len(undisturbed.files) >= 1 + world_size  # what ranks share, and what is each one's own
    runs = json.loads((folder / "runs.json").read_text())
    assert runs.keys() == {"once", "five", *(["overflow"] if cell["precision"] == "fp16" else [])}
    for label, ends in runs.items():
        paths = RunPaths(folder / label)
        trace = read_trace(paths, world_size)
        resumed = [each.resumed_step for each in Journal(paths).read()]
        assert paths.marker(DONE).exists()
        assert len(resumed) == len(ends) + 1, (label, ends, resumed)
        if label != "five":  # there a kill goes back to the save before
            assert resumed == [0, *ends]
        first = first_difference(undisturbed, trace)
        assert first is None, (label, ends, resumed, first)
        assert other_files(undisturbed, trace) == (), label
        assert other_metrics(undisturbed, trace, undisturbed) == (), label


@pytest.mark.dist
@pytest.mark.parametrize("name", SAMPLE)
def test_a_cell_of_the_sample(name: str, tmp_path: Path) -> None:
    holds(name, tmp_path)


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", [name for name in CELLS if name not in SAMPLE])
def test_every_other_cell(name: str, tmp_path: Path) -> None:
    holds(name, tmp_path)


def test_the_table_has_every_pair_of_values() -> None:
    """Also those of two axes of the issue by name, so that the generator is not its own judge."""
    covered = set().union(*(pairs(cell) for cell in TABLE.values()))
    assert covered == all_pairs(AXES)
    assert len(all_pairs(AXES)) > 200
    points = itertools.product(("fp32", "bf16", "fp16"), ("1", "2", "4"), ("mid_epoch", "epoch_edge", "last_step"))
    assert set(points) == {(cell["precision"], cell["ranks"], cell["point"]) for cell in TABLE.values()}
    assert len(TABLE) <= 30


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_the_edge_of_an_epoch_is_one(model: str) -> None:
    cell = {axis: values[0] for axis, values in AXES.items()} | {"model": model}
    config = config_of(*overrides(cell))
    samples = len(build_dataset(config, "train", build_task(config)))
    assert samples // config.train.global_batch_size == STEPS_PER_EPOCH
    assert POINTS["epoch_edge"] % STEPS_PER_EPOCH == 0 < POINTS["mid_epoch"] % STEPS_PER_EPOCH
