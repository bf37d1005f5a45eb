"""The fast way makes of any overrides what Hydra's own compose makes of them, errors included."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.default_element import ResultDefault
from omegaconf import DictConfig

from hpc_trainer.config.compose import fast_compose
from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.compose.hydra_parts import HydraParts
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from tests.unit.config.compose.random_overrides import Maker, write_files

SETS_A_CHUNK = 10
CHUNKS = 52  # 520 sets; each takes one of Hydra's own composes, 0.1 s, or two
SAMPLE = (1,)  # with files of one's own (odd chunks)


def _hydra_says(composer: GridComposer, lines: list[str]) -> TrainConfig | Exception:
    try:
        return GridComposer.compose(composer, lines)  # not what a test puts in its place
    except (ConfigError, ValueError) as error:
        return error


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in SAMPLE else pytest.mark.long) for seed in range(CHUNKS)]
)
def test_the_fast_way_equals_hydras_own(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    seen: Counter[str] = Counter()
    with GridComposer([write_files(tmp_path)] if seed % 2 else []) as composer:
        maker = Maker(composer, seed)
        for _ in range(SETS_A_CHUNK):
            lines, num_fixed = maker.make()
            print(lines, num_fixed)
            expected = _hydra_says(composer, lines)
            # Where the fast way turns to Hydra's own, its answer of a moment ago is given: composing takes 0.1 s.
            monkeypatch.setattr(composer, "compose", lambda _, answer=expected: _answer(answer))
            if isinstance(expected, Exception):
                seen["error"] += 1
                with pytest.raises(type(expected)) as caught:
                    composer.compose_point(lines, num_fixed)
                assert caught.value is expected, "it was not Hydra's way that refused it"
                continue
            made = composer.compose_point(lines, num_fixed)
            assert _exact(made.config) == _exact(expected)
        seen.update(composer.counts)
    print(seen)
    assert seen["fast"] > SETS_A_CHUNK / 4  # of the chunks the least has three tenths


def _answer(answer: TrainConfig | Exception) -> TrainConfig:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _exact(config: object) -> str:
    """Equality that tells 1 from 1.0 and True, and a list from a tuple."""
    return repr(copy.deepcopy(config))


@pytest.mark.parametrize(
    ("lines", "way"),
    [
        (["model=cnn", "optim.lr=0.1", "seed=3", "precision.compute_dtype=bf16"], "fast"),
        (["params.lr=0.1", "params.name='a b'", "params.none=null"], "fast"),
        (["params.layers=[1,2]", "params.deep.a=1"], "fast"),
        (["optim.betas=[0.5,0.6]"], "fast"),
        (["+cluster.env.A=b"], "fast"),
        (["train.eval_every_steps=${train.num_steps}"], "fast"),
        (["hydra.verbose=true"], "hydra"),
    ],
)
def test_the_way_of_a_point_is_counted(lines: list[str], way: str) -> None:
    with GridComposer() as composer:
        composer.compose_point(lines)
        assert composer.counts == {way: 1}


def test_points_that_agree_on_what_is_named_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[int] = []
    to_typed = fast_compose.to_typed
    monkeypatch.setattr(fast_compose, "to_typed", lambda cfg: (resolved.append(1), to_typed(cfg))[1])
    with GridComposer() as composer:
        for steps, lr, seed in itertools.product((5, 6), (0.1, 0.2), (1, 2, 3)):
            fixed = ["experiment=digits", "train.eval_every_steps=${train.num_steps}"]
            lines = [*fixed, f"train.num_steps={steps}", f"optim.lr={lr}", f"seed={seed}"]
            config = composer.compose_point(lines, len(fixed)).config
            assert (config.train.eval_every_steps, config.optim.lr, config.seed) == (steps, lr, seed)
    assert len(resolved) == 2, "once for each number of steps"


@pytest.mark.parametrize(
    ("lines", "is_alone"),
    [
        (["train.eval_every_steps=5"], True),
        (["train.eval_every_steps=${train.num_steps}"], True),
        (["data=synthetic_images", "data.data_seed=${seed}"], False),
        (["params.who=${oc.env:HOME}"], False),  # it may name anything
        (["params.seed=x", "params.who=${.seed}"], False),
    ],
)
def test_what_hangs_on_the_seed_is_known(lines: list[str], is_alone: bool) -> None:
    with GridComposer() as composer:
        for num_fixed in (0, len(lines)):
            assert composer.compose_point([*lines, "seed=3"], num_fixed).is_seed_alone is is_alone


def test_many_groups_are_not_composed_in_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[int] = []
    original = HydraParts.compose

    def count(parts: HydraParts, entries: Sequence[ResultDefault]) -> DictConfig:
        composed.append(len(entries))
        return original(parts, entries)

    monkeypatch.setattr(HydraParts, "compose", count)
    axes = {"model": ("mlp", "cnn", "gpt"), "optim": ("adamw", "sgd"), "schedule": ("cosine", "constant"),
            "hardware": ("cpu_x1", "cpu_x2", "gpu_x1")}  # fmt: skip
    with GridComposer() as composer:
        for choices in itertools.product(*axes.values()):
            lines = [f"{group}={choice}" for group, choice in zip(axes, choices, strict=True)]
            made = composer.compose_point(["experiment=digits", *lines])
            assert made.config.hardware.name == choices[3]
            assert {group: (made.choices or {})[group] for group in axes} == dict(zip(axes, choices, strict=True))
    assert len(composed) == 1 + 2 + 1 + 1 + 2, "one for the first combination, one for each other choice"


def test_points_share_sections_that_are_equal_and_no_root() -> None:
    with GridComposer() as composer:
        one, two, three = (composer.compose_point(["optim.lr=0.1", f"seed={seed}"]).config for seed in (1, 2, 1))
    assert one.optim is two.optim
    assert one.train is two.train
    assert one == three
    assert one is not three
