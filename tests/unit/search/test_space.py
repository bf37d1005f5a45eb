"""The space of a search: what axes say, what is refused, and draws without a model."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from hpc_trainer.config.compose.search_axes import split_axes
from hpc_trainer.errors import ConfigError
from hpc_trainer.search.define import define, find_change
from hpc_trainer.search.space import Dimension, draw_quasi_random, draw_random, every_point, num_points, read_space
from tests.unit.search.searches import LR, WORDS, SearchOnDisk


def _space(*axes: str) -> tuple[Dimension, ...]:
    return read_space(split_axes(axes)[1])


def test_axes_are_those_of_hydras_grammar() -> None:
    fixed, axes = split_axes(
        ["seed=1", LR, "train.global_batch_size=interval(8,64)", "train.num_steps=range(10,51,20)", "model=mlp,cnn",
         "optim.weight_decay=choice(0,0.1)", "params.k=int(interval(1,5))", "params.x=interval(1,5)"]
    )  # fmt: skip
    assert fixed == ["seed=1"]
    lr, batch, steps, model, decay, whole, real = read_space(axes)
    assert (lr.low, lr.high, lr.is_log, lr.is_whole, lr.count) == (1e-4, 1e-1, True, False, None)
    assert (batch.is_whole, batch.count, batch.ends) == (True, 57, (8, 36, 64)), "the key takes whole numbers"
    assert [steps.at(place / 3 + 0.1) for place in range(3)] == [10, 30, 50]
    assert model.choices == ("mlp", "cnn")
    assert [type(value) for value in decay.choices] == [float, float], "the key takes real numbers"
    assert (whole.is_whole, real.is_whole) == (True, False)
    assert num_points((batch, steps, model)) == 57 * 3 * 2
    assert num_points((lr, model)) is None


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("optim.lr=interval(1e-4)", "has a lowest and a highest value. Use optim.lr=interval(LOW,HIGH)"),
        ("optim.lr=interval(0.1,0.1)", "from a number to a larger one"),
        ("optim.lr=interval(0.1,0.01)", "Use optim.lr=interval(0.01,0.1)"),
        ("optim.lr=interval(0,inf)", "Name the lowest and the highest value"),
        ("optim.lr=tag(log,interval(0,1))", "Use optim.lr=tag(log,interval(0.001,1))"),
        ("train.global_batch_size=interval(1.5,9)", "Use train.global_batch_size=interval(2,9)"),
        ("train.num_steps=range(10,1)", "a step above 0"),
        ("model=mlp,mlp", "a value is in the list twice"),
        ("optim.lr=choice([1],[2])", "a list of a search holds numbers"),
        ("hardware=cpu_x1,cpu_x2", "all trials of a search share hardware"),
        ("cluster.max_failures=1,2", "all trials of a search share cluster"),
    ],
)
def test_an_axis_that_says_nothing_is_refused(axis: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        define([*WORDS, "search=random", "search.trials=2", axis])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search.mode=max",), "search.mode=max would look for the worst eval_loss. Use search.mode=min"),
        (("search.metric=eval_los",), "not a metric of these runs. Did you mean eval_loss?"),
        (
            ("search=asha", "search.rungs=[4,64]"),
            "a rung is before the last step, and train.num_steps=64. Leave out 64",
        ),
        (("search=asha", "search.rungs=[4,2]"), "Use search.rungs=[2,4]"),
        (("search=asha", "search.rungs=[6,9]", "train.eval_every_steps=4"), "Use train.eval_every_steps=3"),
        (("search=asha", "train.num_steps=12", "train.eval_every_steps=6"), "leaves no step for a rung"),
        (("search.eta=3",), "search.eta=3"),
        (("search=asha", "search.median=true"), "search.median=true"),
        (("search.median=true", "search.rungs=[64]"), "a rung is before the last step, and train.num_steps=64"),
        (("search.trials=0",), "search.trials=0 must be at least 1"),
        (("search=banana",), "banana"),
    ],
)
def test_a_key_of_the_search_that_says_nothing_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        define([*WORDS, "search=random", *words, LR])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search=asha", "params.x=interval(0,1)"), "the last step of a program is not known"),
        (("search=asha", "search.rungs=[9]", "search.median=true", "params.x=interval(0,1)"), "search.median=true"),
        (("search=random", "search.rungs=[9]", "params.x=interval(0,1)"), "no trial of search=random pauses"),
        (("search=cma_es", "params.x=1,2"), "search=cma_es models numbers, and all axes are lists"),
        (("search=random", "params.x=interval(0,1)", "params.y=interval(0,1)"), "params.y is an axis of the grid"),
    ],
)
def test_a_search_of_programs_that_says_nothing_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        define(["cluster=local", "train.command='true {params.x}'", "search.metric=loss", "search.trials=2", *words])
    assert said in str(error.value)


def test_a_search_without_an_axis_and_a_finite_space_that_is_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match="a search needs an axis"):
        define([*WORDS, "search=random"])
    with pytest.raises(ConfigError, match="the space has 2 points, and no point is tried twice"):
        define([*WORDS, "search=random", "search.trials=3", "model=mlp,cnn"])


def test_a_key_that_follows_an_axis_is_refused() -> None:
    """A drawn value is set in a frozen configuration, where interpolations are resolved."""
    with pytest.raises(ConfigError, match=r"optim\.weight_decay follows the value of an axis"):
        define([*WORDS, "search=random", "optim.weight_decay=${optim.lr}", LR])


def test_another_space_is_refused_with_the_difference_and_more_trials_are_not(tmp_path: Path) -> None:
    old = SearchOnDisk(tmp_path, "search=random", "search.trials=3").search
    assert (
        find_change(old, SearchOnDisk(tmp_path, "search=random", "search.trials=9", "search.parallel=4").search) is None
    )
    wider = SearchOnDisk(tmp_path, "search=random", "search.trials=3", axes=["optim.lr=tag(log,interval(1e-4,1))"])
    assert "optim.lr from 0.0001 to 0.1 (log) before, optim.lr from 0.0001 to 1 (log) now" in (
        find_change(old, wider.search) or ""
    )
    fewer = SearchOnDisk(tmp_path, "search=random", "search.trials=2", "train.num_steps=32").search
    said = find_change(old, fewer) or ""
    assert "search.trials (3 before, 2 now: it can only grow)" in said
    assert "train.num_steps (64 before, 32 now)" in said


def test_random_draws_fill_the_range_and_depend_on_seed_and_number_alone() -> None:
    space = _space(LR, "train.global_batch_size=interval(1,4)", "model=mlp,cnn")
    draws = [draw_random(space, 0, number) for number in range(2000)]
    assert draws[7] == draw_random(space, 0, 7) != draw_random(space, 1, 7)
    counts = [sum(draw["train.global_batch_size"] == size for draw in draws) for size in (1, 2, 3, 4)]
    assert all(430 < count < 570 for count in counts), counts  # 500 ± 3.6 standard deviations
    assert 900 < sum(draw["model"] == "mlp" for draw in draws) < 1100
    low = sum(float(str(draw["optim.lr"])) < 10**-2.5 for draw in draws)
    assert 900 < low < 1100, "log: half of the draws are below the geometric middle"


def test_quasi_random_draws_are_more_even_than_random_ones() -> None:
    space = _space("params.a=interval(0,1)", "params.b=interval(0,1)")

    def empty(draws: list[dict[str, object]]) -> int:
        cells = {(int(8 * float(str(draw["params.a"]))), int(8 * float(str(draw["params.b"])))) for draw in draws}
        return 64 - len(cells)

    quasi = [empty([draw_quasi_random(space, seed, number) for number in range(64)]) for seed in range(9)]
    plain = [empty([draw_random(space, seed, number) for number in range(64)]) for seed in range(9)]
    assert statistics.mean(quasi) < 0.75 * statistics.mean(plain), (quasi, plain)
    first = [float(str(draw_quasi_random(space, 3, number)["params.a"])) for number in range(64)]
    assert sorted(int(64 * value) for value in first) == list(range(64)), "base 2: one point in each 64th"


WHEN = 'search.when=["optim.momentum if optim == \'sgd\'","params.k if params.depth > 2"]'
CONDITIONAL = (LR, "optim.momentum=interval(0.1,0.9)", "optim=sgd,adamw", "params.k=range(1,4)", "params.depth=1,2,3,4")


def test_an_axis_with_a_condition_has_a_value_only_where_it_holds(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=24", "train.main=any.main", "search.metric=loss",
                        WHEN, axes=CONDITIONAL, trust=("any",))  # fmt: skip
    names = [dimension.key for dimension in disk.search.space]
    assert names.index("optim") < names.index("optim.momentum"), "an axis follows those that its condition reads"
    assert names.index("params.depth") < names.index("params.k")
    for _ in range(24):
        assert disk.next() is not None
    kinds = set()
    for trial in disk.trials.read():
        config = disk.trials.spec(trial.number).typed()
        assert ("optim.momentum" in trial.params) == (trial.params["optim"] == "sgd")
        assert ("params.k" in trial.params) == (int(str(trial.params["params.depth"])) > 2)
        assert config.params["k"] == trial.params.get("params.k")
        assert getattr(config.optim, "momentum", None) == trial.params.get("optim.momentum")
        kinds.add((trial.params["optim"], "params.k" in trial.params))
    assert len(kinds) == 4


def test_points_of_a_finite_space_with_conditions_are_counted_once() -> None:
    axes = split_axes(["params.depth=1,2", "params.k=1,2,3"])[1]
    space = read_space(axes, ["params.k if params.depth == 2"])
    assert num_points(space) == 1 + 3
    assert every_point(space)[0] == {"params.depth": 1}


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("optim.momentum", "a condition is written KEY if CONDITION"),
        ("optim.momentun if optim == 'sgd'", "Did you mean optim.momentum?"),
        ("optim.momentum if model == 'mlp'", "which reads axes of the search. model is not an axis"),
        ("optim.momentum if print(1)", "is not allowed here"),
        ("optim if optim.lr > 0.1", "optim chooses files of a group"),
        ("optim.lr if optim.momentum > 0.1','optim.momentum if optim.lr > 0", "read each other"),
        ("optim.momentum if optim == 'sgd' and optim.momentum > 0", "read each other"),
    ],
)
def test_a_condition_that_says_nothing_is_refused(when: str, said: str) -> None:
    axes = split_axes([LR, "optim.momentum=interval(0,0.9)", "optim=sgd,adamw"])[1]
    with pytest.raises(ConfigError) as error:
        read_space(axes, when.split("','"))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("optim.lr=tag(lg,interval(1e-4,1))", "an axis has only the tag log, not lg"),
        ("train.num_steps=tag(log,range(10,100,10))", "a log axis has no steps"),
    ],
)
def test_a_tag_that_says_nothing_is_refused(axis: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_axes([axis])
    assert said in str(error.value)


def test_lists_and_ranges_in_all_forms_of_hydras_grammar() -> None:
    axes = [
        "params.a=tag(log,range(1,1025))", "params.b=range(4)", "params.c=range(0,1,0.25)",
        "params.d=float(range(1,4))", "params.e=int(choice(1.0,2.0))", "params.f=a,'b c',null,true",
        "params.g=sort(3,1,2)", "params.h=shuffle(range(1,4))", "params.i=str(choice(1,2))",
    ]  # fmt: skip
    log, short, real, cast, whole, texts, in_order, shuffled, words = _space(*axes)
    assert (log.is_log, log.is_whole, log.ends[0], log.ends[2]) == (True, True, 1, 1024)
    assert [short.at(place / 4) for place in range(4)] == [0, 1, 2, 3]
    assert [real.at(place / 4) for place in range(4)] == [0.0, 0.25, 0.5, 0.75]
    assert [(type(value), value) for value in (cast.at(0), cast.at(0.99))] == [(float, 1.0), (float, 3.0)]
    assert [(type(value), value) for value in whole.choices] == [(int, 1), (int, 2)]
    assert texts.choices == ("a", "b c", None, True)
    assert sorted(map(str, in_order.choices)) == ["1", "2", "3"]
    assert [shuffled.at(place / 3) for place in range(3)] == [1, 2, 3]
    assert words.choices == ("1", "2")
