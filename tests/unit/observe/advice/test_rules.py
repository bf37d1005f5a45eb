"""Each rule by itself: what it says at its threshold, nothing below; what it proposes is legal, and composes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.config.rules.validate import validate
from hpc_trainer.data.images import ImageShardsConfig
from hpc_trainer.observe import facts
from hpc_trainer.observe.advice import RULES, Advice, AdvisedRun, _faults_of, advice_of, next_command, with_values
from hpc_trainer.observe.facts import Facts, Pace, RankUse, gather, pace_of
from hpc_trainer.observe.rules_of_resources import _idle_among
from hpc_trainer.observe.rules_of_time import _not_staged
from hpc_trainer.observe.straggler_log import Straggler
from hpc_trainer.record.journal import Attempt
from hpc_trainer.record.measured import Figures, Link
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.slurm.limits import Limits, NodeGroup, Partition
from tests.composed import composed
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk

ROOT = Path(__file__).parents[4]
SMALL = ("experiment=digits", "cluster=local")
SLURM = ("experiment=digits", "cluster=slurm")
OWN_LOOP = ("train.main=tests.mine.main", "trust=[tests]")
GPU = ("experiment=gpt_bytes", "cluster=slurm", "hardware=gpu_x1", "hardware.gpu_type=a100", "precision=bf16")
STEADY = Pace(steps=1000, seconds=100.0, wait_s=1.0, lines=100)
GB = 1e9
SLOW = Straggler(
    time=5.0, attempt=0, step=100, rank=1, node="n7", is_slow=True, factor=2.0, own_s=0.1, others_s=0.05, is_data=False
)


def facts_of(words: tuple[str, ...] = SMALL, *, attempts: int = 1, cause: str = "done", **known: Any) -> Facts:
    """Facts of a complete run of 1,000 steps."""
    spec = make_spec(*words)
    told = [
        Attempt(
            attempt=number, job_id="5", restart_count=number, node="n1", pid=1, start_time=100.0 * number,
            executor=spec.config["cluster"]["executor"], end_time=100.0 * number + 100, cause=cause,
            state=RunState.COMPLETED,
        )
        for number in range(attempts)
    ]  # fmt: skip
    run = RunStatus(
        spec=spec, state=RunState.COMPLETED, step=1000, attempts=told, job_id="5", cause=cause, node="n1", metrics={},
        steps_per_s=None, eta_s=None, age_s=None, num_steps=1000,
    )  # fmt: skip
    return Facts(run=run, config=spec.typed(), **{"pace": STEADY, **known})


def rank(**known: Any) -> RankUse:
    """A rank that works."""
    usual: dict[str, Any] = {
        "name": "rank 0",
        "node": "n1",
        "samples": 20,
        "cpus": 0.97,
        "most_cpus": 1.0,
        "cpus_allowed": 1,
    }
    return RankUse(**{**usual, **known})


def gpu_memory(activations: float, others: float, limit: float = 80.0) -> dict[str, float]:
    return {"activations": activations * GB, "peak": (activations + others) * GB, "limit": limit * GB}


def waiting(share: float, step_ms: float = 100.0) -> Pace:
    return Pace(steps=1000, seconds=step_ms, wait_s=share * step_ms, lines=100)


def spent(**seconds: float) -> dict[str, float]:
    return {"step": 100.0, "start_up": 1.0, **seconds}


LINKS = Figures(
    hardware="gpu_x2", day="2026-11-20", num_nodes=1, links={"node": Link(2, 1e-5, 1e9)}, write_bytes_per_s=1e8
)
SENDS: dict[str, Any] = {"measured": LINKS, "memory": {"gradients": 4e7}}

# Name of the rule, words, facts that show the fault, what is to be said, the gain; facts just below the threshold.
CASES: list[tuple[str, tuple[str, ...], dict[str, Any], str, float, dict[str, Any]]] = [
    ("data-workers", (*SMALL, "hardware.cpus_per_task=4"), {"pace": waiting(0.5)}, "data.num_workers=2", 0.5,
     {"pace": waiting(0.15)}),
    ("data-workers", SMALL, {"pace": waiting(0.8), "ranks": [rank(cpus=0.3)]}, "data.num_workers=5", 0.8,
     {"pace": Pace(steps=9, seconds=0.9, wait_s=0.8, lines=9)}),
    ("data-cpus", (*SMALL, "data.num_workers=2", "hardware.cpus_per_task=2"),
     {"pace": waiting(0.6), "ranks": [rank(cpus=1.95, cpus_allowed=2)]},
     "hardware.cpus_per_task=6 data.num_workers=6", 0.6,
     {"pace": waiting(0.1), "ranks": [rank(cpus=1.95, cpus_allowed=2)]}),
    ("idle-workers", (*SMALL, "data.num_workers=16"), {"ranks": [rank()]}, "data.num_workers=2", 0.875,
     {"ranks": [rank(most_cpus=5.0)]}),
    ("data-shards", ("model=resnet18", "data=image_folder", "data.path={pictures}", "cluster=local"),
     {"pace": waiting(0.5)}, "hpc-trainer data prepare images", 0.5, {"pace": waiting(0.1)}),
    ("saves-wait", (*SMALL, "checkpoint.asynchronous=false"), {"spent": spent(save_stall=25.0)},
     "checkpoint.asynchronous=true", 0.18, {"spent": spent(save_stall=5.0)}),
    ("saves-often", (*SMALL, "checkpoint.every_steps=1"), {"spent": spent(save_stall=50.0)}, "checkpoint.every=auto",
     0.333, {"spent": spent(save_stall=5.0)}),
    ("saves-seldom", (*SMALL, "checkpoint.every_steps=1000"),
     {"spent": spent(redone=50.0, save_stall=0.1), "attempts": 3},
     "checkpoint.every_steps=19", 0.327, {"spent": spent(redone=5.0), "attempts": 3}),
    ("evaluations", (*SMALL, "train.eval_every_steps=5"), {"spent": spent(evaluation=100.0)},
     "train.eval_every_steps=95", 0.475, {"spent": spent(evaluation=30.0)}),
    ("log-lines", (*SMALL, "monitor.log_every_steps=1"), {"pace": Pace(steps=2000, seconds=4.0, wait_s=0, lines=2000)},
     "monitor.log_every_steps=500", 0.15, {"pace": Pace(steps=2000, seconds=200.0, wait_s=0, lines=2000)}),
    ("compile-time", (*SMALL, "train.compile=true"), {"spent": {"step": 20.0, "compile": 80.0}}, "train.compile=false",
     0.7, {"spent": {"step": 80.0, "compile": 20.0}}),
    ("compile-time", ("experiment=gpt_bytes", "cluster=local", "train.compile=true"),
     {"spent": {"step": 20.0, "compile": 80.0}}, "train.compile_scope=blocks", 0.6,
     {"spent": {"step": 80.0, "compile": 4.0}}),
    ("time-limit-short", ("experiment=digits", "cluster=slurm", "hardware.time_limit_min=5"),
     {"spent": spent(start_up=60.0), "attempts": 3, "cause": "timeout"}, "hardware.time_limit_min=10", 0.1875,
     {"spent": spent(start_up=60.0), "attempts": 1, "cause": "timeout"}),
    ("all-reduce", (*SLURM, "hardware=gpu_x2"), SENDS, "parallel.comm_hook=bf16", 0.2,
     {"measured": LINKS, "memory": {"gradients": 1.9e7}}),
    ("recompute", (*GPU, "train.recompute=full"), {"memory": gpu_memory(10, 10)}, "train.recompute=none", 0.25,
     {"memory": gpu_memory(30, 10)}),
    ("micro-batch", (*GPU, "train.global_batch_size=64", "train.micro_batch_size=4"),
     {"memory": gpu_memory(5, 10), "ranks": [rank(utilisation=0.6)]},
     "train.micro_batch_size=32 train.grad_accum_steps=2", 0.35, {"memory": gpu_memory(40, 10)}),
    ("precision", (*GPU[:3], "hardware.gpu_type=h100", "precision=fp32"),
     {}, "precision=bf16", 0.5, {"ranks": [rank(utilisation=0.3)], "pace": waiting(0.5)}),
    ("host-bound", GPU, {"ranks": [rank(utilisation=0.3)]},
     "train.compile=true train.compile_mode=reduce_overhead", 0.7, {"ranks": [rank(utilisation=0.8)]}),
    ("straggler", ("experiment=digits", "cluster=slurm", "hardware=gpu_x2", "hardware.num_nodes=2"),
     {"stragglers": [SLOW]}, "hardware.exclude=n7", 0.5,
     {"stragglers": [dataclasses.replace(SLOW, own_s=0.052)]}),
    ("held-back", GPU, {"ranks": [rank(utilisation=0.9, throttle={"hw_thermal": 0.6}, clock_share=0.7)]},
     "hardware.exclude=n1", 0.3, {"ranks": [rank(utilisation=0.9, throttle={"hw_thermal": 0.1}, clock_share=0.7)]}),
    ("held-back", GPU,
     {"ranks": [rank(utilisation=0.9, throttle={"power_cap": 0.9}, clock_share=0.5, power_limit_w=300)]},
     "hardware.exclude=n1", 0.5,
     {"ranks": [rank(utilisation=0.9, throttle={"power_cap": 0.9}, clock_share=0.75)]}),
    ("idle-ranks", (*SLURM, "hardware=gpu_x8", *OWN_LOOP),
     {"ranks": [rank(name=f"rank {each}", utilisation=0.8 if each < 3 else 0.0) for each in range(8)]},
     "hardware.gpus_per_node=4 train.micro_batch_size=16", 0.5,
     {"ranks": [rank(name=f"rank {each}", utilisation=0.8 if each < 3 else 0.05) for each in range(8)]}),
    ("idle-cpus", (*SLURM, "hardware.cpus_per_task=8"), {"ranks": [rank(cpus_allowed=8)]}, "hardware.cpus_per_task=2",
     0.75, {"ranks": [rank(most_cpus=3.0, cpus_allowed=8)]}),
    ("host-memory", (*SLURM, "hardware.mem_gb_per_node=64"), {"ranks": [rank(most_rss=1 * GB)]},
     "hardware.mem_gb_per_node=3", 0.953, {"ranks": [rank(most_rss=20 * GB)]}),
    ("time-limit-long", ("experiment=digits", "cluster=slurm", "hardware.time_limit_min=1440"), {"needs_s": [1200.0]},
     "hardware.time_limit_min=45", 0.969, {"needs_s": [30_000.0]}),
    ("short-runs", ("experiment=digits", "cluster=slurm"), {"needs_s": [20.0] * 12}, "local.max_parallel=N", 0.917,
     {"needs_s": [20.0] * 9}),
]  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that data=image_folder takes."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    for split in ("train", "eval"):
        for kind in ("cats", "dogs"):
            (folder / split / kind).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / split / kind / "1.png")
    return folder


def _said(rule: str, facts: Facts) -> list[Advice]:
    return [each for each in advice_of(facts) if each.rule == rule]


@pytest.mark.parametrize(
    ("rule", "words", "fault", "expected", "gain", "below"),
    CASES,
    ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)],
)
def test_a_rule_names_its_fault_and_a_legal_change(
    rule: str, words: tuple[str, ...], fault: dict[str, Any], expected: str, gain: float, below: dict[str, Any],
    pictures: Path,
) -> None:  # fmt: skip
    words = tuple(word.format(pictures=pictures) for word in words)
    (found,) = _said(rule, facts_of(words, **fault))
    assert expected in (" ".join(found.set) or found.do)
    assert found.gain.share == pytest.approx(gain, abs=0.001)
    assert _said(rule, facts_of(words, **below)) == []
    validate(composed([*words, *found.set]))  # as `plan` would


LINES = (
    "a step waits 50 of 100 ms for its batch (50%). data.num_workers=2: up to 2x faster",
    "a step waits 80 of 100 ms for its batch (80%). data.num_workers=5: up to 5x faster",
    "a step waits 60 of 100 ms for its batch (60%), and 1.9 of its 2 core(s) are busy. hardware.cpus_per_task=6 "
    "data.num_workers=6: up to 2.5x faster",
    "16 loader processes, and the rank with all of them keeps 1 core(s) busy at the most. data.num_workers=2: about "
    "88% less loader processes and their memory",
    "a step waits 50 of 100 ms for its batch (50%), and each picture is a file of its own. hpc-trainer data prepare "
    "images {pictures} --to SHARDS --size 256, then data=image_shards: up to 2x faster",
    "training stopped for its checkpoints 20% of the time (25 s). checkpoint.asynchronous=true: about 1.22x faster",
    "training stopped for its checkpoints 33% of the time (50 s), with one every 1 steps. checkpoint.every=auto: "
    "about 1.5x faster",
    "33% of the training was steps that were done again (50 s in 3 attempts), with a checkpoint every 1000 steps. "
    "checkpoint.every_steps=19: about 1.49x faster",
    "evaluations took 50% of the time (100 s), with one every 5 steps. train.eval_every_steps=95: about 1.9x faster",
    "a line of metrics every 2 ms, each of which waits for the loss. monitor.log_every_steps=500: about 1.18x faster",
    "compilation took 80% of the whole run (80 s). train.compile=false: about 3.33x faster",
    "compilation took 80% of the whole run (80 s). train.compile_scope=blocks: up to 2.5x faster",
    "the time limit of 5 min ended 3 attempts, and starts took 38% of the time. hardware.time_limit_min=10: about "
    "1.23x faster",
    "the all-reduce of 40 MB of gradients takes 40% of a step of 100 ms, less what computation hides: 1000 MB/s among "
    "2 ranks (hardware check gpu_x2 --run, 2026-11-20). parallel.comm_hook=bf16: up to 1.25x faster",
    "activations are computed twice, and 25% of the memory is used; without it 44% would be. train.recompute=none: "
    "about 1.33x faster",
    "19% of the GPU's memory is used, and a step takes 16 passes of 4 samples. train.micro_batch_size=32 "
    "train.grad_accum_steps=2: up to 1.54x faster",
    "computes in fp32 on h100, which has bf16. precision=bf16: up to 2x faster",
    "the GPU is busy 30% of the time, waits for data 1%: the host does the rest. train.compile=true "
    "train.compile_mode=reduce_overhead: up to 3.33x faster",
    "rank 1 on n7 takes 2 times as long as the others (100 ms of a step, 50 ms): in its forward and backward pass. "
    "hardware.exclude=n7: up to 2x faster",
    "the GPU of rank 0 on n1 is held back by heat or its power supply 60% of the time, and its clock at 70% of its "
    "highest. hardware.exclude=n1: up to 1.43x faster",
    "the GPU of rank 0 on n1 is at its power limit of 300 W 90% of the time, and its clock at 50% of its highest. "
    "hardware.exclude=n1: up to 2x faster",
    "asked for 8 GPUs, used 3: nothing was done by rank 3, rank 4, rank 5, rank 6, rank 7. hardware.gpus_per_node=4 "
    "train.micro_batch_size=16: about 50% fewer GPUs",
    "asked for 8 cores a rank, 1.0 were busy at the most. hardware.cpus_per_task=2: about 75% fewer CPUs",
    "asked for 64 GB (mem_gb_per_node), 1 were used at the most. hardware.mem_gb_per_node=3: about 95% less host "
    "memory",
    "the time limit is 1440 min, it needed 20 min. hardware.time_limit_min=45: about 97% less time limit (it starts "
    "sooner: backfill)",
    "12 runs of 20 s, each a job of its own. Run them side by side in one job, by the same submit with "
    "cluster=local local.max_parallel=N inside it: about 92% fewer jobs",
)  # fmt: skip
"""What a person reads of each of `CASES`: all figures, and whether the gain is a bound."""


def test_the_figures_of_each_line_are_those_of_the_run(pictures: Path) -> None:
    for (rule, words, fault, *_), line in zip(CASES, LINES, strict=True):
        (found,) = _said(rule, facts_of(tuple(word.format(pictures=pictures) for word in words), **fault))
        assert found.line == f"{rule}: {line}".format(pictures=pictures)


def test_a_line_of_metrics_costs_more_where_others_use_the_core() -> None:
    """A line every 100 ms is nothing for a whole core, and too much for a fiftieth of one."""
    slow = Pace(steps=2000, seconds=200.0, wait_s=0, lines=2000)
    words = ("monitor.log_every_steps=1",)
    assert len(_said("log-lines", facts_of((*SMALL, *words), pace=slow, ranks=[rank(cpus=0.02)]))) == 1
    assert _said("log-lines", facts_of((*SMALL, *words), pace=slow, ranks=[rank(cpus=1.0)])) == []
    assert _said("log-lines", facts_of((*GPU, *words), pace=slow, ranks=[rank(cpus=0.02)])) == [], "the GPU trains"


def test_a_time_limit_is_one_that_a_person_would_ask_for() -> None:
    """Minutes by fives, hours by halves, days by halves."""
    for need_s in range(60, 86_400 * 3, 1800):
        words = ("experiment=digits", "cluster=slurm", "hardware.time_limit_min=100000")
        (found,) = _said("time-limit-long", facts_of(words, needs_s=[float(need_s)]))
        limit = int(found.set[0].partition("=")[2])
        assert limit % (5 if limit < 60 else 30 if limit < 1440 else 720) == 0, limit
        assert need_s / 60 < limit, "the run fits"


def test_a_limit_that_is_needed_to_the_minute_is_proposed() -> None:
    """Half as much again as 20 minutes, with the time for the last save in them, is 30 minutes and not 45."""
    words = ("experiment=digits", "cluster=slurm", "hardware.time_limit_min=1440")
    lead_s = facts_of(words).run.spec.shape.signal_lead_s
    (found,) = _said("time-limit-long", facts_of(words, needs_s=[20 * 60.0 - lead_s]))
    assert found.set == ("hardware.time_limit_min=30",)


def test_saves_at_the_ends_of_attempts_count_as_saves() -> None:
    """Forty saves of a second need no longer interval than 50 s; ten of four seconds would."""
    words = (*SMALL, "checkpoint.every_steps=100")
    seen: dict[str, Any] = {
        "pace": Pace(steps=1000, seconds=500.0, wait_s=1.0, lines=100), "spent": spent(step=300.0, save_stall=40.0),
    }  # fmt: skip
    assert _said("saves-often", facts_of(words, attempts=30, **seen)) == []
    (found,) = _said("saves-often", facts_of(words, attempts=1, **seen))
    assert found.set == ("checkpoint.every=auto",)


def test_saves_are_compared_with_the_write_speed_that_was_measured() -> None:
    words = (*SMALL, "checkpoint.asynchronous=false")
    held = {"weights": 1e8, "optimizer": 2e8, "gradients": 1e8}
    (found,) = _said("saves-wait", facts_of(words, spent=spent(save_stall=25.0), measured=LINKS, memory=held))
    assert "(25 s); 300 MB take 3 s to write here (hardware check gpu_x2 --run, 2026-11-20)" in found.line
    (found,) = _said("saves-wait", facts_of(words, spent=spent(save_stall=25.0), measured=LINKS, memory={}))
    assert "to write here" not in found.line
    no_disk = dataclasses.replace(LINKS, write_bytes_per_s=None)
    (found,) = _said("saves-wait", facts_of(words, spent=spent(save_stall=25.0), measured=no_disk, memory=held))
    assert "to write here" not in found.line


@pytest.mark.parametrize(
    "words",
    [(), ("hardware=gpu_x2", "parallel.comm_hook=bf16"), ("hardware=gpu_x2", "hardware.num_nodes=2"),
     ("hardware=gpu_x2", "parallel=fsdp")],
)  # fmt: skip
def test_gradients_that_are_not_sent_so_are_nothing_to_say(words: tuple[str, ...]) -> None:
    """One rank; half the bytes already; links between nodes, which were not measured; other collectives."""
    assert _said("all-reduce", facts_of((*SLURM, *words), **SENDS)) == []


def test_faults_of_the_hardware_are_notes() -> None:
    faulty = dataclasses.replace(LINKS, problems={"clocks": "+9 s. Tell the site", "internet": "no"})
    assert _faults_of(facts_of(measured=faulty)) == [
        "clocks: +9 s. Tell the site (hardware check gpu_x2 --run, 2026-11-20)"
    ]
    assert _faults_of(facts_of()) == []


def test_steps_that_were_done_again_count_in_a_run_that_was_interrupted_and_lost_more_than_a_second() -> None:
    words = (*SMALL, "checkpoint.every_steps=1000")
    assert _said("saves-seldom", facts_of(words, spent=spent(redone=50.0))) == [], "nothing interrupted it"
    assert _said("saves-seldom", facts_of(words, attempts=3, spent={"step": 4.0, "redone": 0.9})) == []
    slow = Pace(steps=10, seconds=1000.0, wait_s=1.0, lines=10)
    (found,) = _said("saves-seldom", facts_of(words, attempts=3, spent=spent(redone=50.0), pace=slow))
    assert found.set == ("checkpoint.every_steps=1",), "no step is longer than the best interval"


def test_shards_are_staged_where_a_rank_waits_for_them_with_cores_to_spare() -> None:
    def found(cpus: float = 0.3, stage_dir: str | None = None) -> int:
        facts = facts_of(pace=waiting(0.5), ranks=[rank(cpus=cpus)])
        data = ImageShardsConfig(path="shards", stage_dir=stage_dir)
        return len([*_not_staged(dataclasses.replace(facts, config=dataclasses.replace(facts.config, data=data)))])

    assert found() == 1
    assert found(stage_dir="$TMPDIR") == 0
    assert found(cpus=0.99) == 0
    assert [*_not_staged(facts_of(pace=waiting(0.5)))] == [], "no shards"


def test_memory_that_keeps_nobody_from_the_other_gpus_is_nothing_to_say() -> None:
    """A node of eight GPUs with 2 TB has 256 GB for each."""
    used = [rank(most_rss=1 * GB, utilisation=0.9)]
    assert _said("host-memory", facts_of((*GPU, "hardware.mem_gb_per_gpu=256"), ranks=used)) == []
    (found,) = _said("host-memory", facts_of((*GPU, "hardware.mem_gb_per_gpu=300"), ranks=used))
    assert found.set[0].startswith("hardware.mem_gb_per_gpu=")


def test_a_compilation_of_less_than_five_seconds_is_not_worth_a_word() -> None:
    words = (*SMALL, "train.compile=true")
    assert _said("compile-time", facts_of(words, spent={"step": 1.0, "compile": 4.5})) == []
    assert len(_said("compile-time", facts_of(words, spent={"step": 1.0, "compile": 5.5}))) == 1


def test_a_rank_is_idle_only_beside_others_that_work() -> None:
    def said(*utilisation: float, words: tuple[str, ...] = OWN_LOOP, ranks: int = 2) -> list[Advice]:
        words = (*SLURM, f"hardware=gpu_x{ranks}", *words)
        used = [rank(name=f"rank {number}", utilisation=each) for number, each in enumerate(utilisation)]
        return _said("idle-ranks", facts_of(words, ranks=used))

    (found,) = said(0.8, 0.0)
    assert found.seen == "asked for 2 GPUs, used 1: nothing was done by rank 1"
    assert "hardware.gpus_per_node=1" in found.set
    assert said(0.0, 0.0) == [], "the run itself does nothing"
    assert said(0.8, 0.8) == []
    assert said(0.8, 0.0, ranks=8) == [], "of six nobody knows"
    assert said(0.8, 0.0, words=()) == [], "all ranks of the shared loop train"
    (both,) = said(0.8, 0.0, words=(*OWN_LOOP, "hardware.tasks_per_node=2"))
    assert {"hardware.gpus_per_node=1", "hardware.tasks_per_node=1"} <= set(both.set)


def test_without_gpus_a_rank_that_uses_no_core_is_idle() -> None:
    def idle(*cpus: float | None) -> list[str]:
        return [each.name for each in _idle_among([rank(name=str(n), cpus=each) for n, each in enumerate(cpus)])]

    assert idle(0.97, 0.04, None) == ["1"], "nobody knows of the third"
    assert idle(0.97, 0.06) == []
    assert idle(0.1, 0.04) == [], "all of them wait for something: less than a fifth of the busiest would be idle"
    assert idle(0.1, 0.01) == ["1"]


def test_every_rule_has_a_case_and_stands_in_the_docs() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(names) - {case[0] for case in CASES} - {"data-staging"} == set(), "give each a case in CASES"
    assert {case[0] for case in CASES} - set(names) == set()
    table = (ROOT / "docs/decisions/0049-advice.md").read_text()
    told = re.findall(r"^\| `([a-z-]+)` \| (.*?) \| (.*?) \|", table, re.MULTILINE)
    assert told == [(rule.name, rule.when, rule.why) for rule in RULES], "a row each, in the order of RULES"
    page = (ROOT / "docs/advise.md").read_text()
    listed = re.findall(r"`([a-z-]+)`", page[page.index("| fault |") : page.index("[Decision 0049]")])
    assert listed == names, "the table of docs/advise.md has all, in the order of RULES"


def test_a_gpu_that_was_seldom_looked_at_is_not_called_held_back() -> None:
    for samples, count in ((20, 1), (1, 0)):
        hot = rank(utilisation=0.9, throttle={"hw_thermal": 0.6}, clock_share=0.7, samples=samples)
        assert len(_said("held-back", facts_of(GPU, ranks=[hot]))) == count


def test_facts_that_nobody_knows_give_no_advice() -> None:
    assert advice_of(facts_of(pace=None)) == []
    assert advice_of(facts_of(GPU, pace=None)) == []
    assert advice_of(facts_of(GPU, pace=None, stragglers=[SLOW])) == []
    assert advice_of(facts_of((*GPU[:3], "hardware.gpu_type=h100", "precision=fp32"), pace=None)) == []


def test_what_plan_would_refuse_is_not_proposed() -> None:
    """A program of one's own has no data loader; a batch of 64 does not go over 3 ranks."""
    config = make_spec(*SMALL).typed()
    assert with_values(config, {"hardware.tasks_per_node": 3}) is None
    assert with_values(config, {"train.num_steps": 0}) is None
    assert with_values(config, {"data.num_workers": config.data.num_workers}) is None
    assert with_values(config, {"data.num_workers": 2}) is not None
    program = facts_of((*SMALL[1:], "train.command='sleep 5'"), pace=waiting(0.9))
    assert advice_of(program) == []


