"""What `monitor.profile_steps` must fit into."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.output import OnOverheat
from tests.unit.record.builders import make_config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile_steps": -1}, ["monitor.profile_steps=-1", "Use 0"]),
        ({"profile_steps": 1001}, ["monitor.profile_steps=1001", "at most 1000"]),
        ({"profile_steps": 5, "profile_warmup_steps": 0}, ["monitor.profile_warmup_steps=0", "Use 1"]),
        ({"profile_steps": 11}, ["together", "Use monitor.profile_warmup_steps=9."]),
        (
            {"profile_steps": 30},
            ["train.num_steps=20", "Use monitor.profile_warmup_steps=1 monitor.profile_steps=19."],
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    settings = {f"monitor__{key}": value for key, value in changes.items()}
    problems = "\n".join(find_problems(make_config(train__num_steps=20, **settings)))
    assert [word for word in words if word not in problems] == [], problems


def test_what_fits() -> None:
    assert list(find_problems(make_config(train__num_steps=20, monitor__profile_steps=10))) == []
    assert list(find_problems(make_config(train__num_steps=4))) == []


def test_a_loop_of_ones_own_has_its_own_profiler() -> None:
    config = make_config(train__main="mine.main", trust=["mine"], monitor__profile_steps=3)
    assert "train.main=mine.main: it watches the shared loop; torch.profiler works in your own" in "\n".join(
        find_problems(config)
    )


def test_only_slurm_has_another_node() -> None:
    move = {"monitor__on_overheat": OnOverheat.move, "hardware__gpus_per_node": 1}
    assert "monitor.on_overheat" not in "\n".join(find_problems(make_config(cluster__executor=Executor.slurm, **move)))
    told = "\n".join(find_problems(make_config(cluster__executor=Executor.local, **move)))
    assert (
        "monitor.on_overheat=move asks Slurm for another node, but cluster.executor=local has only this machine" in told
    )
    assert "Use monitor.on_overheat=warn, or cluster=slurm." in told
    told = "\n".join(find_problems(make_config(cluster__executor=Executor.slurm, monitor__telemetry_every_s=0, **move)))
    assert "monitor.on_overheat=move needs samples" in told
    told = "\n".join(find_problems(make_config(monitor__move_after_s=7, hardware__gpus_per_node=1)))
    assert "monitor.move_after_s=7" in told
