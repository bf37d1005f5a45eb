"""Pictures: a run that was stopped and came back in other processes has the bits of the one that was not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_trainer.data.images.index import build_index
from hpc_trainer.record.metrics import read_metrics
from tests.unit.data.images.making import make_folder, make_shards, samples
from tests.unit.training.ranks import play_jobs

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

STEPS, STOP_AT = 6, 4
"""Of 24 pictures three batches of 8 are an epoch: the stop is inside the second one."""
BASE = [
    "model=mlp", "model.hidden_dim=8", "schedule=constant", "data.image_size=8", f"train.num_steps={STEPS}",
    "train.global_batch_size=8", "train.eval_every_steps=3", "monitor.log_every_steps=1", "checkpoint.every_steps=1000",
]  # fmt: skip
SOURCES = ("folder", "shards")
# (ranks, cells of source and loader processes).
CASES = [
    (2, [("folder", 2), ("shards", 0)]),
    (2, [("folder", 0), ("shards", 2)]),
    (1, list(itertools.product(SOURCES, (0, 2)))),
    (4, list(itertools.product(SOURCES, (0, 2)))),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training pictures in folders, of which one is truncated, and the same number in shards."""
    root = tmp_path_factory.mktemp("pictures")
    make_folder(root / "folder", train=8, eval=2)
    broken = root / "folder/train/bee/003.jpeg"
    broken.write_bytes(broken.read_bytes()[:100])
    for split, count in (("train", 24), ("eval", 6)):
        build_index(make_shards(root / "shards" / split, samples(count)))
    return root


def _words(root: Path, source: str, workers: int) -> list[str]:
    # The copies of the shards are made by one of the ranks, once, and used again by all that come later.
    (root / "local").mkdir(exist_ok=True)
    more = ["data.on_broken=skip"] if source == "folder" else [f"data.stage_dir={root / 'local'}"]
    return [*BASE, f"data=image_{source}", f"data.path={root / source}", f"data.num_workers={workers}", *more]


def _job(root: Path, source: str, workers: int, how: str, attempt: int, stop_at: int | None) -> dict[str, Any]:
    return {
        "name": f"{source}-{workers}-{how}", "words": _words(root, source, workers), "attempt": attempt,
        "stop_at": stop_at,
    }  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-ranks")
def played(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each source undisturbed, and the cells through a stop; what comes back are other processes."""
    folder, (num_ranks, cells) = tmp_path_factory.mktemp("runs"), request.param
    first = [_job(root, source, 0, "whole", 0, None) for source in SOURCES]
    first += [_job(root, source, workers, "stopped", 0, STOP_AT) for source, workers in cells]
    again = [_job(root, source, workers, "stopped", 1, None) for source, workers in cells]
    for tag, jobs in (("first", first), ("again", again)):
        ends = play_jobs(folder, num_ranks, tag, jobs)
        assert all(code == 0 for code, _ in ends), "\n".join(f"{code}: {output[-3000:]}" for code, output in ends)
    return folder


def _result(folder: Path) -> tuple[bytes, list[tuple[str, ...]]]:
    """Weights and optimizer at the end, and the metrics as text."""
    state = (folder / f"checkpoints/step-{STEPS:08d}/state.safetensors").read_bytes()
    keys = ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy")
    lines = read_metrics(folder / "metrics.jsonl")
    return state, [tuple(repr(line.get(key)) for key in keys) for line in lines]


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("source", SOURCES)
def test_a_stop_changes_no_bit_with_any_number_of_loader_processes(played: Path, source: str) -> None:
    whole = _result(played / f"{source}-0-whole")
    assert len(whole[1]) >= STEPS
    stopped = list(played.glob(f"{source}-*-stopped"))
    assert stopped
    for folder in stopped:
        assert (folder / f"checkpoints/step-{STOP_AT:08d}").is_dir()
        assert _result(folder) == whole


@pytest.mark.long
@pytest.mark.dist
def test_what_was_done_about_files_is_told(played: Path, root: Path) -> None:
    said = "".join(path.read_text() for path in sorted(played.glob("output-first-*.txt")))
    assert "folder/train/bee/003.jpeg cannot be decoded" in said
    assert "replaces it in each epoch" in said
    assert f"shard(s) in {root / 'local'}" in "".join(path.read_text() for path in played.glob("output-again-*.txt"))


@pytest.mark.long
def test_a_run_that_met_a_broken_picture_goes_on_with_skip(local: LocalDriver, root: Path) -> None:
    words = [*BASE, "data=image_folder", f"data.path={root / 'folder'}", "data.num_workers=1", "sweep_name=broken"]
    refused = local.run("train", *words, "checkpoint.every_steps=1", check=False)
    assert refused.returncode == 1
    assert "bee/003.jpeg cannot be decoded as JPEG, PNG, WEBP" in refused.stderr
    assert "data.on_broken=skip" in refused.stderr
    (end,) = local.events("broken", "end")
    gone_on = local.train(*words, "checkpoint.every_steps=1", "data.on_broken=skip")
    assert (gone_on["state"], gone_on["step"]) == ("COMPLETED", STEPS)
    assert local.events("broken", "resume")[-1]["step"] == (end["saved_step"] or 0)