def test_no_time_limit_is_proposed_that_the_partition_does_not_allow() -> None:
    def said(longest_min: int | None) -> list[str]:
        spare = Partition(name="spare", is_default=True, max_time_min=longest_min)
        facts = facts_of(
            (*SLURM, "hardware.time_limit_min=5"), attempts=3, cause="timeout", spent=spent(start_up=117.0),
            ask_limits=lambda: Limits(partitions={"spare": spare}),
        )  # fmt: skip
        return [word for each in _said("time-limit-short", facts) for word in each.set]

    assert said(None) == ["hardware.time_limit_min=13"]
    assert said(10) == ["hardware.time_limit_min=10"]
    assert said(5) == said(4) == []


def test_no_time_limit_is_proposed_beyond_the_budget_of_gpu_hours() -> None:
    """Count the run and all other runs of the sweep that wait or work. One GPU for 13 minutes is 0.217 GPU-hours."""
    words = ("experiment=digits", "cluster=slurm", "hardware=gpu_x1", "hardware.time_limit_min=5")

    def said(budget: str, other: float = 0.0) -> list[str]:
        facts = facts_of(
            (*words, f"budget.max_gpu_hours={budget}"), attempts=3, cause="timeout", spent=spent(start_up=117.0),
            other_gpu_hours=other,
        )  # fmt: skip
        return [word for each in _said("time-limit-short", facts) for word in each.set]

    assert said("null") == said("9") == ["hardware.time_limit_min=13"]
    assert said("0.2") == said("9.2", other=9.0) == ["hardware.time_limit_min=12"]
    assert said("0.05") == said("9.05", other=9.0) == []


