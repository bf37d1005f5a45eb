"""Real ranks over gloo, the last of them slow on purpose: it is named, with what is slow in it, and told everywhere."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.observe.straggler_log import MOST_SHOWN, Straggler, StragglerLog, Verdict, read_stragglers
from hpc_trainer.observe.stragglers import StragglersAbility
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.metrics import SPEED, read_metrics
from hpc_trainer.record.reading import read_json
from tests.unit.observe.stragglers.slow_child import SLOW_S
from tests.unit.record.builders import make_config
from tests.unit.training.ranks import has_long, play_jobs

CNN = ("experiment=digits", "model=cnn", "train.global_batch_size=48")
GPT = ("experiment=gpt_bytes", "model.num_layers=2", "model.embed_dim=16", "data.seq_len=16", "data.eval_fraction=0.01",
       "train.global_batch_size=12")  # fmt: skip
COMMON = ("schedule.warmup_steps=0", "train.eval_every_steps=0", "checkpoint.every_steps=1000",
          "monitor.log_every_steps=3", "monitor.heartbeat_every_s=0")  # fmt: skip
KINDS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "ddp_data": ("data", CNN),
    "counted_data": ("data", CNN),
    "ddp_accumulated": ("compute", (*CNN, "train.grad_accum_steps=2")),
    "fsdp_data": ("data", (*GPT, "parallel=fsdp")),
    "fsdp_compute": ("compute", (*GPT, "parallel=fsdp")),
    "local_sgd": ("compute", (*CNN, "parallel.sync=post_local_sgd", "parallel.sync_every_steps=3")),
    "logical": ("data", (*CNN, "train.logical_ranks=2")),
    "off": ("compute", (*CNN, "train.grad_accum_steps=2", "monitor.straggler_factor=0")),
}
SHORT = ("ddp_data", "ddp_accumulated", "off")
"""What `make test` plays."""
pytestmark = pytest.mark.dist


def _job(name: str) -> dict[str, Any]:
    kind, words = KINDS[name]
    counts = name.startswith("counted")
    return {
        "name": name,
        "fault": kind,
        "counts": counts,
        "words": [*words, *COMMON, "train.num_steps=30"],
        "look_every_s": 1e-6,
    }


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    kinds = KINDS if has_long(request) else SHORT
    child = Path(__file__).with_name("slow_child.py")
    ends = play_jobs(folder, 2, "slow", [_job(name) for name in kinds], child=child)
    assert [code for code, _ in ends] == [0, 0], ends[0][1][-4000:] + ends[1][1][-4000:]
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in KINDS if name != "off"],
)
def test_the_slow_rank_is_named(name: str, played: Path) -> None:
    paths = RunPaths(played / name)
    found = read_stragglers(paths)
    assert found
    assert {(each.rank, each.node, each.is_slow) for each in found} == {(1, socket.gethostname(), True)}
    last = found[-1]
    assert last.is_data == (KINDS[name][0] == "data")
    assert last.factor > 1.3
    assert last.own_s > 0.9 * SLOW_S
    beat = read_json(paths.heartbeat) or {}
    assert beat["remarks"]["stragglers"].startswith(f"rank 1 on {last.node} takes ")


def test_nobody_looks_where_it_is_off_and_the_bits_are_the_same(played: Path) -> None:
    paths = RunPaths(played / "off")
    assert not paths.stragglers.exists()
    assert "remarks" not in (read_json(paths.heartbeat) or {})
    off, on = (_losses(played / name) for name in ("off", "ddp_accumulated"))
    assert off == on
    assert len(on) == 11, "ten lines and an evaluation"


def _losses(folder: Path) -> list[dict[str, float]]:
    varying = {"time", *SPEED}
    lines = read_metrics(RunPaths(folder).metrics)
    return [{key: value for key, value in line.items() if key not in varying} for line in lines]


def test_lines_are_read_back(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.stragglers.write_text('{"rank": 1}\nno line\n')
    faults: Any = []
    assert read_stragglers(paths, faults) == []
    assert len(faults) == 2
    said = Straggler(
        time=1.0, attempt=0, step=90, rank=3, node="n2", is_slow=True, factor=1.834, own_s=0.18, others_s=0.1,
        is_data=False,
    )  # fmt: skip
    assert said.in_words() == (
        "rank 3 on n2 takes 1.83 times as long as the others (180 ms of a step, 100 ms): in its forward and "
        "backward pass"
    )


def test_a_remark_of_many_slow_ranks_is_short() -> None:
    ability, said = StragglersAbility(make_config()), list[str | None]()
    ability._log, ability._nodes, ability._slow = StragglerLog(RunPaths(Path("/nowhere"))), ["n1"] * 500, {}
    run: Any = SimpleNamespace(attempt=0, remark=lambda name, text: said.append(text))
    ability._run = run
    for rank in range(500):
        ability._say(3, Verdict(rank=rank, is_slow=True, factor=2.0, own_s=0.2, others_s=0.1, is_data=False))
    assert said[-1] is not None
    assert said[-1].endswith(f"; and {500 - MOST_SHOWN} more rank(s)")
    assert len(said[-1]) < 1_000
