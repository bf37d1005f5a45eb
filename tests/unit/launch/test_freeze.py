"""A command line -> frozen runs: where they live, what is merged, what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest

from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.compose.own_files import user_config_path
from hpc_trainer.config.rules import validate as validate_module
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch import freeze as freeze_module
from hpc_trainer.launch.freeze import by_known_names, freeze, freeze_grid
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import read_lines
from hpc_trainer.record.spec import append_specs
from tests.composed import expand
from tests.unit.config.compose.random_overrides import write_files
from tests.unit.record.builders import make_spec


@pytest.mark.usefixtures("no_slurm")
def test_a_grid_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path))
    grid = freeze_grid(["seed=1,2,1", "optim.lr=0.1,0.10"])
    assert [spec.config["seed"] for spec in grid.specs] == [1, 2]
    assert grid.num_duplicates == 4
    assert grid.sweep.folder == tmp_path / "train"
    assert grid.specs[0].axes == {"seed": "1", "optim.lr": "0.1"}


@pytest.mark.usefixtures("no_slurm")
def test_points_that_differ_in_their_seed_alone_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a seed that cannot be is told of its own point."""
    seen: list[float] = []
    rules = validate_module.optim_problems
    monkeypatch.setattr(
        validate_module, "optim_problems", lambda config: (seen.append(config.optim.lr), rules(config))[1]
    )
    grid = freeze_grid(["seed=range(6)", "optim.lr=0.1,0.2"], trust=["my_lab"])
    assert seen == [0.1, 0.2]
    assert [spec.config["seed"] for spec in grid.specs[::2]] == [0, 1, 2, 3, 4, 5]
    assert {str(spec.config["trust"]) for spec in grid.specs} == {"['my_lab']"}
    with pytest.raises(ConfigError) as caught:
        freeze_grid(["seed=0,-1,-2,1", "train.num_steps=0"])
    told = [line.split(" must")[0] for line in str(caught.value).splitlines()]
    assert told == ["train.num_steps=0", "seed=-1", "seed=-2"]


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    "axes",
    [
        ["params.lr=1e-3,3e-3", "params.deep.size=1,2"],
        ["+sweep.axes={params.lr:[1e-3,3e-3],params.deep.size:[1,2]}"],
        ["params.lr=1e-3,3e-3", "params.deep.size=1,2,3", "sweep.exclude=['params.deep.size > 2']"],
        ["+params.lr=1e-3,3e-3", "+sweep.zip=[{params.deep.size:[1,2]}]"],
    ],
    ids=["command line", "sweep", "exclude", "zip"],
)
def test_values_of_ones_own_are_axes_like_any_other(axes: list[str]) -> None:
    grid = freeze_grid(["train.main=my_lab.loop.main", "params.name=x", *axes], trust=["my_lab"])
    assert [spec.axes for spec in grid.specs] == [
        {"params.lr": lr, "params.deep.size": size} for lr in ("0.001", "0.003") for size in ("1", "2")
    ]
    for spec in grid.specs:
        config = spec.typed()
        lr, size = (float(spec.axes["params.lr"]), int(spec.axes["params.deep.size"]))
        assert config.params == {"name": "x", "lr": lr, "deep": {"size": size}}
        assert config.train.main == "my_lab.loop.main"
    assert len({spec.run_id for spec in grid.specs}) == 4
    assert all(spec.run_id.startswith("my_lab.loop-s0-") for spec in grid.specs)


@pytest.mark.usefixtures("no_slurm")
def test_a_loop_of_ones_own_needs_trust() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.main=my_lab\.loop\.main: this package is not on the allow-list.*add --trust my_lab"
    ):
        freeze_grid(["train.main=my_lab.loop.main"])


@pytest.mark.usefixtures("no_slurm")
def test_where_a_sweep_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert freeze_grid([]).sweep.folder == tmp_path / "runs" / "train"
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "env"))
    assert freeze_grid(["experiment=digits"]).sweep.folder == tmp_path / "env" / "digits"
    named = freeze_grid(["experiment=digits", "sweep_name=mine", f"paths.runs_dir={tmp_path}/given"])
    assert named.sweep.folder == tmp_path / "given" / "mine"