def test_what_the_cluster_refuses_is_not_proposed() -> None:
    nodes = (NodeGroup(partition="spare", num_nodes=9, cpus=4, memory_mb=64_000, gpus={}, features=frozenset()),)
    limits = Limits(partitions={"spare": Partition(name="spare", is_default=True)}, nodes=nodes)
    fault = {"pace": waiting(0.8), "ranks": [rank(cpus=1.95, cpus_allowed=2)]}
    words = (*SLURM, "data.num_workers=2", "hardware.cpus_per_task=2")
    (found,) = _said("data-cpus", facts_of(words, **fault))
    assert int(found.set[0].partition("=")[2]) > 4
    assert _said("data-cpus", facts_of(words, **fault, ask_limits=lambda: limits)) == []


def test_commands_have_no_quotes_that_nobody_needs() -> None:
    tuned = AdvisedRun(
        run_id="r1", state=RunState.COMPLETED,
        command_line=(
            "params.name='a_b'", "params.one='1'", "train.command='python t.py {params.lr}'", "data.path='a b'",
        ),
        advice=advice_of(facts_of((*SMALL, "hardware.cpus_per_task=4"), pace=waiting(0.5))),
    )  # fmt: skip
    assert next_command(tuned, "s") == (
        "plan params.name=a_b \"params.one='1'\" \"train.command='python t.py {params.lr}'\" \"data.path='a b'\" "
        "data.num_workers=2 sweep_name=s-tuned"
    )


