"""What ranks send each other over NCCL, on the one rank that one GPU allows; two ranks share a GPU over gloo."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from hpc_trainer.observe.flight_recorder import recent_collectives
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.tasks.cross_entropy import CrossEntropy
from hpc_trainer.training.parallel.share import StopVote, VotingLoss
from tests.gpu.runs import ON_GPU, Figures, Runs

pytestmark = ON_GPU


@pytest.fixture
def nccl() -> Iterator[torch.device]:
    """A group of one rank."""
    device = torch.device("cuda", 0)
    store = TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=30))
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


def test_the_stop_vote_is_heard_one_step_late_and_costs_no_wait(nccl: torch.device) -> None:
    loss = VotingLoss(nn.Linear(4, 3).to(nccl), CrossEntropy()).to(nccl)
    module = DistributedDataParallel(loss, device_ids=[nccl])
    vote = StopVote(loss, RankGroup(rank=0, world_size=2, device=nccl))  # as one of two: alone it asks nobody
    batch = torch.randn(8, 4, device=nccl), torch.zeros(8, dtype=torch.int64, device=nccl)
    heard = []
    for index, wish in enumerate((False, False, True, False, False)):
        if index == 1:
            torch.cuda.set_sync_debug_mode("error")
        flag = vote.cast(wish)
        module(batch, flag).backward()
        heard.append(vote.count())
    torch.cuda.set_sync_debug_mode("default")
    assert heard == [False, False, False, True, False]


def test_the_flight_recorder_knows_what_nccl_was_asked(nccl: torch.device) -> None:
    tensor = torch.ones(1000, device=nccl)
    dist.all_reduce(tensor)
    dist.broadcast(tensor[:10], 0)
    torch.cuda.synchronize()
    found = recent_collectives()
    assert [each.name for each in found][-2:] == ["all_reduce", "broadcast"]
    assert found[-2].num_bytes == 4000


def test_sums_and_words_of_a_group(nccl: torch.device) -> None:
    group = RankGroup(rank=0, world_size=1, device=nccl)
    assert group.sum(torch.ones(2, device=nccl)).tolist() == [1, 1]
    assert group.broadcast({"a": 1}) == {"a": 1}


# NCCL wants a GPU for each rank; all else is as on two GPUs.
_GLOO = """
from hpc_trainer.runtime.devices import CudaKind
CudaKind.backend = 'gloo'
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_on_one_gpu_train_as_one_does(parallel: str, runs: Runs, figures: Figures) -> None:
    words = (
        "experiment=gpt_bytes", "precision=fp32", "train.num_steps=20", "monitor.log_every_steps=1",
        "schedule.warmup_steps=5", "train.eval_every_steps=0",
    )  # fmt: skip
    one = runs.train(*words)
    two = runs.train(*words, f"parallel={parallel}", "hardware.gpus_per_node=2", program=_GLOO)
    far = max(abs(one - two) / two for one, two in zip(one.losses, two.losses, strict=True))
    figures.tell(f"two ranks {parallel}", far=far)
    assert far <= 1e-4
