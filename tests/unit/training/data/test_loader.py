"""Batches: what the order says, with and without workers, without a draw from the global random state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_trainer.errors import BrokenPictureError
from hpc_trainer.training.data.loader import BatchIterator, eval_indices, train_batches
from hpc_trainer.training.data.order import BatchOrder


class Squares:
    input_shape = (1,)
    num_classes = 2

    def __len__(self) -> int:
        return 40

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(type(index) is int for index in indices)
        values = torch.tensor(indices)
        return (values**2).float().unsqueeze(1), values


ORDER = BatchOrder(40, 12, 5)


def batches(first_step: int = 0, num_steps: int = 7, num_workers: int = 0, rank: int = 1) -> BatchIterator:
    return train_batches(
        Squares(),
        ORDER,
        first_step=first_step,
        num_steps=num_steps,
        rank=rank,
        world_size=2,
        micro_batch_size=2,
        grad_accum_steps=3,
        num_workers=num_workers,
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("first_step", [0, 2, 6, 7])
def test_batches_follow_the_order_from_any_step(num_workers: int, first_step: int) -> None:
    with batches(first_step, num_workers=num_workers) as found:
        got = [(inputs.flatten().tolist(), targets.tolist()) for inputs, targets in found]
    expected = [
        ORDER.micro_indices(step, accum=accum, rank=1, world_size=2, micro_batch_size=2).tolist()
        for step in range(first_step, 7)
        for accum in range(3)
    ]
    assert got == [([float(value**2) for value in part], part) for part in expected]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_random_state_is_untouched(num_workers: int) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with batches(num_workers=num_workers) as found:
        next(found)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.3])
def test_workers_outlive_the_signals_of_slurm_and_close_ends_them(delay_s: float) -> None:
    """Also in their first instructions, before they can have said that they ignore signals."""
    found = batches(num_workers=2)
    assert len(found.workers) == 2
    time.sleep(delay_s)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        for worker in found.workers:
            assert worker.pid is not None
            os.kill(worker.pid, number)
    assert len(list(found)) == 7 * 3
    workers = list(found.workers)
    found.close()
    found.close()
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(StopIteration):
        next(found)


@pytest.mark.long
def test_a_program_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    program = tmp_path / "forgetful.py"
    program.write_text(
        textwrap.dedent(
            """
            import torch
            from hpc_trainer.training.data.loader import train_batches
            from hpc_trainer.training.data.order import BatchOrder

            class Data:
                def __len__(self): return 8
                def __getitems__(self, indices): return torch.ones(1), torch.ones(1)

            found = train_batches(Data(), BatchOrder(8, 2, 0), first_step=0, num_steps=99, rank=0, world_size=1,
                                  micro_batch_size=2, grad_accum_steps=1, num_workers=1)
            next(found)
            print(found.workers[0].pid)
            raise SystemExit(3)
            """
        )
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_an_error_in_a_worker_reaches_the_loop() -> None:
    class Broken(Squares):
        def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            raise OSError("disk gone")

    layout = {"rank": 0, "world_size": 1, "micro_batch_size": 12, "grad_accum_steps": 1}
    found = train_batches(Broken(), ORDER, first_step=0, num_steps=2, num_workers=1, **layout)
    with pytest.raises(OSError, match="disk gone"), found:
        next(found)
    assert not any(worker.is_alive() for worker in found.workers)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_ours_has_the_same_words_from_a_worker(num_workers: int) -> None:
    class Broken(Squares):
        def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            raise BrokenPictureError("a.jpg cannot be decoded.\nFix: remove it.")

    layout = {"rank": 0, "world_size": 1, "micro_batch_size": 12, "grad_accum_steps": 1}
    found = train_batches(Broken(), ORDER, first_step=0, num_steps=2, num_workers=num_workers, **layout)
    with pytest.raises(BrokenPictureError) as raised, found:
        next(found)
    assert str(raised.value) == "a.jpg cannot be decoded.\nFix: remove it."


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Squares):
        def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(600)
            raise AssertionError

    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # 5 s otherwise
    layout = {"rank": 0, "world_size": 1, "micro_batch_size": 12, "grad_accum_steps": 1}
    found = train_batches(Hanging(), ORDER, first_step=0, num_steps=2, num_workers=1, **layout)
    found.close()
    assert not any(worker.is_alive() for worker in found.workers)


def test_sizes_that_do_not_make_the_batch_are_refused() -> None:
    layout = {"rank": 0, "world_size": 1, "micro_batch_size": 5, "grad_accum_steps": 2}
    with pytest.raises(ValueError, match="5 × 2 × 1 = 10"):
        train_batches(Squares(), ORDER, first_step=0, num_steps=2, num_workers=0, **layout)


@pytest.mark.parametrize("num_samples", [0, 1, 7, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_evaluation_shares_are_all_samples_once(num_samples: int, world_size: int) -> None:
    shares = [eval_indices(num_samples, rank, world_size) for rank in range(world_size)]
    assert sorted(index for share in shares for index in share) == list(range(num_samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_long_run_begins_as_soon_as_a_short_one() -> None:
    """Nothing is held for each step to come: a trillion of them would not fit into any memory."""
    with batches(first_step=10**9, num_steps=10**12) as found:
        _, targets = next(found)
    assert len(targets) == 2