@pytest.mark.usefixtures("no_slurm")
def test_all_problems_of_all_points_are_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        freeze_grid(["train.num_steps=0,1", "optim.lr=-1,0.1", "schedule.warmup_steps=0"])
    assert sorted(str(caught.value).splitlines()) == [
        "optim.lr=-1 must be greater than 0 and finite. Use 0.001.",
        "train.num_steps=0 must be at least 1. Use 1.",
    ]


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["experiment=digits,gpt_bytes"],
            r"belong to one sweep, and these name digits, gpt_bytes\. Add sweep_name=digits",
        ),
        (["cluster=slurm,local"], "cluster is one for a whole grid"),
    ],
)
def test_a_grid_has_one_place_and_one_cluster(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        freeze_grid(overrides)


@pytest.mark.usefixtures("no_slurm")
def test_a_folder_name_cannot_smuggle_lines_into_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", f"{tmp_path}/a\ntouch pwned")
    with pytest.raises(ConfigError, match="control characters"):
        freeze_grid(["cluster=slurm"])


@pytest.mark.usefixtures("no_slurm")
def test_trust_is_frozen_with_the_run() -> None:
    overrides = ["model=custom", "model._target_=my_lab.nets.Net"]
    with pytest.raises(ConfigError, match="--trust my_lab"):
        freeze_grid(overrides)
    assert freeze_grid(overrides, trust=["my_lab"]).specs[0].config["trust"] == ["my_lab"]


@pytest.mark.usefixtures("no_slurm")
def test_what_a_person_s_own_settings_trust_is_frozen_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    user_config_path().parent.mkdir()
    user_config_path().write_text("trust: [my_lab]\n")
    grid = freeze_grid(["model=custom", "model._target_=my_lab.nets.Net"], trust=["other"])
    assert grid.specs[0].config["trust"] == ["my_lab", "other"]


def test_a_configuration_cannot_trust_itself(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "evil.yaml").write_text("# @package _global_\ntrust: [evil_module]\n")
    with pytest.raises(ConfigError, match="--trust evil_module"):
        freeze_grid(["cluster=local", "experiment=evil"], config_dirs=[tmp_path])
    with pytest.raises(ConfigError, match="cannot be set by a configuration"):
        freeze_grid(["cluster=local", "trust=[os]"])


def test_a_backslash_in_the_folder_of_sweeps_is_refused() -> None:
    with pytest.raises(ConfigError, match="backslash"):
        freeze_grid(["cluster=local", "paths.runs_dir='/tmp/back\\\\x'"])


# --- the fast way against the slow one, point by point ---

_AXES = {
    "model": ["mlp", "cnn", "child", "flexible"], "optim": ["adamw", "sgd"],
    "hardware": ["cpu_x1", "nested", "wide"],
    "experiment": ["plain", "linked", "steers"], "data": ["digits", "follows"], "debug": ["smoke", "both"],
    "precision": ["fp32", "steers"], "checkpoint": ["default", "steers"], "schedule": ["cosine", "elsewhere"],
    "optim.lr": ["1e-3", "0.5", "1e-3"], "seed": ["1", "2", "1"],
    "train.num_steps": ["50", "60"], "sweep_name": ["same"], "precision.compute_dtype": ["fp32", "bf16"],
    "+cluster.env.A": ["b", "'c d'"], "optim.weight_decay": ["0", "0.25"], "train.global_batch_size": ["16", "32"],
    "train.eval_every_steps": ["5", "${train.num_steps}"], "cluster.setup": ["[a]", "['b c',d]"],
}  # fmt: skip


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 3 else pytest.mark.long) for seed in range(8)])
def test_a_grid_freezes_to_what_each_point_alone_freezes_to(seed: int, tmp_path: Path) -> None:
    pick = random.Random(seed)
    keys = pick.sample(sorted(_AXES), 5)
    lines = [f"{key}={','.join(pick.sample(_AXES[key], min(len(_AXES[key]), pick.choice([1, 2, 3]))))}" for key in keys]
    lines = ["cluster=local", "sweep_name=x", *(line for line in lines if not line.startswith("sweep_name"))]
    print(f"seed {seed}: {lines}")
    grid = freeze_grid(lines, config_dirs=[write_files(tmp_path / "conf")])
    frozen = {spec.run_id: spec for spec in grid.specs}
    num_compared = 0
    with GridComposer([tmp_path / "conf"]) as composer:
        points = expand(composer, lines)
        for point in pick.sample(points, min(6, len(points))):
            config = composer.compose(point.overrides)
            validate(config)
            alone = freeze(config, axes=point.axes, overrides=point.overrides)
            kept = frozen[alone.run_id]
            if kept.axes != point.axes:
                continue  # merged with another point: what does not change the result may differ
            num_compared += 1
            assert (alone.config, alone.digest, alone.shape) == (kept.config, kept.digest, kept.shape)
            assert repr(alone.config) == repr(kept.config)
    assert num_compared
    assert len(grid.specs) + grid.num_duplicates == len(points)
    assert sum(grid.compose_counts.values()) == len(points)
    assert grid.compose_counts.get("hydra", 0) == 0


