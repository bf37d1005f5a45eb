"""metrics.jsonl: monotone in step whatever happened, the last line never torn."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_trainer.record import metrics as metrics_log
from hpc_trainer.record.metrics import (
    MetricsLog,
    best_in,
    newest_metrics_in,
    read_metrics,
    sampled_metrics,
    scores_in,
)
from hpc_trainer.record.reading import Faults, read_lines


def _steps(path: Path) -> list[int]:
    return [record["step"] for record in read_lines(path)]


def test_replayed_steps_replace_their_lines(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m")
    for step in (10, 20, 30):
        log.append(step, {"loss": 1.0 / step})
    log.rewind(20)
    log.append(30, {"loss": 7.0})
    assert _steps(tmp_path / "m") == [10, 20, 30]
    assert list(read_lines(tmp_path / "m"))[-1] == {"step": 30, "loss": 7.0}


def test_a_torn_tail_goes(tmp_path: Path) -> None:
    path = tmp_path / "m"
    MetricsLog(path).append(10, {"loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 20, "lo')
    MetricsLog(path).rewind(50)
    assert path.read_text() == '{"step": 10, "loss": 1.0}\n'


def test_nothing_to_rewind(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "m").rewind(0)
    assert not (tmp_path / "m").exists()


def test_any_story_of_kills_ends_monotone(tmp_path: Path) -> None:
    for seed in range(20):
        chance, path = random.Random(seed), tmp_path / f"m{seed}"
        step = saved = 0
        for _ in range(6):
            MetricsLog(path).rewind(saved)
            step = saved
            for _ in range(chance.randint(0, 9)):
                step += chance.randint(1, 3)
                MetricsLog(path).append(step, {"loss": step * 0.1})
                if chance.random() < 0.3:
                    saved = step
            if path.exists() and chance.random() < 0.5:
                with path.open("a") as file:
                    file.write('{"step": 9')
        MetricsLog(path).rewind(saved)
        steps = _steps(path)
        assert steps == sorted(set(steps)), f"seed {seed}"
        assert all(each <= saved for each in steps), f"seed {seed}"


def _refuse(monkeypatch: pytest.MonkeyPatch, error: int, *, takes: int | None = None) -> None:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if takes is None:
            raise OSError(error, os.strerror(error))
        return real(descriptor, data[:takes])

    monkeypatch.setattr(os, "write", write)


def test_lines_wait_for_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path / "m")
    log.append(1, {"loss": 1.0})
    _refuse(monkeypatch, errno.ENOSPC)
    for step in (2, 3):
        log.append(step, {"loss": 1.0})
    assert _steps(tmp_path / "m") == [1]
    assert [text for text in caplog.messages if "metrics wait for room" in text] == caplog.messages
    assert len(caplog.messages) == 1
    monkeypatch.undo()
    log.append(4, {"loss": 1.0})
    assert _steps(tmp_path / "m") == [1, 2, 3, 4]


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "m")
    log.append(1, {"loss": 1.0})
    before = (tmp_path / "m").read_bytes()
    _refuse(monkeypatch, errno.ENOSPC, takes=5)
    log.append(2, {"loss": 1.0})
    assert (tmp_path / "m").read_bytes() == before
    monkeypatch.undo()
    log.append(3, {"loss": 1.0})
    assert _steps(tmp_path / "m") == [1, 2, 3]


def test_a_line_that_decides_what_is_deleted_must_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, errno.EDQUOT)
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)):
        MetricsLog(tmp_path / "m").append(1, {"eval_loss": 1.0}, sync=True)


def test_other_errors_are_not_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, errno.EBADF)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        MetricsLog(tmp_path / "m").append(1, {"loss": 1.0})


def test_records_of_a_long_run_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten records a second would open the file ten times a second; none is lost where a restart goes on from."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = MetricsLog(tmp_path / "metrics.jsonl")
    written: list[tuple[float, int]] = []
    for step in range(6_000):
        clock.now = step / 10
        log.append(step, {"loss": 1.0}, may_wait=True)
        num_lines = len(read_metrics(tmp_path / "metrics.jsonl")) if step % 100 == 0 else 0
        written.append((clock.now, num_lines))
        if step == 200:
            assert num_lines == 201, "a young run is seen at once"
    lines = len(read_metrics(tmp_path / "metrics.jsonl"))
    assert 5_900 <= lines < 6_000
    log.flush()
    assert [each["step"] for each in read_metrics(tmp_path / "metrics.jsonl")] == list(range(6_000))
    log.append(6_000, {"loss": 2.0}, sync=True, may_wait=True)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 6_000


def test_records_that_wait_and_are_done_again_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = MetricsLog(tmp_path / "metrics.jsonl")
    clock.now = 1_000.0
    for step in (1, 2, 3):
        log.append(step, {"loss": 1.0}, may_wait=True)
    log.rewind(2)
    log.append(3, {"loss": 9.0}, may_wait=True)
    log.flush()
    found = [(each["step"], each["loss"]) for each in read_metrics(tmp_path / "metrics.jsonl")]
    assert found[-2:] == [(2, 1.0), (3, 9.0)]


def _log(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"step": {step}, "loss": {step}.5, "lr": 0.1}}\n' for step in range(count)))
    return path


@pytest.mark.parametrize(("count", "steps", "gap"), [(3, [0, 1, 2], 1), (4, [0, 2, 3], 2), (7, [0, 3, 6], 3)])
def test_of_many_lines_some_at_equal_distances_and_the_last_are_read(
    tmp_path: Path, count: int, steps: list[int], gap: int
) -> None:
    found, found_gap = sampled_metrics(_log(tmp_path / "metrics.jsonl", count), 3)
    assert ([record["step"] for record in found], found_gap) == (steps, gap)


def test_the_few_lines_of_another_kind_are_all_read(tmp_path: Path) -> None:
    path = _log(tmp_path / "metrics.jsonl", 9)
    with path.open("a") as file:
        file.write('{"step": 9, "eval_loss": 1.0}\n{"step": "x", "loss": 1, "lr": 1}\n{"step": 10, "lo')
    faults = Faults()
    found, gap = sampled_metrics(path, 3, faults)
    assert ([record["step"] for record in found], gap) == ([0, 4, 8, 9], 4)
    assert [str(fault).partition(" cannot")[0] for fault in faults] == ["metrics.jsonl line 11"]


def test_a_log_that_is_too_much_to_hold_is_read_line_by_line_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _log(tmp_path / "metrics.jsonl", 9)
    monkeypatch.setattr(metrics_log, "_MOST_SAMPLED", path.stat().st_size)
    assert sampled_metrics(path, 3)[1] == 3, "exactly as much as may be held"
    monkeypatch.setattr(metrics_log, "_MOST_SAMPLED", path.stat().st_size - 1)
    found, gap = sampled_metrics(path, 3)
    assert ([record["step"] for record in found], gap) == (list(range(9)), 1)


def test_the_best_value_of_a_metric_is_the_first_of_equal_ones_up_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [(1, "3.0", "1.0"), (2, "1.0", "5.0"), (3, "1.0", "5.0"), (4, '"NaN"', '"Infinity"'), (5, "0.5", "9.0")]
    path.write_text("".join(f'{{"step": {step}, "loss": {loss}, "score": {score}}}\n' for step, loss, score in rows))
    names = ["loss", "score", "none"]

    def best(last: int) -> dict[str, tuple[float, int]]:
        return best_in(path, names, lambda name: name == "loss", last=last)

    with path.open("r+") as file:
        lines = file.readlines()
        file.seek(0)
        file.writelines(
            ['{"step": 0, "lr": 1}\n{"step": "x", "loss": -1.0}\n', *lines[:2], '{"step": 2, "loss": -9\n', *lines[2:]]
        )
    assert best(3) == {"loss": (1.0, 2), "score": (5.0, 2)}
    assert best(5) == {"loss": (0.5, 5), "score": (float("inf"), 4)}
    assert best(0) == best_in(path, [], lambda _: True, last=9) == {}
    assert scores_in(path, "loss") == {1: 3.0, 2: 1.0, 3: 1.0, 4: pytest.approx(float("nan"), nan_ok=True), 5: 0.5}
    assert [record["step"] for record in newest_metrics_in(path)] == [0, 1, 2, 3, 4, 5]