def test_another_run_is_told_from_the_same_one() -> None:
    (workers,) = advice_of(facts_of((*SMALL, "hardware.cpus_per_task=4"), pace=waiting(0.5)))
    (cores,) = advice_of(facts_of((*SLURM, "hardware.cpus_per_task=8"), ranks=[rank(cpus_allowed=8)]))
    assert (workers.is_same_run, cores.is_same_run) == (True, False)


def test_what_gains_the_most_time_comes_first() -> None:
    facts = facts_of(
        (*SLURM, "hardware.cpus_per_task=8", "train.eval_every_steps=5"), pace=waiting(0.5),
        spent=spent(evaluation=400.0), ranks=[rank(cpus_allowed=8)],
    )  # fmt: skip
    assert [each.rule for each in advice_of(facts)] == ["evaluations", "data-workers", "idle-cpus"]


def test_the_first_span_of_each_attempt_does_not_count() -> None:
    def line(step: int, step_s: float, wait_s: float = 0.0) -> dict[str, Any]:
        return {"step": step, "step_time_s": step_s, "data_wait_s": wait_s}

    cold = [line(10, 9.0), line(20, 0.1, 0.05), {"step": 20, "eval_loss": 1.0}, line(30, 0.1, 0.05)]
    assert pace_of(cold, [0]) == Pace(steps=20, seconds=pytest.approx(2.0), wait_s=pytest.approx(1.0), lines=2)
    resumed = [*cold, line(40, 7.0), line(50, 0.3)]
    assert pace_of(resumed, [0, 30]) == Pace(30, pytest.approx(5.0), pytest.approx(1.0), 3)
    assert pace_of(cold[:1], [0]) is None
    assert pace_of([*cold, line(30, 0.1)], [0]) == pace_of(cold, [0]), "a record that was written twice"
    assert pace_of([line(10, float("nan")), {"step": 20, "step_time_s": "x"}], [0]) is None


