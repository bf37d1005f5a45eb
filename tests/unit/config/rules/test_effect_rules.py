"""A key that would change nothing is refused: else the same training would count, and be trained, as several runs."""

from __future__ import annotations

import enum
import re
from typing import Any

import pytest

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.cluster import Container, GpuLibraries
from hpc_trainer.config.schema.key import APART, Declared
from hpc_trainer.config.schema.task import RegressionConfig
from hpc_trainer.config.schema.train import SearchMode, TrainConfig
from hpc_trainer.config.store import ALL_KEYS
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid
from tests.unit.record.builders import make_config

pytestmark = pytest.mark.usefixtures("no_slurm")
# What a condition of the declarations without a value means, and what has to stand beside others to be allowed at all.
SET: dict[str, Any] = {
    "checkpoint.keep_best": "eval_loss", "monitor.profile_steps": 2, "parallel.pipeline_parallel": 2,
    "train.early_stop.patience": 2, "train.command": "python -V", "init_from.path": "w.safetensors",
    "prune.method": "unstructured", "qat.to": "int8", "train.lora.rank": 2, "augment.randaugment_ops": 2,
    "augment.mixup_alpha": 0.2, "augment.cutmix_alpha": 0.2, "replay.share": 0.2, "hardware.gpus_per_node": 1,
    "notify.command": "true", "notify.webhook_env": "HOOK", "search.sampler": "tpe", "pool.jobs": 2,
    "pool.per_gpu": 2,
    "after.runs": ["a"],
    "cluster.environment.conda": "train", "cluster.environment.container": Container.apptainer,
}  # fmt: skip
# Another value than the default of keys whose default does not tell of what type they are.
OTHER: dict[str, Any] = {
    "train.command_dir": "/", "train.command_from": "/", "tracker.project": "a", "tracker.entity": "a", "tracker.uri": "https://a",
    "notify.events": ["best"], "search.rungs": [4], "search.mode": SearchMode.max,
    "cluster.environment.conda_root": "/opt/conda", "cluster.environment.image": "/a.sif",
    "cluster.environment.view": "default", "cluster.environment.gpus": GpuLibraries.nv,
    "cluster.environment.binds": ["/data"], "cluster.environment.container_args": ["--cleanenv"],
}  # fmt: skip


LIMITED = [each for each in ALL_KEYS if each.section is None and each.key.needs]
NAMED = [pytest.param(each, id=each.name) for each in LIMITED]


def _put(config: TrainConfig, key: str, value: Any) -> None:
    if key.startswith("task.") and config.task.name == "classification":
        config.task = RegressionConfig()  # the default has no keys
    *path, name = key.split(".")
    owner: Any = config
    for part in path:
        owner = getattr(owner, part)
    current = getattr(owner, name)
    setattr(owner, name, type(current)[value] if isinstance(current, enum.Enum) and isinstance(value, str) else value)


