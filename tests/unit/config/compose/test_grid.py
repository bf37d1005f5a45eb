"""A command line with sweeps becomes points: their order, and whose axis wins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.compose.grid import Point, expand_grid
from hpc_trainer.errors import ConfigError
from tests.composed import expand

pytestmark = pytest.mark.usefixtures("fake_slurm")


@pytest.fixture(scope="module")
def composer() -> Iterator[GridComposer]:
    with GridComposer() as composer:
        yield composer


def _axes(points: list[Point]) -> list[tuple[str, ...]]:
    return [tuple(point.axes.values()) for point in points]


def test_a_line_without_a_sweep_is_one_point(composer: GridComposer) -> None:
    (point,) = expand(composer, ["seed=3", "optim.lr=0.1"])
    assert point.axes == {}
    assert point.overrides == ("seed=3", "optim.lr=0.1")


def test_no_overrides_at_all_are_one_point(composer: GridComposer) -> None:
    assert [point.axes for point in expand(composer, [])] == [{}]


def test_the_first_axis_is_the_slowest(composer: GridComposer) -> None:
    points = expand(composer, ["model=mlp,cnn", "train.num_steps=5", "seed=0,1,2"])
    assert list(points[0].axes) == ["model", "seed"]
    assert _axes(points) == list(itertools.product(("mlp", "cnn"), ("0", "1", "2")))
    assert points[-1].overrides == ("train.num_steps=5", "model=cnn", "seed=2")


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("seed=choice(4,5)", ["4", "5"]),
        ("seed=range(1,4)", ["1", "2", "3"]),
        ("seed=range(0,10,step=5)", ["0", "5"]),
        ("seed=sort(3,1,2)", ["1", "2", "3"]),
        ("model=glob(resnet*)", ["resnet18", "resnet34", "resnet50"]),
        ("model=glob([resnet*,mlp],exclude=[*34,*50])", ["mlp", "resnet18"]),
        ("optim.lr=1e-3,3e-3", ["0.001", "0.003"]),
        ("train.max_grad_norm=1,null", ["1", "null"]),
        ("optim.betas=[0.9,0.99],[0.8,0.9]", ["[0.9,0.99]", "[0.8,0.9]"]),
        ("hardware.partition='a','b'", ["'a'", "'b'"]),
        ("+cluster.env.OMP_NUM_THREADS=1,2", ["1", "2"]),
    ],
)
def test_every_form_of_a_sweep(composer: GridComposer, override: str, values: list[str]) -> None:
    points = expand(composer, [override])
    assert [value for point in points for value in point.axes.values()] == values


def test_a_quoted_comma_is_no_axis(composer: GridComposer) -> None:
    (point,) = expand(composer, ["hardware.exclude='n1,n2'"])
    assert point.axes == {}
    assert composer.compose(point.overrides).hardware.exclude == "n1,n2"


def test_a_quoted_axis_value_stays_text_when_composed(composer: GridComposer) -> None:
    points = expand(composer, ["hardware.partition='1','a b'"])
    assert [composer.compose(point.overrides).hardware.partition for point in points] == ["1", "a b"]


def test_axes_of_a_sweep_file(composer: GridComposer) -> None:
    points = expand(composer, ["sweep=digits_grid"])
    assert _axes(points) == list(itertools.product(("mlp", "cnn"), ("0.001", "0.003")))
    assert composer.compose(points[3].overrides).optim.lr == 0.003
    assert composer.compose(points[3].overrides).model.name == "cnn"


def test_an_axis_on_the_command_line_replaces_that_of_the_file(composer: GridComposer) -> None:
    points = expand(composer, ["sweep=digits_grid", "optim.lr=0.5,0.6,0.7"])
    assert {point.axes["optim.lr"] for point in points} == {"0.5", "0.6", "0.7"}
    assert len(points) == 2 * 3


def test_a_fixed_value_on_the_command_line_removes_the_axis_of_the_file(composer: GridComposer) -> None:
    points = expand(composer, ["sweep=digits_grid", "model=gpt"])
    assert [list(point.axes) for point in points] == [["optim.lr"]] * 2
    assert composer.compose(points[0].overrides).model.name == "gpt"


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["seed=0,1", "seed=2"], ["2"]),
        (["seed=2", "seed=0,1"], ["0", "1"]),
        (["seed=0,1", "seed=2,3"], ["2", "3"]),
        (["seed=0,1", "optim.lr=0.1", "++seed=2"], ["2"]),
    ],
)
def test_of_one_key_the_last_word_counts(composer: GridComposer, words: list[str], seeds: list[str]) -> None:
    points = [composer.compose_point(point.overrides, point.num_fixed).config for point in expand(composer, words)]
    assert [str(config.seed) for config in points] == seeds


def test_axes_may_be_given_without_a_file(composer: GridComposer) -> None:
    points = expand(composer, ["+sweep.axes={seed:[1,2],optim.lr:[0.1]}"])
    assert _axes(points) == [("1", "0.1"), ("2", "0.1")]


def test_sweep_files_may_be_an_axis_and_each_brings_its_own_axes(composer: GridComposer) -> None:
    points = expand(composer, ["sweep=digits_grid,seeds"])
    assert [dict(point.axes)["sweep"] for point in points] == ["digits_grid"] * 4 + ["seeds"] * 5
    assert [point.axes["seed"] for point in points[4:]] == ["0", "1", "2", "3", "4"]


def test_experiments_may_be_an_axis(composer: GridComposer) -> None:
    points = expand(composer, ["experiment=digits,gpt_bytes", "seed=1,2"])
    assert _axes(points) == [("digits", "1"), ("digits", "2"), ("gpt_bytes", "1"), ("gpt_bytes", "2")]
    assert composer.compose(points[2].overrides).experiment_name == "gpt_bytes"


@pytest.mark.parametrize("axes", ["{seed:3}", "{seed:[]}", "{seed:{a:1}}"])
def test_an_axis_of_a_file_is_a_list_with_a_value(composer: GridComposer, axes: str) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.axes\.seed=.* must be a list with at least one value"):
        expand(composer, [f"+sweep.axes={axes}"])


def test_an_axis_without_a_value_is_refused(composer: GridComposer) -> None:
    with pytest.raises(ConfigError, match=r"model=glob\(nothing\*\): an axis needs at least one value"):
        expand(composer, ["model=glob(nothing*)"])


def test_the_persons_own_value_gives_way_to_the_axis(
    composer: GridComposer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hpc_trainer").mkdir()
    (tmp_path / "hpc_trainer" / "config.yaml").write_text("seed: 7\ncluster.account: lab\n")
    points = expand(composer, ["seed=1,2"])
    assert [composer.compose(point.overrides).seed for point in points] == [1, 2]
    assert [composer.compose(point.overrides).seed for point in expand(composer, ["sweep=seeds"])] == [0, 1, 2, 3, 4]


def test_a_file_of_axes_is_a_grid(composer: GridComposer) -> None:
    for new, old in (
        (["grid=digits_grid"], ["sweep=digits_grid"]),
        (["grid=digits_grid,seeds"], ["sweep=digits_grid,seeds"]),
        (["grid.zip=[{model:[mlp,cnn],seed:[1,2]}]"], ["sweep.zip=[{model:[mlp,cnn],seed:[1,2]}]"]),
    ):
        points = [expand(composer, words) for words in (new, old)]
        assert [point.overrides for point in points[0]] == [point.overrides for point in points[1]]
        assert len(points[0]) > 1


# --- axes that step together, conditions, sizes; files of sweep/ are in test_sweep_files.py ---


def test_axes_step_together_on_the_command_line_too(composer: GridComposer) -> None:
    points = expand(composer, ["seed=1,2", "sweep.zip=[{model:[mlp,cnn],optim.lr:[0.1,0.2]}]"])
    assert _axes(points) == [("1", "mlp", "0.1"), ("1", "cnn", "0.2"), ("2", "mlp", "0.1"), ("2", "cnn", "0.2")]


def test_a_condition_over_axes_is_decided_before_the_point_is_composed(composer: GridComposer) -> None:
    lines = ["optim=adamw,sgd", "optim.momentum=0.5,0.9", "sweep.exclude=['optim == \"adamw\"']"]
    grid = expand_grid(composer, lines)
    assert _axes(grid.points) == [("sgd", "0.5"), ("sgd", "0.9")]
    assert grid.num_excluded == 2
    for point in grid.points:
        composer.compose(point.overrides)


def test_a_condition_over_other_keys_waits_for_the_composed_point(composer: GridComposer) -> None:
    (point, _) = expand(composer, ["seed=1,2", "sweep.exclude=['train.num_steps > 3','seed == 3']"])
    assert [condition.text for condition in point.exclude] == ["train.num_steps > 3"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["sweep.zip=[{seed:[1,2],optim.lr:[1]}]"], r"sweep\.zip\[0\]: .* same length.* seed 2, optim\.lr 1"),
        (["sweep.zip=[{seed:3}]"], r"sweep\.zip\[0\]\.seed=3 must be a list"),
        (["sweep.zip=[{seed:[1]}]", "+sweep.axes.seed=[1,2]"], "seed is on two axes"),
        (["sweep.exclude=['seed ==']", "seed=1,2"], "condition 'seed ==' cannot be read"),
        (["seed=range(1000)", "train.num_steps=range(1,102)"],
         r"101,000 points \(seed 1000 × train\.num_steps 101\).* at most 100,000"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_refused(composer: GridComposer, lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(composer, lines)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("lines", "tries"), [(["a=1"], 1), (["model=mlp,cnn", "a=1"], 2), (["model=mlp,cnn", "seed=1,2", "a=1"], 3)]
)
def test_the_same_lines_are_not_refused_twice(
    composer: GridComposer, lines: list[str], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axes' first values, their groups and none of them are tried in turn, where they differ."""
    tried: list[list[str]] = []
    compose = composer.compose_point

    def count(overrides: list[str], num_fixed: int) -> object:
        tried.append(overrides)
        return compose(overrides, num_fixed)

    monkeypatch.setattr(composer, "compose_point", count)
    with pytest.raises(ConfigError, match="no such key"):
        expand_grid(composer, lines)
    assert len(tried) == tries, tried
