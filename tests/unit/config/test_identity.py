"""Two points are the same run if, and only if, they compute the same."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.identity import build_run_id, config_digest, had_another_name
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.schema.cluster import Device, GpuRequest, SnapshotMode
from hpc_trainer.config.schema.data import CustomDataConfig
from hpc_trainer.config.schema.model import CustomModelConfig
from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.config.schema.task import CustomTaskConfig, LanguageModelConfig, RegressionConfig, TaskConfig
from hpc_trainer.data.generated import SyntheticImagesConfig
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.record.spec import append_specs
from tests.unit.record.builders import make_config


def _digest(*overrides: str, **changes: Any) -> str:
    config = make_config(*overrides, **changes)
    validate(config)
    return config_digest(to_plain(config))


def _shuffled(tree: Any, chance: random.Random) -> Any:
    if not isinstance(tree, dict):
        return tree
    keys = list(tree)
    chance.shuffle(keys)
    return {key: _shuffled(tree[key], chance) for key in keys}


def test_the_order_of_keys_does_not_matter() -> None:
    plain = to_plain(make_config())
    for seed in range(10):
        assert config_digest(_shuffled(plain, random.Random(seed))) == config_digest(plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"hardware__partition": "gpu"}, {"hardware__qos": "high"}, {"hardware__constraint": "a100"},
        {"hardware__exclude": "n1"}, {"hardware__time_limit_min": 7}, {"hardware__name": "other"},
        {"hardware__source": "x"}, {"hardware__checked": "2026-01-01"}, {"hardware__mem_gb_per_node": 3.0},
        {"cluster__account": "lab"}, {"cluster__setup": ["module load x"]}, {"cluster__env": {"A": "1"}},
        {"cluster__array_parallelism": 2}, {"cluster__max_no_progress": 9}, {"cluster__signal_lead_s": 30},
        {"paths__runs_dir": "/elsewhere"}, {"paths__group_readable": True}, {"sweep_name": "other"},
        {"experiment_name": "other"}, {"checkpoint__every_steps": 3}, {"checkpoint__keep_last": 5},
        {"monitor__log_every_steps": 3}, {"monitor__heartbeat_every_s": 0.1}, {"local__max_parallel": 4},
        {"data__num_workers": 2}, {"hardware__gpu_request": GpuRequest.gres},
        {"parallel__timeout_s": 5}, {"trust": ["mine"]}, {"sweep__axes": {"seed": [1]}},
        {"monitor__profile_steps": 5}, {"monitor__profile_steps": 5, "monitor__profile_warmup_steps": 3},
        {"snapshot__exclude": ["data"]}, {"snapshot__mode": SnapshotMode.off},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_where_when_and_how_loudly_does_not_matter(changes: dict[str, Any]) -> None:
    assert _digest(**changes) == _digest()


def test_images_that_are_kept_in_memory_are_the_same_training() -> None:
    kept, made = (_digest(data=SyntheticImagesConfig(keep_in_memory=each)) for each in (True, False))
    assert kept == made != _digest(data=SyntheticImagesConfig(image_size=16))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1}, {"optim__lr": 0.5}, {"optim__weight_decay": 0.5}, {"optim__betas": [0.8, 0.9]},
        {"model__hidden_dim": 3}, {"model__dropout": 0.2}, {"data__num_eval": 100}, {"train__num_steps": 3},
        {"train__global_batch_size": 32}, {"train__micro_batch_size": 16}, {"train__max_grad_norm": None},
        {"train__deterministic": False}, {"schedule__warmup_steps": 3}, {"schedule__min_lr_ratio": 0.5},
        {"precision__compute_dtype": Dtype.bf16}, {"hardware__tasks_per_node": 2}, {"hardware__num_nodes": 2},
        {"hardware__cpus_per_task": 2}, {"hardware__device": Device.cuda}, {"params": {"dim": 3}},
        {"train__main": "mine.main", "trust": ["mine"]},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_whatever_changes_the_result_makes_another_run(changes: dict[str, Any]) -> None:
    slurm = ("cluster=slurm",)
    assert _digest(*slurm, **changes) != _digest(*slurm)


@pytest.mark.parametrize(
    ("overrides", "run_id"),
    [
        ((), "mlp-digits-lr0.001-s0-e124e99811"),
        (("hardware=gpu_x8", "cluster=slurm"), "mlp-digits-lr0.001-s0-891c6afc10"),
        (("hardware=gpu_x16", "cluster=slurm", "experiment=gpt_bytes"), "gpt-text_bytes-lr0.001-s0-9141a3e49e"),
        (
            (
                "hardware=gpu_x16", "hardware.gpus_per_node=2", "hardware.cpus_per_gpu=1", "hardware.device=cpu",
                "hardware.gpu_type=a100", "cluster=slurm",
            ),
            "mlp-digits-lr0.001-s0-934bf62ee9",
        ),
    ],
)  # fmt: skip
def test_run_ids_of_earlier_versions_stay(overrides: tuple[str, ...], run_id: str) -> None:
    """A new key says in the schema that it is APART or ONCE_SET: else finished runs start again."""
    config = make_config(*overrides)
    validate(config)
    assert build_run_id(config, config_digest(to_plain(config))) == run_id


def test_params_count_by_name_and_value() -> None:
    digests = [
        _digest(params=params) for params in ({}, {"dim": 3}, {"dim": 4}, {"size": 3}, {"dim": None}, {"dim": {}})
    ]
    assert len(set(digests)) == len(digests)
    assert _digest(params={"a": 1, "b": 2}) == _digest(params={"b": 2, "a": 1})


def test_a_batch_size_left_open_and_the_same_one_written_out_are_one_run() -> None:
    assert _digest(train__micro_batch_size=64, train__grad_accum_steps=1) == _digest()


def test_the_label_is_readable_and_safe_as_a_folder() -> None:
    config = make_config()
    assert build_run_id(config, "0123456789abcdef") == "mlp-digits-lr0.001-s0-0123456789"
    config.model.name = "../my net"
    assert build_run_id(config, "0123456789abcdef") == ".._my_net-digits-lr0.001-s0-0123456789"
    config.train.main = "my_lab.loop.main"  # the sections of the shared loop say nothing about it
    assert build_run_id(config, "0123456789abcdef") == "my_lab.loop-s0-0123456789"


TOKEN = "hf_" + "AbCd1234" * 4


@pytest.mark.parametrize(
    "name", ["token", "hf_token", "wandb_api_key", "API_KEY", "password", "client-secret", "db_pwd", "auth", "note"]
)
def test_the_value_of_a_secret_counts_in_the_hash_alone(name: str) -> None:
    config = make_config()
    config.train.command, config.params = "python fit.py", {"lr": 0.1, name: TOKEN}
    run_id = build_run_id(config, config_digest(to_plain(config)))
    assert run_id.startswith(re.sub("[^A-Za-z0-9._-]", "_", f"fit-lr0.1-{name}-s0-"))
    config.params[name] = TOKEN[:-1]
    assert build_run_id(config, config_digest(to_plain(config))) != run_id
    assert had_another_name(to_plain(config)), "a sweep that has it by the name of before keeps that"


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokenizer", "bpe"), ("num_tokens", "many"), ("max_token", "16"), ("image_key", "jpg"), ("auth", "true"),
     ("token", "/data/tokens"), ("monkey", "george"), ("author", "me"), ("token", 16)],
)  # fmt: skip
def test_what_is_no_secret_stays_in_the_label(name: str, value: str | int) -> None:
    config = make_config()
    config.train.command, config.params = "python fit.py", {name: value}
    assert build_run_id(config, "0123456789abcdef") == f"fit-{name}{value}-s0-0123456789".replace("/", "_")
    assert not had_another_name(to_plain(config))


@pytest.mark.parametrize(
    ("value", "in_a_rate", "in_params"),
    [
        (1e-5, "1e-5", "1e-5"), (2.5e-7, "2.5e-7", "2.5e-7"), (1e9, "1e9", "1e9"), (3e-4, "0.0003", "0.0003"),
        (0.1, "0.1", "0.1"), (1.0, "1", "1.0"), (1e-10, "1e-10", "1e-10"), (1234567.0, "1.23457e6", "1234567.0"),
        (-1.0, "-1", "-1.0"), (1e300, "1e300", "1e300"), (-1e-5, "-1e-5", "-1e-5"),
        (0.0031930016309617633, "0.003193", "0.003193"), (0.1234567, "0.123457", "0.1234567"),
        (1 / 3, "0.333333", "0.333333"), (12345678.9, "1.23457e7", "12345678.9"),
    ],
)  # fmt: skip
def test_numbers_in_a_label_read_as_a_person_types_them(value: float, in_a_rate: str, in_params: str) -> None:
    config = make_config()
    config.optim.lr = value
    assert build_run_id(config, "0123456789abcdef") == f"mlp-digits-lr{in_a_rate}-s0-0123456789"
    config.train.command, config.params = "python fit.py", {"x": value, "n": 3}
    assert build_run_id(config, "0123456789abcdef") == f"fit-x{in_params}-n3-s0-0123456789"


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("words", "older"),
    [
        (["optim.lr=1e-5,0.01"], ["mlp-digits-lr1e-05-s0", "mlp-digits-lr0.01-s0"]),
        (["train.command='python fit.py {params.x}'", "params.x=1e9,2"], ["fit-x1000000000.0-s0", "fit-x2-s0"]),
        (
            ["train.command='python fit.py {params.x}'", "params.x=0.12345678901,2"],
            ["fit-x0.12345678901-s0", "fit-x2-s0"],
        ),
    ],
)  # fmt: skip
def test_a_sweep_of_an_older_version_is_found_again(words: list[str], older: list[str], tmp_path: Path) -> None:
    (tmp_path / "fit.py").touch()
    if "python fit.py" in words[0]:
        words = [*words, f"train.command_dir={tmp_path}"]
    words = [*words, f"paths.runs_dir={tmp_path}", "sweep_name=before"]
    new = freeze_grid(words)
    assert new.specs[0].run_id.partition("-s0")[0] in ("mlp-digits-lr1e-5", "fit-x1e9", "fit-x0.123457")
    before = [
        dataclasses.replace(spec, run_id=f"{label}-{spec.digest[:10]}")
        for spec, label in zip(new.specs, older, strict=True)
    ]
    new.sweep.intents.mkdir(parents=True)
    append_specs(new.sweep, before)
    assert freeze_grid(words).specs == tuple(before)


def test_runs_are_named_after_a_person_s_own_classes() -> None:
    config = make_config()
    config.model = CustomModelConfig(_target_="my_lab.net.Net")
    assert build_run_id(config, "0123456789abcdef") == "Net-digits-lr0.001-s0-0123456789"
    config.data = CustomDataConfig(_target_="my_lab.rings.build")
    assert build_run_id(config, "0123456789abcdef") == "Net-rings-lr0.001-s0-0123456789"
    config.data = CustomDataConfig(_target_="my_lab.rings.rings_of_two", name="two")
    config.task = CustomTaskConfig(_target_="my_lab.tasks.Fit")
    assert build_run_id(config, "0123456789abcdef") == "Net-two-Fit-lr0.001-s0-0123456789"
    config.task = RegressionConfig()
    assert build_run_id(config, "0123456789abcdef") == "Net-two-regression-lr0.001-s0-0123456789"


def test_the_usual_task_is_no_part_of_a_run_s_identity() -> None:
    plain = to_plain(make_config())
    without = {name: value for name, value in plain.items() if name != "task"}
    assert config_digest(without) == config_digest(plain)
    assert _digest(task=TaskConfig()) == _digest() != _digest(task=LanguageModelConfig())


@pytest.mark.usefixtures("no_slurm")
def test_runs_that_a_sweep_has_by_an_older_name_keep_it(tmp_path: Path) -> None:
    """Versions before this one named all runs with own classes custom-custom."""
    words = ["model=custom", "model._target_=lab.Net", "data=custom", "data._target_=lab.build", "seed=1,2",
             f"paths.runs_dir={tmp_path}", "sweep_name=own"]  # fmt: skip
    new = freeze_grid(words, trust=["lab"])
    assert [each.run_id.partition("-lr")[0] for each in new.specs] == ["Net-lab"] * 2
    older = dataclasses.replace(new.specs[0], run_id=f"custom-custom-lr0.001-s1-{new.specs[0].digest[:10]}")
    new.sweep.intents.mkdir(parents=True)
    append_specs(new.sweep, [older])
    again = freeze_grid(words, trust=["lab"])
    assert [each.run_id for each in again.specs] == [older.run_id, new.specs[1].run_id]


@pytest.mark.usefixtures("no_slurm")
def test_the_run_id_does_not_depend_on_the_rest_of_the_grid() -> None:
    alone = freeze_grid(["optim.lr=0.01", "seed=1"]).specs
    in_a_grid = freeze_grid(["seed=0,1", "optim.lr=0.01"]).specs
    from_a_file = freeze_grid(["+sweep.axes={seed:[1,5],optim.lr:[1e-2]}"]).specs
    assert alone[0].run_id in {spec.run_id for spec in in_a_grid}
    assert alone[0].run_id in {spec.run_id for spec in from_a_file}
    assert len({spec.run_id for spec in (*in_a_grid, *from_a_file)}) == 3
