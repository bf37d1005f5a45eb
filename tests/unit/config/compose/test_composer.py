"""Every file of conf/ composes and has an effect; every mistake is answered by key, rule and nearest choice."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_trainer.config.compose import wrong_overrides
from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.overrides import override_value
from hpc_trainer.config.compose.own_files import conf_dir
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.config.store import DECLARED
from hpc_trainer.errors import ConfigError

GLOBAL_GROUPS = ("experiment", "sweep", "debug")
TARGETS = [
    "model._target_=hpc_trainer.models.mlp.Mlp", "data._target_=hpc_trainer.datasets.digits.build",
    "optim._target_=torch.optim.RAdam",
]  # fmt: skip


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def _groups() -> list[str]:
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def composer() -> Iterator[Composer]:
    with Composer() as composer:
        yield composer


def test_conf_has_the_groups_of_the_design() -> None:
    wanted = "hardware cluster model data optim schedule precision parallel checkpoint monitor tracker experiment sweep"
    assert set(wanted.split()) | {"debug", "snapshot"} <= set(_groups())
    stray = [path for path in conf_dir().iterdir() if path.is_file() and path.name != "train.yaml"]
    assert stray == []


# One composition takes a choice of every group: the n-th of each.
_ROWS = list(itertools.zip_longest(*([(g, c) for c in _choices(g)] for g in _groups() if g not in GLOBAL_GROUPS)))


@pytest.mark.few(5)
@pytest.mark.parametrize("row", _ROWS, ids=lambda row: "+".join(choice[1] for choice in row if choice))
def test_every_choice_composes_and_its_figures_arrive(composer: Composer, row: tuple[Any, ...]) -> None:
    chosen = [choice for choice in row if choice]
    targets = [line for line in TARGETS if (line.split(".")[0], "custom") in chosen]
    plain = to_plain(composer.compose([*(f"{group}={name}" for group, name in chosen), *targets]))
    for group, name in chosen:
        written = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text()) or {}
        for key, value in written.items():
            if key != "defaults":
                assert plain[group][key] == value, f"{group}={name}: {key}"
        if group in ("hardware", "cluster", "model", "data", "optim"):
            assert plain[group]["name"] == name, f"conf/{group}/{name}.yaml must carry its own name"


@pytest.mark.few(8)
@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GLOBAL_GROUPS for name in _choices(group)])
def test_every_experiment_sweep_and_debug_file_is_a_valid_run(composer: Composer, choice: str) -> None:
    config = composer.compose([choice])
    validate(config)
    if choice.startswith("experiment="):
        assert config.experiment_name == choice.split("=")[1]
    if choice.startswith("sweep="):
        assert config.sweep.axes or config.sweep.forms


@pytest.mark.parametrize("experiment", _choices("experiment"))
def test_an_experiment_file_says_how_it_is_run(experiment: str) -> None:
    text = (conf_dir() / "experiment" / f"{experiment}.yaml").read_text()
    assert text.startswith("# @package _global_\n#")
    assert f"experiment={experiment}" in text.split("defaults:")[0], "the header holds the command"


def test_debug_stands_over_the_experiment_and_the_command_line_over_both(composer: Composer) -> None:
    assert composer.compose(["experiment=digits", "debug=smoke"]).train.num_steps == 4
    assert composer.compose(["experiment=digits", "debug=smoke", "train.num_steps=7"]).train.num_steps == 7


# --- mistakes ---

MISTAKES = [
    (["nope=1"], ["nope: no such key in the root", "hardware", "seed"]),
    (["sed=1"], ["sed: no such key", "Did you mean seed?"]),
    (["modl=cnn"], ["modl: no such key", "Did you mean model?"]),
    (["lr=0.1"], ["lr: no such key in the root. Did you mean optim.lr?", "Valid: after, "]),
    (["steps=100"], ["steps: no such key in the root. Did you mean train.num_steps (the length of a run", "? Valid"]),
    (["epochs=3"], ["Did you mean train.num_steps (the length of a run in optimizer steps)?"]),
    (["optim.learning_rate=1"], ["no such key in optim (optim=adamw). Did you mean optim.lr? Valid"]),
    (
        ["train.batch_size=1"],
        ["Did you mean train.micro_batch_size (of a rank's forward pass) or train.global_batch_size"],
    ),
    (["train.lr=1"], ["Did you mean optim.lr?"]),
    (["train.patience=1"], ["Did you mean train.early_stop.patience?"]),
    (["resume=true"], ["A run resumes from its newest checkpoint by itself: repeat the same command."]),
    (["train.resume=true"], ["A run resumes from its newest checkpoint by itself: repeat the same command."]),
    (
        ["cluster=my_site"],
        [
            "Valid: local, slurm; in folders: alliance/, ",
            ". To use a choice of your own, pass the folder that has cluster/my_site.yaml with --config-dir.",
        ],
    ),
    (
        ["hardware=nersc/perlmuter_x4"],
        ["hardware=nersc/perlmuter_x4: no such choice. Did you mean nersc/perlmutter_x4? Valid: cpu_x1, ", "olcf/"],
    ),
    (
        ["optim.lrr=1"],
        ["optim.lrr: no such key in optim (optim=adamw)", "Did you mean lr?", "in_backward, layer_decay, lr"],
    ),
    (["optim=sgd", "optim.betas=[1,2]"], ["optim.betas", "(optim=sgd)", "momentum"]),
    (["traim.num_steps=1"], ["no such section 'traim'", "Did you mean train?"]),
    (["train.num_stepz=1"], ["train.num_stepz: no such key", "Did you mean num_steps?"]),
    (["+optim.new=1"], ["optim.new: no such key", "Valid: betas"]),
    (["+foo.bar=1"], ["foo.bar: no such section 'foo'", "hardware"]),
    (["+newkey=1"], ["newkey: no such key in the root", "Valid:"]),
    (["model=cnnn"], ["model=cnnn: no such choice", "Did you mean cnn?", "resnet50"]),
    (["experiment=digit"], ["experiment=digit: no such choice", "Did you mean digits?"]),
    (["debug=zzz"], ["debug=zzz: no such choice", "Valid: overfit, profile, smoke"]),
    (["optim.lr=abc"], ["optim.lr=abc", "must be a number", "Use"]),
    (["hardware.num_nodes=two"], ["hardware.num_nodes=two", "must be a whole number", "Use"]),
    (["hardware.num_nodes=1.5"], ["hardware.num_nodes=1.5", "must be a whole number", "Use"]),
    (["train.deterministic=perhaps"], ["train.deterministic=perhaps", "must be true or false", "Use"]),
    (["optim.betas=0.9"], ["optim.betas=0.9 must be a list of numbers."]),
    (["train=3"], ["train=3", "train is a section", "train.main=VALUE"]),
    (
        ["precision.compute_dtype=fp6"],
        ["precision.compute_dtype=fp6: no such choice. Did you mean fp16?", "bf16, bf16_sr, fp16, fp8."],
    ),
    (["cluster.executor=pbs"], ["cluster.executor=pbs: no such choice. Valid: local, slurm."]),
    (["parallel.pipeline_schedule=1f2b"], ["schedule=1f2b: no such choice. Did you mean 1f1b? Valid: 1f1b, gpipe."]),
    (["model=custom"], ["model._target_", "must be set", "model._target_=VALUE"]),
    (["model=custom", "model.kwargs.x=1"], ["model.kwargs.x", "+model.kwargs.x=VALUE"]),
    (["optim.lr=${nowhere.x}"], ["optim.lr=", "there is no key nowhere.x"]),
    (["optim.lr=${oc.env:NOT_SET_ANYWHERE}"], ["optim.lr", "NOT_SET_ANYWHERE"]),
    (["optim.lr=[1"], ["optim.lr=[1", "without brackets", "Use"]),
    (["optim.lr"], ["optim.lr", "KEY=VALUE"]),
    (["=3"], ["=3", "KEY=VALUE"]),
    ([""], ["KEY=VALUE"]),
    (["~train.num_steps"], ["train.num_steps"]),
    (["+cluster=slurm"], ["cluster"]),
    (["model@foo=cnn"], ["model@foo"]),
]  # fmt: skip


@pytest.mark.few(15)
@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(case[0]) or "empty" for case in MISTAKES])
def test_a_mistake_is_named_with_its_rule_and_the_choices(
    composer: Composer, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        composer.compose(overrides)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "Traceback" not in message


def test_interpolations_between_keys_are_resolved(composer: Composer) -> None:
    config = composer.compose(["train.global_batch_size=32", "train.eval_every_steps=${train.global_batch_size}"])
    assert config.train.eval_every_steps == 32


# --- values into override grammar and back ---

_TEXT = st.text(max_size=12) | st.text(alphabet="\\'\" a,[]{}()$=:~+\n\t", max_size=8)
_SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | _TEXT
_KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3), max_leaves=6
)


def test_override_value_reads_back_as_the_same_value(composer: Composer) -> None:
    @settings(max_examples=60)
    @given(_VALUES)
    def reads_back(value: Any) -> None:
        (parsed,) = composer.parse([f"model.kwargs={override_value(value)}"])
        assert not parsed.is_sweep_override()
        assert _plain(parsed.value()) == value
        assert type(_plain(parsed.value())) is type(value)

    reads_back()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if type(value).__name__ == "QuotedString" else value


@pytest.mark.parametrize("text", ["a\\b", "it's", "it\\'s", "ends\\", "a,b", "[x]", "${x}", "$(id)", "", " a ", "1e-3"])
def test_override_value_keeps_awkward_texts(composer: Composer, text: str) -> None:
    (parsed,) = composer.parse([f"model.name={override_value(text)}"])
    assert str(_text(parsed.value())) == text
    assert not parsed.is_sweep_override()


def _text(value: Any) -> str:
    return value.text if hasattr(value, "text") else value


def test_keys_that_are_named_for_the_words_of_others_are_there() -> None:
    named = {key for meant in wrong_overrides._OTHER_NAMES for key in re.findall(r"\b[a-z_]+\.[a-z_]+\b", meant)}
    assert len(named) > 20
    assert [key for key in named if key not in DECLARED] == []