def test_a_gain_is_said_as_a_factor_of_time_or_a_share() -> None:
    (found,) = advice_of(facts_of((*SMALL, "hardware.cpus_per_task=4"), pace=waiting(0.5)))
    assert found.line == (
        "data-workers: a step waits 50 of 100 ms for its batch (50%). data.num_workers=2: up to 2x faster"
    )
    facts = facts_of((*SLURM, "hardware.cpus_per_task=8"), ranks=[rank(cpus_allowed=8)])
    (found,) = advice_of(dataclasses.replace(facts))
    assert found.line.endswith("hardware.cpus_per_task=2: about 75% fewer CPUs")


def test_figures_that_no_clock_tells_are_left_out() -> None:
    odd = (-1.0, 1e300, float("nan"), float("inf"), 10**400, True, "1")
    records = [{"step": step, "step_time_s": 0.1, "data_wait_s": each} for step, each in enumerate(odd, 1)]
    records += [{"step": 10 + step, "step_time_s": each} for step, each in enumerate(odd)]
    found = pace_of([*records, {"step": 100, "step_time_s": 0.1, "data_wait_s": 0.1}], [0])
    assert found is not None
    assert (found.seconds, found.wait_s) == (pytest.approx(9.9), pytest.approx(9.3))


def test_of_a_sweep_of_thousands_some_like_runs_are_looked_at() -> None:
    run = facts_of().run
    read: list[str] = []

    def look(run_id: str) -> RunStatus:
        read.append(run_id)
        return run

    ids = [str(number) for number in range(1000)]
    status: Any = SimpleNamespace(
        states=dict.fromkeys(ids, RunState.COMPLETED), specs=dict.fromkeys(ids, run.spec), run=look
    )
    assert len(facts._needs(status, run)) == len(read) == facts.MOST_LIKE