@pytest.mark.usefixtures("no_slurm")
def test_the_file_of_specs_reads_back(tmp_path: Path) -> None:
    grid = freeze_grid(["experiment=digits", "seed=range(300)", "optim.lr=1e-3,0.5", "cluster.setup=['é x']"])
    tmp_path.chmod(0o700)
    append_specs(SweepPaths(tmp_path), grid.specs)
    records = list(read_lines(tmp_path / "specs.jsonl"))
    as_written = [json.loads(json.dumps(dataclasses.asdict(spec))) for spec in grid.specs]
    assert [(record.pop("format"), record | {"others": []}) for record in records] == [(1, spec) for spec in as_written]


RUN_IDS = [
    "mlp-digits-lr0.001-s0-d18b1b7082",
    "mlp-digits-lr0.1-s0-b384b577cd",
    "mlp-digits-lr0.001-s0-46e18ee6f2",
    "mlp-digits-lr0.1-s0-41aff8eec8",
    "cnn-digits-lr0.001-s0-5febe18ee9",
    "cnn-digits-lr0.1-s0-8b987f7f6c",
    "cnn-digits-lr0.001-s0-06b7ce0cfb",
    "cnn-digits-lr0.1-s0-bec08d5598",
]


def test_run_ids_stay_what_they_are() -> None:
    """A run id that changes is a run that is submitted again. These were made before points were composed fast."""
    overrides = ["cluster=local", "experiment=digits", "model=mlp,cnn", "optim=adamw,sgd", "optim.lr=1e-3,0.1"]
    assert [spec.run_id for spec in freeze_grid(overrides).specs] == RUN_IDS


# --- conditions and duplicates ---


@pytest.mark.usefixtures("no_slurm")
def test_points_that_a_condition_leaves_out_are_counted() -> None:
    condition = "hardware == 'cpu_x2' and train.global_batch_size % 2 == 1"
    lines = ["hardware=cpu_x1,cpu_x2", "train.global_batch_size=31,32", f'sweep.exclude=["{condition}"]']
    grid = freeze_grid(lines)
    assert [(spec.axes["hardware"], spec.axes["train.global_batch_size"]) for spec in grid.specs] == [
        ("cpu_x1", "31"), ("cpu_x1", "32"), ("cpu_x2", "32")
    ]  # fmt: skip
    assert grid.num_excluded == 1


