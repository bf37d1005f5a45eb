"""The fast ways make of any overrides what Hydra's own compose makes of them, errors included."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.default_element import ResultDefault
from omegaconf import DictConfig, OmegaConf

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.hydra_parts import HydraParts
from hpc_trainer.config.load import to_typed
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError
from tests.unit.config.random_overrides import Maker, write_files

SETS_A_CHUNK = 40
CHUNKS = 13  # 520 sets; each takes one of Hydra's own composes, 0.1 s, or two
SAMPLE = (0, 1)  # with files of one's own (odd), and without


def _hydra_says(composer: Composer, lines: list[str]) -> tuple[str, TrainConfig | Exception]:
    """(YAML, typed) of Hydra's own way, or ("", error)."""
    try:
        untyped = composer.compose_untyped(lines)
        text = OmegaConf.to_yaml(untyped)
        return text, to_typed(untyped)
    except (ConfigError, ValueError) as error:
        return "", error


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in SAMPLE else pytest.mark.long) for seed in range(CHUNKS)]
)
def test_the_fast_ways_equal_hydras_own(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    seen: Counter[str] = Counter()
    with Composer([write_files(tmp_path)] if seed % 2 else []) as composer:
        maker = Maker(composer, seed)
        for _ in range(SETS_A_CHUNK):
            lines, num_fixed = maker.make()
            print(lines, num_fixed)
            text, expected = _hydra_says(composer, lines)
            # Where the fast ways turn to Hydra's own, its answer of a moment ago is given: composing takes 0.1 s.
            monkeypatch.setattr(composer, "compose", lambda _, answer=expected: _answer(answer))
            if isinstance(expected, Exception):
                seen["error"] += 1
                with pytest.raises(type(expected)) as caught:
                    composer.fast.compose(lines, num_fixed)
                assert caught.value is expected, "it was not Hydra's way that refused it"
                continue
            made = composer.fast.compose(lines, num_fixed)
            assert _exact(made.config) == _exact(expected)
            if made.way != "hydra":
                assert OmegaConf.to_yaml(composer.fast.compose_untyped(lines)) == text
                assert made.choices is not None
        seen.update(composer.fast.counts)
    print(seen)
    assert seen["plain"] > SETS_A_CHUNK / 8  # of 13 chunks the least has a quarter
    assert seen["omegaconf"] > 0


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
        (["model=cnn", "optim.lr=0.1", "seed=3", "precision.compute_dtype=bf16"], "plain"),
        (["params.lr=0.1", "params.name='a b'", "params.none=null"], "plain"),
        (["params.layers=[1,2]"], "omegaconf"),
        (["params.deep.a=1"], "omegaconf"),
        (["optim.betas=[0.5,0.6]"], "omegaconf"),
        (["+cluster.env.A=b"], "omegaconf"),
        (["train.eval_every_steps=${train.num_steps}"], "omegaconf"),
        (["hydra.verbose=true"], "hydra"),
    ],
)
def test_the_way_of_a_point_is_counted(lines: list[str], way: str) -> None:
    with Composer() as composer:
        assert composer.fast.compose(lines).way == way
        assert composer.fast.counts == {way: 1}


def test_many_groups_are_not_composed_in_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[int] = []
    original = HydraParts.compose

    def count(parts: HydraParts, entries: Sequence[ResultDefault]) -> DictConfig:
        composed.append(len(entries))
        return original(parts, entries)

    monkeypatch.setattr(HydraParts, "compose", count)
    axes = {"model": ("mlp", "cnn", "gpt"), "optim": ("adamw", "sgd"), "schedule": ("cosine", "constant"),
            "hardware": ("cpu_x1", "cpu_x2", "gpu_x1")}  # fmt: skip
    with Composer() as composer:
        for choices in itertools.product(*axes.values()):
            lines = [f"{group}={choice}" for group, choice in zip(axes, choices, strict=True)]
            made = composer.fast.compose(["experiment=digits", *lines])
            assert made.config.hardware.name == choices[3]
            assert {group: (made.choices or {})[group] for group in axes} == dict(zip(axes, choices, strict=True))
    assert len(composed) == 1 + 2 + 1 + 1 + 2, "one for the first combination, one for each other choice"


def test_points_share_sections_that_are_equal_and_no_root() -> None:
    with Composer() as composer:
        one, two, three = (composer.fast.compose(["optim.lr=0.1", f"seed={seed}"]).config for seed in (1, 2, 1))
    assert one.optim is two.optim
    assert one.train is two.train
    assert one == three
    assert one is not three