def _other(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return next(each for each in type(value) if each is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "eval_accuracy"
    if isinstance(value, (list, dict)):
        return ["a.*"] if isinstance(value, list) else {"a.*": "b.*"}
    return 2 if value is None else (value / 2 or 0.5) if isinstance(value, float) else value + 2


def test_the_keys_that_were_found_without_effect_are_declared() -> None:
    names = {each.name for each in LIMITED}
    assert names >= {
        "parallel.sync_every_steps", "parallel.sync_warmup_steps", "parallel.outer_lr", "parallel.outer_momentum",
        "parallel.powersgd_rank", "parallel.powersgd_start_step", "parallel.powersgd_error_feedback",
        "parallel.pipeline_schedule", "precision.init_scale", "precision.growth_interval", "schedule.gamma",
        "schedule.min_lr_ratio", "train.memory_margin", "train.guard.spike_factor", "train.guard.spike_window",
        "train.guard.max_rollbacks", "checkpoint.best_mode", "monitor.profile_warmup_steps",
        "train.early_stop.metric", "train.early_stop.mode",
    }  # fmt: skip


@pytest.mark.parametrize("each", NAMED)
def test_a_key_without_effect_is_refused_and_its_default_is_not(each: Declared) -> None:
    key, config, needs = each.name, make_config(), each.key.needs or ()
    _put(config, "schedule.name", "constant")  # cosine has a use for some
    _put(config, key, each.default)
    assert not [line for line in find_problems(config) if line.startswith(f"{key}=")]
    _put(config, key, OTHER.get(key, _other(each.default)))
    (problem,) = [line for line in find_problems(config) if "has no effect with" in line]
    assert problem.startswith(f"{key}=")
    first = needs[0]
    assert re.search(
        rf"\. Use {re.escape(key)}=(\S+|\[[^]]*\]), its default, or (another value of )?[\w.=]+\.$", problem
    ), problem
    assert first.partition("=")[2] in problem
    config.train.main = "mine.main"  # who reads the configuration in a loop of one's own, nobody knows here
    assert not [line for line in find_problems(config) if "has no effect with" in line]


@pytest.mark.parametrize("each", NAMED)
def test_a_key_is_taken_with_each_of_those_that_it_goes_with(each: Declared) -> None:
    for need in each.key.needs or ():
        other, _, value = need.partition("=")
        config = make_config()
        _put(config, each.name, OTHER.get(each.name, _other(each.default)))
        if other == "cluster.environment.container" and value:
            value = Container[value]  # null by default, which does not tell of the type
        _put(config, other, SET[other] if not value else True if value == "true" else value)
        for further in next((found.key.needs for found in LIMITED if found.name == other), None) or ():
            name, _, wanted = further.partition("=")
            _put(config, name, wanted or SET[name])  # what that one goes with in its turn
        assert not [line for line in find_problems(config) if "has no effect with" in line], need


def test_what_is_left_counts() -> None:
    """Of the sections that make the identity, a limited key changes it: so it has to be refused where it is idle."""
    for each in LIMITED:
        config = make_config()
        before = config_digest(to_plain(config))
        _put(config, each.name, OTHER.get(each.name, _other(each.default)))
        is_told = each.key.identity is not APART and each.name.partition(".")[0] not in (
            "checkpoint",
            "monitor",
            "tracker",
        )
        assert (config_digest(to_plain(config)) != before) is is_told, each.name


def test_a_grid_in_which_a_key_counts_for_some_points_only() -> None:
    words = ["hardware=cpu_x2", "parallel=ddp,post_local_sgd", "parallel.sync_every_steps=8,16"]
    with pytest.raises(
        ConfigError, match=r"parallel\.sync_every_steps=8 is for parallel\.sync=post_local_sgd or diloc"
    ):
        freeze_grid(words)
    left_out = "sweep.exclude=[\"parallel == 'ddp' and parallel.sync_every_steps != 16\"]"
    assert len(freeze_grid([*words, left_out]).specs) == 3


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["optim=sgd", "optim.momentum=0.8"], "optim.momentum=0.8"),
        (["optim.betas=[0.8,0.99]"], "optim.betas=[0.8, 0.99]"),
        (["optim=custom", "optim._target_=torch.optim.NAdam", "+optim.kwargs.betas=[0.9,0.99]"], "optim.kwargs.betas="),
    ],
)  # fmt: skip
def test_a_momentum_that_one_cycle_overrules(words: list[str], key: str) -> None:
    told = [line for line in find_problems(make_config("schedule=one_cycle", *words)) if "has no effect with" in line]
    assert [line.startswith(key) and "schedule.cycle_momentum=false" in line for line in told] == [True]
    assert not list(find_problems(make_config("schedule=one_cycle", "schedule.cycle_momentum=false", *words)))
    assert not list(find_problems(make_config("schedule=cosine", *words)))


@pytest.mark.parametrize(
    "words", [["optim=sgd", "optim.momentum=0", "optim.nesterov=false"], ["optim.betas=[0.9,0.99]"]]
)
def test_what_one_cycle_leaves_alone_is_taken(words: list[str]) -> None:
    assert not list(find_problems(make_config("schedule=one_cycle", *words)))


def test_a_warm_up_left_open_and_none_are_one_run_but_of_one_cycle() -> None:
    ids = [freeze_grid([f"schedule={name}", f"schedule.warmup_steps={steps}"]).specs[0].run_id
           for name in ("cosine", "one_cycle") for steps in ("null", "0")]  # fmt: skip
    assert ids[0] == ids[1]
    assert ids[2] != ids[3]
    (spec,) = freeze_grid(["schedule=one_cycle"]).specs
    assert spec.config["schedule"]["cycle_momentum"] is True
    assert spec.config["schedule"]["warmup_steps"] is None