@pytest.mark.usefixtures("no_slurm")
def test_a_part_of_the_records_of_a_long_run_tells_its_pace(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path / "runs" / "long", [make_spec(train__num_steps=10_000)])
    sweep.start(executor="local", resumed=0)
    records = [{"step": at, "step_time_s": 0.5, "data_wait_s": 0.1, "loss": 1.0} for at in range(10, 10_001, 10)]
    sweep.run().metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    status = read_status(sweep.paths)
    pace = gather(status, status.run(sweep.specs[0].run_id)).pace
    assert pace is not None
    assert (pace.step_s, pace.wait_share) == (pytest.approx(0.5), pytest.approx(0.2))
    assert pace.lines == pytest.approx(1000, rel=0.02), "rules that count records see about all of them"
    assert pace.steps == pytest.approx(10_000, rel=0.02)


def _words_of(rule: str) -> tuple[str, ...]:
    return next(words for name, words, *_ in CASES if name == rule)


def _held(throttle: float, clock: float, samples: int = 5, reason: str = "hw_thermal") -> dict[str, Any]:
    return {"ranks": [rank(utilisation=0.9, throttle={reason: throttle}, clock_share=clock, samples=samples)]}


def _paced(seconds: float, wait_s: float = 0.0, steps: int = 1000) -> dict[str, Any]:
    return {"pace": Pace(steps=steps, seconds=seconds, wait_s=wait_s, lines=steps)}


