"""The curve of a range test: smooth, steepest where it is, and drawn as one file that needs no other."""

from __future__ import annotations

import itertools
import math
import random
from xml.etree import ElementTree

import pytest

from hpc_trainer.verify.find_lr import Curve, LrRange, curve_of, draw, from_text
from hpc_trainer.verify.lr_range import DivergenceWatch

PLAN = LrRange(first=1e-6, last=1.0, num_steps=120)


def _curve(*, noise: float = 0.0, fall_at: float = 1e-3, divergence: float | None = 0.3) -> Curve:
    """A loss that falls from 2.4 to 0.4 around `fall_at`, and rises steeply near 1."""
    chance = random.Random(3)
    records = []
    for step in range(PLAN.num_steps):
        lr = PLAN.lr(step)
        fall = 2 / (1 + math.exp(-4 * math.log10(lr / fall_at)))
        loss = 2.4 - fall + (lr / 0.3) ** 3 + chance.gauss(0, noise)
        if divergence is not None and lr > divergence:
            break
        records.append({"step": step + 1, "lr": lr, "loss": loss})
    return curve_of(records, divergence)


def test_the_rates_are_equal_multiples_from_the_first_to_the_last() -> None:
    rates = [PLAN.lr(step) for step in range(PLAN.num_steps)]
    assert (rates[0], rates[-1]) == (1e-6, pytest.approx(1.0))
    ratios = [after / before for before, after in itertools.pairwise(rates)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert from_text(PLAN.to_text()) == PLAN


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("fall_at", [1e-4, 1e-3])
def test_the_steepest_fall_is_found_without_lag_also_in_noise(noise: float, fall_at: float) -> None:
    steepest = _curve(noise=noise, fall_at=fall_at).steepest_lr
    assert steepest is not None
    assert abs(math.log10(steepest / fall_at)) < (0.35 if noise else 0.06)


def test_the_more_careful_rate_is_suggested() -> None:
    early = _curve()
    assert (early.tenth_lr, early.suggested_lr) == (pytest.approx(0.03), early.steepest_lr)
    late = _curve(fall_at=0.05)
    assert late.suggested_lr == late.tenth_lr == pytest.approx(0.03)
    without = _curve(divergence=None)
    assert (without.tenth_lr, without.suggested_lr) == (None, without.steepest_lr)


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    records = [{"step": step + 1, "lr": PLAN.lr(step), "loss": 2.0 + step} for step in range(50)]
    assert curve_of(records, None).suggested_lr is None
    assert curve_of([], 1.0).suggested_lr is None


def test_divergence_is_a_loss_that_is_no_number_or_far_above_the_best() -> None:
    watch = DivergenceWatch()
    assert not any(watch.see(loss) for loss in [2.4, 2.5, 2.3, 2.6, 1.0, 0.9, 0.8, 1.2])
    steps = next(count for count in range(1, 50) if watch.see(9.0))
    assert 2 <= steps <= 12, "one bad batch is none, and many are"
    assert DivergenceWatch().see(math.nan)
    assert DivergenceWatch().see(math.inf)


def test_the_plot_is_one_whole_file() -> None:
    text = draw(_curve(noise=0.1), 'a & b <c> "d"')
    root = ElementTree.fromstring(text)
    kinds = [each.tag.partition("}")[2] for each in root.iter()]
    assert kinds.count("polyline") == 2
    assert {"script", "image", "use", "style", "a"}.isdisjoint(kinds)
    assert "href" not in text
    assert text.count("http") == 1, "the name of the format, and nothing else from elsewhere"
    words = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert {'a & b <c> "d"', "1e-3", "learning rate"} <= set(words)
    assert [word for word in words if word and word.startswith("steepest")]
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
        assert all(70 <= x <= 740 and 50 <= y <= 390 for x, y in places), "inside the axes, however high the loss"
