"""How a batch is divided among ranks or logical ranks, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import from_plain, to_plain
from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.schema.cluster import Mps
from hpc_trainer.features.early_stop import EarlyStopConfig
from tests.unit.record.builders import make_config, make_spec


def _sizes(**changes: Any) -> tuple[int | None, int | None]:
    config = make_config(**{"train__global_batch_size": 64, **changes})
    validate(config)
    return config.train.micro_batch_size, config.train.grad_accum_steps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pool__per_gpu": 2, "hardware__gpus_per_node": 0}, "Leave it out: pool.per_node=2 runs that many"),
        ({"pool__per_gpu": 2, "hardware__gpus_per_node": 4}, "Use hardware.num_nodes=1 hardware.gpus_per_node=1, or"),
        ({"pool__per_gpu": 2, "pool__per_node": 5}, "pool.per_node=5 must be a multiple of pool.per_gpu=2"),
        ({"pool__per_gpu": 2, "pool__per_node": 5}, "Use pool.per_node=4 or 6."),
        ({"pool__per_gpu": 4, "pool__per_node": 3}, "Use pool.per_node=4."),
        ({"pool__per_gpu": 0}, "pool.per_gpu=0"),
        ({"pool__per_gpu": 2, "pool__jobs": None}, "pool.per_gpu=2 is for pool.jobs=..., and has no effect"),
        ({"pool__mps": Mps.off, "pool__jobs": None}, "pool.mps=off is for pool.jobs=..., and has no effect"),
    ],
)
def test_only_runs_with_one_gpu_share_one(changes: dict[str, Any], words: str) -> None:
    one_gpu = {"hardware__gpus_per_node": 1, "pool__jobs": 2}
    assert list(find_problems(make_config(**one_gpu, pool__per_gpu=2, pool__per_node="auto"))) == []
    assert any(words in line for line in find_problems(make_config(**{**one_gpu, **changes})))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_with_logical_ranks_the_sizes_do_not_depend_on_the_ranks(ranks: int) -> None:
    assert _sizes(train__logical_ranks=8, hardware__tasks_per_node=ranks) == (8, 1)
    assert _sizes(train__logical_ranks=8, train__grad_accum_steps=4, hardware__tasks_per_node=ranks) == (2, 4)


@pytest.mark.parametrize(("ranks", "accum"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_with_a_fixed_micro_batch_accumulation_keeps_the_global_batch(ranks: int, accum: int) -> None:
    assert _sizes(train__micro_batch_size=8, hardware__tasks_per_node=ranks, parallel__elastic=True) == (8, accum)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_batch_for_each_rank(ranks: int) -> None:
    changes = {"train__global_batch_size": 16, "hardware__tasks_per_node": ranks}
    config = make_config(**changes, train__batch_per_rank=True, train__grad_accum_steps=2)
    validate(config)
    train = config.train
    assert (train.global_batch_size, train.micro_batch_size, train.grad_accum_steps) == (16 * ranks, 8, 2)
    validate(config)  # as a worker may: not multiplied again
    assert config.train.global_batch_size == 16 * ranks
    # The same run as one whose batch is written out.
    plain = make_config(**{**changes, "train__global_batch_size": 16 * ranks}, train__grad_accum_steps=2)
    validate(plain)
    assert config_digest(to_plain(config)) == config_digest(to_plain(plain))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__batch_per_rank": True, "train__logical_ranks": 2}, ["batch_per_rank=true", "logical_ranks=null"]),
        ({"train__batch_per_rank": True, "parallel__elastic": True}, ["batch_per_rank=true", "elastic=false"]),
        (
            {"train__batch_per_rank": True, "train__micro_batch_size": 5, "hardware__tasks_per_node": 2},
            ["global_batch_size=64 must be a multiple of train.micro_batch_size=5. Use 65"],
        ),
        (
            {"train__batch_per_rank": True, "train__global_batch_size": 1000, "hardware__tasks_per_node": 2},
            ["global_batch_size=1000 × 2 ranks must be at most the 1437", "Use 718."],
        ),
        ({"train__logical_ranks": 3}, ["logical_ranks=3", "power of two", "Use 2"]),
        ({"train__logical_ranks": 0}, ["logical_ranks=0", "Use 1"]),
        ({"train__logical_ranks": -4}, ["logical_ranks=-4", "Use 1"]),
        ({"train__logical_ranks": 2, "hardware__tasks_per_node": 4}, ["logical_ranks=2", "world_size=4", "Use 4"]),
        ({"train__logical_ranks": 8, "hardware__tasks_per_node": 3}, ["3 ranks", "1, 2, 4", "with 2"]),
        ({"train__logical_ranks": 2, "train__deterministic": False}, ["train.deterministic=true"]),
        ({"train__logical_ranks": 2, "train__main": "mine.main", "trust": ["mine"]}, ["train.main=mine.main"]),
        ({"train__logical_ranks": 8, "train__global_batch_size": 60}, ["of logical_ranks=8", "Use 64"]),
        (
            {"train__logical_ranks": 4, "train__micro_batch_size": 4, "train__grad_accum_steps": 2},
            ["logical_ranks=4 = 32", "Use 32"],
        ),
        ({"train__ema_decay": 1.0}, ["train.ema_decay=1", "(0, 1)", "0.999"]),
        ({"train__ema_decay": 0.0}, ["train.ema_decay=0"]),
        ({"train__early_stop__patience": 0, "train__eval_every_steps": 5}, ["patience=0", "Use 3"]),
        ({"train__early_stop__patience": 2}, ["eval_every_steps=0", "Use train.eval_every_steps="]),
        ({"data__max_shift": 8}, ["data.max_shift=8", "Use 7"]),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    config = make_config(**{"train__global_batch_size": 64, **changes})
    problems = "\n".join(find_problems(config))
    for word in words:
        assert word in problems


def _digest(**changes: Any) -> str:
    config = make_config("cluster=slurm", **{"train__global_batch_size": 64, **changes})
    validate(config)
    return config_digest(to_plain(config))


WORLDS: list[dict[str, Any]] = [
    {"hardware__tasks_per_node": 2}, {"hardware__tasks_per_node": 4}, {"hardware__cpus_per_task": 3},
    {"hardware__num_nodes": 2}, {"hardware__num_nodes": 2, "hardware__tasks_per_node": 2},
]  # fmt: skip


@pytest.mark.parametrize("changes", WORLDS)
@pytest.mark.parametrize(
    "kind",
    [
        {"parallel__elastic": True},
        {"train__logical_ranks": 8},
        {"train__micro_batch_size": 8, "parallel__elastic": True},
    ],
)
def test_another_number_of_ranks_is_the_same_run_where_it_may_change(
    kind: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert _digest(**kind, **changes) == _digest(**kind)
    assert _digest(**kind) != _digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"train__logical_ranks": 4}, {"train__grad_accum_steps": 2}, {"hardware__gpus_per_node": 1},
        {"hardware__gpu_type": "a100"}, {"train__ema_decay": 0.9}, {"data__max_shift": 1},
        {"train__early_stop": EarlyStopConfig(patience=2), "train__eval_every_steps": 5},
    ],
)  # fmt: skip
def test_what_still_makes_another_run_with_logical_ranks(changes: dict[str, Any]) -> None:
    kind = {"train__logical_ranks": 8}
    assert _digest(**{**kind, **changes}) != _digest(**kind)


def test_a_spec_with_another_number_of_ranks_has_the_same_id_and_comes_back_typed() -> None:
    one, two = (
        make_spec(
            parallel__elastic=True,
            hardware__tasks_per_node=ranks,
            train__early_stop__metric="eval_accuracy",
            train__early_stop__patience=2,
            train__eval_every_steps=5,
        )
        for ranks in (1, 2)
    )
    assert (one.run_id, one.digest) == (two.run_id, two.digest)
    assert one.shape != two.shape
    assert from_plain(two.config) == two.typed()
    assert two.typed().train.early_stop.metric == "eval_accuracy"