def _at_work(share: float, wait: float = 0.01) -> dict[str, Any]:
    return {"ranks": [rank(utilisation=share)], "pace": waiting(wait)}


def _compiled(seconds: float, step_s: float) -> dict[str, Any]:
    return {"spent": {"step": step_s, "compile": seconds}}


def _timeouts(start_s: float, attempts: int = 2) -> dict[str, Any]:
    return {"spent": spent(start_up=start_s), "attempts": attempts, "cause": "timeout"}


# Name of the rule, facts at its threshold, and facts that miss it by a little.
EDGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("data-workers", {"pace": waiting(0.2)}, {"pace": waiting(0.199)}),
    ("data-workers", _paced(2.0, 1.0), _paced(2.0, 0.999)),
    ("data-cpus", *({"pace": waiting(0.6), "ranks": [rank(cpus=cpus, cpus_allowed=2)]} for cpus in (1.8, 1.79))),
    ("idle-workers", *({"ranks": [rank(most_cpus=cpus)]} for cpus in (3.33, 3.34))),
    ("idle-workers", *({"ranks": [rank()], "pace": waiting(share)} for share in (0.019, 0.02))),
    ("saves-wait", {"spent": spent(save_stall=11.12)}, {"spent": spent(save_stall=11.1)}),
    ("saves-wait", {"spent": {"step": 1.0, "save_stall": 1.0}}, {"spent": {"step": 1.0, "save_stall": 0.99}}),
    ("saves-often", {"spent": spent(save_stall=11.12)}, {"spent": spent(save_stall=11.1)}),
    ("saves-seldom", *({"spent": spent(redone=s, save_stall=0.1), "attempts": 3} for s in (11.2, 11.0))),
    ("evaluations", {"spent": spent(evaluation=42.9)}, {"spent": spent(evaluation=42.8)}),
    ("log-lines", _paced(49.9), _paced(50.0)),
    ("compile-time", _compiled(30.0, 70.0), _compiled(29.9, 70.1)),
    ("compile-time", _compiled(5.0, 5.0), _compiled(4.99, 5.0)),
    ("time-limit-short", _timeouts(11.12), _timeouts(11.1)),
    ("time-limit-short", _timeouts(60.0), _timeouts(60.0, attempts=1)),
    ("all-reduce", *({"measured": LINKS, "memory": {"gradients": size}} for size in (2e7, 1.99e7))),
    ("precision", _at_work(0.5), _at_work(0.49)),
    ("precision", _paced(1.0), _paced(0.99)),
    ("host-bound", _at_work(0.5), _at_work(0.51)),
    ("host-bound", _at_work(0.3, 0.1), _at_work(0.3, 0.11)),
    ("held-back", _held(0.3, 0.7), _held(0.29, 0.7)),
    ("held-back", _held(0.6, 0.95), _held(0.6, 0.96)),
    ("held-back", _held(0.6, 0.7), _held(0.6, 0.7, samples=4)),
    ("held-back", _held(0.6, 0.6, reason="power_cap"), _held(0.6, 0.61, reason="power_cap")),
    ("idle-cpus", *({"ranks": [rank(most_cpus=cpus, cpus_allowed=8)]} for cpus in (2.0, 2.01))),
    ("idle-cpus", *({"ranks": [rank(cpus_allowed=8, samples=samples)]} for samples in (5, 4))),
    ("host-memory", {"ranks": [rank(most_rss=16.0 * GB)]}, {"ranks": [rank(most_rss=16.1 * GB)]}),
    ("short-runs", {"needs_s": [119.9] * 10}, {"needs_s": [119.9] * 9}),
    ("short-runs", {"needs_s": [119.9] * 10}, {"needs_s": [120.0] * 10}),
]