@pytest.mark.usefixtures("no_slurm")
def test_a_condition_may_ask_for_what_is_on_no_axis() -> None:
    lines = [
        "model=mlp,cnn",
        "seed=1,2",
        "sweep.exclude=[\"model.num_channels == 32 and optim == 'adamw' and seed > 1\"]",
    ]
    grid = freeze_grid(lines)
    assert [tuple(spec.axes.values()) for spec in grid.specs] == [("mlp", "1"), ("mlp", "2"), ("cnn", "1")]
    assert grid.num_excluded == 1


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("condition", "message"),
    [("seed >= 0", "leaves out all 2 points"), ("optim.lrr > 1", "Did you mean optim.lr?")],
)
def test_conditions_that_cannot_be_meant(condition: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        freeze_grid(["seed=1,2", f'sweep.exclude=["{condition}"]'])


@pytest.mark.usefixtures("no_slurm")
def test_merged_points_are_shown_in_pairs() -> None:
    grid = freeze_grid(["seed=1,2", "+cluster.env.A=b,c"])
    assert grid.num_duplicates == 2
    assert grid.duplicates[0] == ({"seed": "1", "cluster.env.A": "b"}, {"seed": "1", "cluster.env.A": "c"})


@pytest.mark.parametrize(
    ("words", "num_composed"),
    [
        (["seed=range(5)"], 1),
        (["seed=0,4294967295,7", "optim.lr=1e-3,0.002"], 2),
        (["seed=3,7", "model=mlp,cnn", "data.max_shift=0,1"], 4),
        (["seed=1,2,3", "hardware=cpu_x2", "parallel.elastic=true", "checkpoint.resume_from=RUN"], 1),
        (["seed=1,2,3", f"train.main=my_lab.{'a_long_name' * 9}.main"], 1),
        # Something hangs on the seed, or may: each point is composed.
        (["seed=range(1,4)", "train.num_steps=${seed}"], 3),
        (["seed=range(3)", "+params.width=${seed}", "train.main=my_lab.loop.main"], 3),
        (["++seed=1,2"], 2),
        (["seed='1','2'"], 2),
        (["seed=1,2,3", "sweep.exclude=['seed == 2']"], 1),
        (["seed=1,2,3", "sweep.exclude=['train.num_steps == 200 and seed == 2']"], 3),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_slurm")
def test_points_that_differ_in_their_seed_alone_are_the_runs_that_each_would_be(
    words: list[str], num_composed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    words = [word.replace("=RUN", f"={tmp_path}") for word in words]
    composed: list[object] = []
    keep = freeze_module._Twins.keep
    monkeypatch.setattr(
        freeze_module._Twins, "keep", lambda self, *given: (composed.append(given), keep(self, *given))[1]
    )
    found = freeze_grid(words, trust=["my_lab"])
    counted = len(composed)
    monkeypatch.setattr(freeze_module._Twins, "freeze", lambda *_: None)
    assert found == freeze_grid(words, trust=["my_lab"])
    assert counted <= num_composed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=mlp", "params.hidden_dim=64"],
         "params.hidden_dim=64 has no effect: params is for code of your own, but model=mlp runs in the shared "
         "loop, which does not read params. Use model.hidden_dim=64, or set another key from it: "
         "KEY=${params.hidden_dim}."),
        (["model=cnn", "params.num_heads=64"], "which does not read params. Leave it out, or set"),
        (["params.lr=1e-3,3e-3"], "params.lr has no effect: params is for code"),
        (["params.lr=1e-3,3e-3"], "Use optim.lr, or set"),
        (["params.nothing_like_it=1"], "which does not read params. Leave it out, or set"),
    ],
)  # fmt: skip
def test_values_that_nothing_reads_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        freeze_grid(["cluster=local", *words])
    assert told in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_values_that_a_key_is_taken_from_are_read(tmp_path: Path) -> None:
    grid = freeze_grid(["cluster=local", "params.width=32,64", "model=mlp", "model.hidden_dim=${params.width}"])
    assert [spec.config["model"]["hidden_dim"] for spec in grid.specs] == [32, 64]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "wide.yaml").write_text(
        "# @package _global_\nparams:\n  width: 8\ntrain:\n  num_steps: ${params.width}\n"
    )
    own = ["cluster=local", "experiment=wide", "params.width=3,4"]
    grid = freeze_grid(own, config_dirs=[tmp_path])
    assert [spec.num_steps for spec in grid.specs] == [3, 4]


def test_a_run_keeps_the_name_that_its_sweep_has_for_it(tmp_path: Path) -> None:
    """A secret once stood in names; those of an app's points hang on what else is in the grid."""
    sweep = SweepPaths(tmp_path)
    plain = make_spec("cluster=local")
    secret = make_spec("cluster=local", train__command="sleep 5", params={"token": "hf_" + "AbCd1234" * 4})
    named = {each.run_id: each for each in (plain, secret)}
    assert by_known_names(sweep, named) == named, "a new sweep has no names yet"
    append_specs(sweep, [dataclasses.replace(plain, run_id="plain"), dataclasses.replace(secret, run_id="secret")])
    assert list(by_known_names(sweep, {plain.run_id: plain})) == [plain.run_id], "no version named it otherwise"
    assert list(by_known_names(sweep, {plain.run_id: plain}, hangs_on_grid=True)) == ["plain"]
    assert list(by_known_names(sweep, named)) == ["plain", "secret"]
    assert by_known_names(sweep, named)["secret"].digest == secret.digest
