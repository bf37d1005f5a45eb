"""What `clean` deletes of real checkpoints, and what it never does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.errors import ConfigError
from hpc_trainer.record.files import append_lines
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tidy.cleaning import Needs, checked_rules, delete_items, find_items, is_whole
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

Save = Callable[..., None]


@pytest.fixture
def save() -> Save:
    """Writes checkpoints of these steps as a run does."""
    import torch

    def save_steps(sweep: SweepOnDisk, index: int, *steps: int) -> None:
        store = CheckpointStore(sweep.run(index).checkpoints, group=RankGroup(), keep_last=99, attempt=0)
        for step in steps:
            store.save(step, replicated={"weight": torch.full((40,), float(step))}, per_rank={}, meta={"step": step})

    return save_steps


def _sweep(tmp_path: Path, count: int, *overrides: str, **changes: object) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "mine", make_specs(count, "cluster=slurm", *overrides, **changes))
    sweep.submit()
    for index in range(count):
        sweep.start(index)
    return sweep


@pytest.fixture
def quiet(fake_slurm: FakeSlurm) -> FakeSlurm:
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "")
    return fake_slurm


def _deleted(sweep: SweepOnDisk, *rules: str) -> list[str]:
    """What the rules delete, as folders with their run's number."""
    items, _ = find_items(read_status(sweep.paths), rules, Needs(sweep.paths.folder.parent))
    numbers = {spec.run_id: number for number, spec in enumerate(sweep.specs)}
    gone = delete_items(items, print)
    assert not any(item.path.exists() for item in gone)
    return sorted(f"{numbers[item.run_id]}/{item.path.name}" if item.run_id else item.path.name for item in gone)


def _steps(sweep: SweepOnDisk, index: int) -> list[int]:
    return sorted(int(path.name[5:]) for path in sweep.run(index).checkpoints.glob("step-????????"))


def test_the_newest_the_best_and_pinned_ones_stay(tmp_path: Path, quiet: FakeSlurm, save: Save) -> None:
    sweep = _sweep(tmp_path, 1, checkpoint__keep_best="eval_loss")
    save(sweep, 0, 10, 20, 30, 40, 50)
    scores = {10: 0.5, 20: 0.1, 30: 0.4, 40: 0.3, 50: 0.2}
    append_lines(sweep.run(0).metrics, [{"step": step, "eval_loss": loss} for step, loss in scores.items()])
    (sweep.run(0).checkpoints / "step-00000030.pin").touch()
    (sweep.run(0).checkpoints / "step-00000060.tmp-0").mkdir()
    sweep.done(0)
    assert _deleted(sweep, "checkpoints") == ["0/step-00000010", "0/step-00000040", "0/step-00000060.tmp-0"]
    assert _steps(sweep, 0) == [20, 30, 50]
    assert _deleted(sweep, "checkpoints") == [], "a second time there is nothing"


def test_a_run_that_waits_or_works_is_left_alone(tmp_path: Path, fake_slurm: FakeSlurm, save: Save) -> None:
    sweep = _sweep(tmp_path, 3)
    for index in range(3):
        save(sweep, index, 10, 20)
    sweep.end(2, state=RunState.FAILED, cause="exception")
    fake_slurm.answer("squeue", "500_0|RUNNING|n1|None|x\n500_1|PENDING||Priority|x\n")
    fake_slurm.answer("sacct", "")
    assert _deleted(sweep, "checkpoints") == ["2/step-00000010"]
    assert _deleted(sweep, "failed") == ["2/step-00000020"]
    fake_slurm.answer("squeue", error="down\n", code=1)
    assert _deleted(sweep, "checkpoints", "failed") == [], "what is not known is left alone"


def test_a_damaged_newest_checkpoint_keeps_the_older_ones(
    tmp_path: Path, quiet: FakeSlurm, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = _sweep(tmp_path, 2)
    for index in range(2):
        save(sweep, index, 10, 20, 30)
        sweep.done(index)
    short, changed = (next((sweep.run(index).checkpoints / "step-00000030").glob("rank*")) for index in (0, 1))
    short.write_bytes(short.read_bytes()[:-1])
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    assert not is_whole(short.parent)
    assert is_whole(changed.parent)
    assert not is_whole(changed.parent, reads=True)
    assert _deleted(sweep, "checkpoints") == ["0/step-00000010"]
    assert "is damaged, so the older checkpoints stay" in capsys.readouterr().out
    assert _steps(sweep, 0) == [20, 30], (
        "the newest whole one counts; what is not the newest whole one may be looked at"
    )
    assert _steps(sweep, 1) == [10, 20, 30]


@pytest.mark.parametrize("rest", [b"", b"{}", b'{"files": 3}'])
def test_an_odd_manifest_is_no_whole_checkpoint(rest: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(rest)
    assert not is_whole(tmp_path)
    assert not is_whole(tmp_path / "nothing")


def test_what_a_longer_run_begins_with_stays(tmp_path: Path, quiet: FakeSlurm, save: Save) -> None:
    """With schedule=wsd the learning rate falls at the end: a longer run begins before the fall."""
    sweep = _sweep(tmp_path, 1, "schedule=wsd", train__num_steps=100, schedule__warmup_steps=0)
    from hpc_trainer.launch.extend import same_until

    config = sweep.specs[0].typed()
    config.train.num_steps = 200
    limit, _ = same_until(config, 100)
    assert 10 < limit < 100, "else this test shows nothing"
    save(sweep, 0, 10, limit - 1, limit, limit + 1, 100)
    sweep.done(0)
    assert _deleted(sweep, "checkpoints") == [
        "0/step-00000010", f"0/step-{limit - 1:08d}", f"0/step-{limit + 1:08d}",
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["", "M\u00fcller", 'a "b" c'])
def test_what_a_run_of_another_sweep_names_stays(place: str, tmp_path: Path, quiet: FakeSlurm, save: Save) -> None:
    """In whatever folder: a line of `specs.jsonl` escapes some letters."""
    tmp_path /= place
    sweep = _sweep(tmp_path, 1)
    save(sweep, 0, 10, 20, 30)
    sweep.end(0, state=RunState.FAILED, cause="exception")
    named = sweep.run(0).checkpoints / "step-00000010"
    SweepOnDisk(tmp_path / "runs" / "child", make_specs(1, checkpoint__resume_from=str(named)))
    assert _deleted(sweep, "checkpoints", "failed") == ["0/step-00000020", "0/step-00000030"]
    assert named.exists()


def test_code_goes_when_everything_has_ended(tmp_path: Path, quiet: FakeSlurm) -> None:
    sweep = _sweep(tmp_path, 2)
    sweep.paths.code.mkdir()
    (sweep.paths.code / "1b4a89a2ed83.zip").write_bytes(b"x" * 9999)
    sweep.done(0)
    sweep.end(1, state=RunState.PREEMPTED, cause="preempted")
    items, notes = find_items(read_status(sweep.paths), ["code"], Needs(tmp_path / "runs"))
    assert items == []
    assert "have not ended" in notes[0]
    assert "PREEMPTED" in notes[0]
    sweep.done(1)
    assert _deleted(sweep, "code") == ["1b4a89a2ed83.zip"]


def test_a_look_has_all_rules_and_a_deletion_only_chosen_ones() -> None:
    none = dict.fromkeys(("checkpoints", "failed", "code"), False)
    assert checked_rules(none, is_done=False) == ["checkpoints", "failed", "code"]
    assert checked_rules({**none, "code": True}, is_done=True) == ["code"]
    with pytest.raises(ConfigError, match=r"--checkpoints, --failed, --code"):
        checked_rules(none, is_done=True)