@pytest.mark.parametrize(("rule", "at", "beyond"), EDGES, ids=[f"{edge[0]}-{i}" for i, edge in enumerate(EDGES)])
def test_a_rule_speaks_at_its_threshold_and_not_beyond(rule: str, at: dict[str, Any], beyond: dict[str, Any]) -> None:
    (found,) = (each for each in RULES if each.name == rule)
    words = _words_of(rule)
    assert [len(list(found.find(facts_of(words, **known)))) for known in (at, beyond)] == [1, 0]


@pytest.mark.parametrize(
    ("rule", "word", "known", "is_said"),
    [
        ("idle-cpus", "hardware.cpus_per_task=3", {"ranks": [rank(most_cpus=0.5, cpus_allowed=3)]}, True),
        ("idle-cpus", "hardware.cpus_per_task=2", {"ranks": [rank(most_cpus=0.5, cpus_allowed=2)]}, False),
        ("host-memory", "hardware.mem_gb_per_node=11", {"ranks": [rank(most_rss=1 * GB)]}, True),
        ("host-memory", "hardware.mem_gb_per_node=10", {"ranks": [rank(most_rss=1 * GB)]}, False),
    ],
)
def test_a_request_that_is_a_little_too_large_is_nothing_to_say(
    rule: str, word: str, known: dict[str, Any], is_said: bool
) -> None:
    (found,) = (each for each in RULES if each.name == rule)
    assert bool(list(found.find(facts_of((*SLURM, word), **known)))) is is_said


def test_a_time_limit_is_too_long_from_four_times_the_need_on() -> None:
    (found,) = (each for each in RULES if each.name == "time-limit-long")
    words = _words_of("time-limit-long")
    need_s = 360 * 60 - facts_of(words).run.spec.shape.signal_lead_s
    said = [list(found.find(facts_of(words, needs_s=[need_s + more_s]))) for more_s in (0.0, 1.0)]
    assert [len(each) for each in said] == [1, 0]


def test_nothing_is_advised_on_the_one_evaluation_at_the_end() -> None:
    (found,) = (each for each in RULES if each.name == "evaluations")
    known = {"spent": spent(evaluation=100.0)}
    said = [
        list(found.find(facts_of((*SMALL, "train.num_steps=1000", f"train.eval_every_steps={every}"), **known)))
        for every in (999, 1000, 2000)
    ]
    assert [len(each) for each in said] == [1, 0, 0]


_NEED_A_PACE = {
    "data-workers", "data-cpus", "data-shards", "idle-workers", "saves-often", "saves-seldom", "log-lines",
    "all-reduce", "precision", "host-bound", "straggler",
}  # fmt: skip


def test_without_a_pace_rules_that_need_none_speak_as_before(pictures: Path) -> None:
    for name, words, fault, *_ in CASES:
        (found,) = (each for each in RULES if each.name == name)
        known = facts_of(tuple(word.format(pictures=pictures) for word in words), **{**fault, "pace": None})
        assert bool(list(found.find(known))) is (name not in _NEED_A_PACE), name


def test_who_saves_as_often_as_is_best_is_not_told_to() -> None:
    (found,) = (each for each in RULES if each.name == "saves-often")
    assert list(found.find(facts_of((*SMALL, "checkpoint.every=auto"), spent=spent(save_stall=50.0)))) == []


@pytest.mark.parametrize(("words", "is_kept"), [(OWN_LOOP, True), (("train.command='sh -c true'",), False)])
def test_fewer_ranks_keep_the_batch_where_it_is_ours(words: tuple[str, ...], is_kept: bool) -> None:
    (found,) = (each for each in RULES if each.name == "idle-ranks")
    ranks = [rank(name=f"rank {each}", utilisation=0.8 if each < 4 else 0.0) for each in range(8)]
    (finding,) = found.find(facts_of((*SLURM, "hardware=gpu_x8", *words), ranks=ranks))
    assert finding.changes[0].values["hardware.gpus_per_node"] == 4
    assert ("train.micro_batch_size" in finding.changes[0].values) is is_kept
