"""Ranks as a grid: who reads which samples, who draws which numbers, and which grids are refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.mesh import MeshShape, mesh_shape, nearest_divisor, num_data_ranks
from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.config.schema.model import GptConfig, MlpConfig
from hpc_trainer.config.schema.parallel import ParallelConfig, Strategy
from hpc_trainer.config.schema.train import CompileMode, CompileScope, Recompute
from hpc_trainer.data.generated import SyntheticTokensConfig
from hpc_trainer.data.text import TextBytesConfig
from tests.unit.record.builders import make_config

FSDP = Strategy.fsdp


@pytest.mark.parametrize(
    ("parallel", "world_size", "expected"),
    [
        (ParallelConfig(), 8, MeshShape(dp_replicate=8)),
        (ParallelConfig(strategy=FSDP), 8, MeshShape(dp_shard=8)),
        (ParallelConfig(strategy=FSDP, data_parallel_replicate=2), 8, MeshShape(dp_replicate=2, dp_shard=4)),
        (ParallelConfig(tensor_parallel=2), 2, MeshShape(tp=2)),
        (ParallelConfig(strategy=FSDP, tensor_parallel=2), 8, MeshShape(dp_shard=4, tp=2)),
        (ParallelConfig(tensor_parallel=2, pipeline_parallel=2), 8, MeshShape(pp=2, dp_replicate=2, tp=2)),
    ],
)
def test_the_grid_that_the_keys_make(parallel: ParallelConfig, world_size: int, expected: MeshShape) -> None:
    assert mesh_shape(parallel, world_size) == expected
    assert expected.world_size == world_size
    assert num_data_ranks(parallel, HardwareConfig(tasks_per_node=world_size)) == expected.num_data_ranks


def test_tensor_parallel_ranks_are_neighbours_and_draw_the_same_numbers() -> None:
    shape = MeshShape(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    places = [shape.place(rank) for rank in range(shape.world_size)]
    assert len(set(places)) == 16, "each place is one rank's"
    for rank in range(0, 16, 2):
        mine, theirs = places[rank], places[rank + 1]
        assert (mine.pp, mine.data, mine.tp, theirs.tp) == (theirs.pp, theirs.data, 0, 1)
        assert shape.stream(rank) == shape.stream(rank + 1)
    assert len({shape.stream(rank) for rank in range(16)}) == 8, "other data-parallel ranks and stages have others"
    assert [place.data for place in places[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_runs_of_before_keep_their_random_streams_and_ids() -> None:
    for parallel in (ParallelConfig(), ParallelConfig(strategy=FSDP, data_parallel_replicate=2)):
        assert [mesh_shape(parallel, 4).stream(rank) for rank in range(4)] == [0, 1, 2, 3]
    plain = to_plain(make_config())
    older = {
        **plain,
        "parallel": {key: plain["parallel"][key] for key in ("strategy", "zero1", "elastic", "timeout_s")},
    }
    assert config_digest(older) == config_digest(plain)
    for key in ("tensor_parallel", "pipeline_parallel", "data_parallel_replicate"):
        assert config_digest({**plain, "parallel": {**plain["parallel"], key: 2}}) != config_digest(plain)


def _gpt(**changes: Any) -> Any:
    usual = {"model": GptConfig(num_heads=4, embed_dim=32), "data": TextBytesConfig(), "train__global_batch_size": 64}
    return make_config(**{**usual, "hardware__tasks_per_node": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"parallel__tensor_parallel": 2}, (32, 1)),
        ({"parallel__tensor_parallel": 4}, (64, 1)),
        ({"parallel__tensor_parallel": 2, "parallel__strategy": FSDP, "train__micro_batch_size": 8}, (8, 4)),
        ({"parallel__data_parallel_replicate": 2, "parallel__strategy": FSDP}, (16, 1)),
    ],
)
def test_a_batch_is_divided_among_data_parallel_ranks(changes: dict[str, Any], sizes: tuple[int, int]) -> None:
    config = _gpt(**changes)
    validate(config)
    assert (config.train.micro_batch_size, config.train.grad_accum_steps) == sizes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel__tensor_parallel": 0}, ["parallel.tensor_parallel=0 must be at least 1"]),
        (
            {"parallel__tensor_parallel": 2, "parallel__pipeline_parallel": 0},
            ["parallel.pipeline_parallel=0 must be at least 1. Use 1."],
        ),
        ({"parallel__tensor_parallel": 3}, ["tensor_parallel=3 must divide world_size=4", "=2, or", "6 ranks"]),
        (
            {"parallel__tensor_parallel": 2, "parallel__pipeline_parallel": 4},
            ["tensor_parallel=2 × parallel.pipeline_parallel=4 must divide world_size=4", "tensor_parallel=1"],
        ),
        (
            {"parallel__tensor_parallel": 4, "hardware__num_nodes": 4, "hardware__tasks_per_node": 2},
            ["parallel.tensor_parallel=4 must divide the 2 ranks of a node", "Use 2."],
        ),
        (
            {"parallel__tensor_parallel": 8, "hardware__tasks_per_node": 8},
            ["parallel.tensor_parallel=8 must divide model.num_heads=4, which it splits. Use 4."],
        ),
        (
            {"parallel__tensor_parallel": 3, "hardware__tasks_per_node": 3, "model__num_heads": 3,
             "model__embed_dim": 33},
            ["must divide vocabulary of data=text_bytes=256, which it splits. Use 1."],
        ),
        (
            {"parallel__tensor_parallel": 4, "data": SyntheticTokensConfig(vocab_size=257), "model__vocab_multiple": 2},
            ["must divide vocabulary of data=synthetic_tokens=258, which it splits. Use 2."],
        ),
        (
            {"parallel__tensor_parallel": 2, "model": MlpConfig()},
            ["does not go with model=mlp: it shares layers out by", "Use model=gpt"],
        ),
        (
            {"parallel__tensor_parallel": 4, "parallel__strategy": FSDP},
            ["two data-parallel ranks or more", "Use parallel.strategy=ddp"],
        ),
        (
            {"parallel__data_parallel_replicate": 2},
            ["data_parallel_replicate=2 needs parallel=fsdp, and this is parallel=ddp", "Use parallel=hsdp"],
        ),
        (
            {"parallel__data_parallel_replicate": 4, "parallel__strategy": FSDP},
            ["data_parallel_replicate=4 must divide the 4 data-parallel ranks into groups of two or more", "Use 2."],
        ),
        (
            {"parallel__data_parallel_replicate": 2, "parallel__strategy": FSDP, "parallel__tensor_parallel": 2},
            ["must divide the 2 data-parallel ranks", "Use 1."],
        ),
        (
            {"parallel__tensor_parallel": 2, "train__logical_ranks": 4},
            ["train.logical_ranks=4 does not go with parallel.tensor_parallel=2: it needs the whole model"],
        ),
        (
            {"parallel__tensor_parallel": 2, "parallel__zero1": True},
            ["parallel.zero1=true does not go with parallel.tensor_parallel=2: it shares out whole weights"],
        ),
        (
            {"parallel__tensor_parallel": 2, "train__compile": True, "train__recompute": Recompute.budget},
            ["train.recompute=budget does not go with parallel.tensor_parallel=2", "Use train.recompute=full"],
        ),
        (
            {"parallel__tensor_parallel": 2, "train__compile": True, "hardware__gpus_per_node": 4,
             "train__compile_mode": CompileMode.max_autotune},
            ["train.compile_mode=max_autotune: it would capture messages", "Use train.compile_mode=default, or"],
        ),
        (
            {"parallel__tensor_parallel": 2, "train__channels_last": True},
            ["train.channels_last=true does not go with parallel.tensor_parallel=2: weights in that order"],
        ),
        (
            {"parallel__tensor_parallel": 2, "train__main": "mine.main", "trust": ["mine"]},
            ["parallel.tensor_parallel=2 does not go with train.main=mine.main: it is part of the shared loop"],
        ),
        (
            {"parallel__tensor_parallel": 2, "train__global_batch_size": 63},
            ["global_batch_size=63 must be a multiple of data-parallel ranks=2", "Use 64."],
        ),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    problems = "\n".join(find_problems(_gpt(**changes)))
    for word in words:
        assert word in problems, problems


@pytest.mark.parametrize(
    ("changes", "legal"),
    [({"parallel__tensor_parallel": 2, "train__ema_decay": 0.9}, True),
     ({"parallel__tensor_parallel": 2, "parallel__strategy": Strategy.fsdp, "train__ema_decay": 0.9}, True),
     ({"parallel__strategy": Strategy.fsdp, "train__ema_decay": 0.9}, True),
     ({"parallel__tensor_parallel": 4, "train__logical_ranks": None}, True),
     ({"parallel__tensor_parallel": 2, "train__compile": True}, True),
     ({"parallel__tensor_parallel": 2, "train__compile": True, "train__compile_scope": CompileScope.blocks,
       "train__recompute": Recompute.full}, True)],
)  # fmt: skip
def test_what_is_not(changes: dict[str, Any], legal: bool) -> None:
    assert (list(find_problems(_gpt(**changes))) == []) is legal


def test_the_nearest_divisor() -> None:
    assert [nearest_divisor(12, wanted) for wanted in (1, 5, 7, 8, 11, 40)] == [1, 4, 6, 6, 12, 12]
    assert nearest_divisor(12, 4, lambda count: count % 2 == 1) == 3
