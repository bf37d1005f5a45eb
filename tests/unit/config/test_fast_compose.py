"""The fast ways make of any overrides what Hydra's own compose makes of them, errors included."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hpc_trainer.config.compose import Composer
from hpc_trainer.config.load import to_typed
from hpc_trainer.errors import ConfigError
from tests.unit.config.random_overrides import Maker, write_files

SETS_A_CHUNK = 50
CHUNKS = 12  # 600 sets


def _hydra_says(composer: Composer, lines: list[str]) -> tuple[str, object]:
    """(YAML, typed) of Hydra's own way, or ("error", message)."""
    try:
        untyped = composer.compose_untyped(lines)
        text = OmegaConf.to_yaml(untyped)
        return text, to_typed(untyped)
    except (ConfigError, ValueError) as error:
        return "error", f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("seed", range(CHUNKS))
def test_the_fast_ways_equal_hydras_own(seed: int, tmp_path: Path) -> None:
    print(f"seed {seed}")
    folders = [write_files(tmp_path)] if seed % 2 else []
    seen: Counter[str] = Counter()
    with Composer(folders) as composer:
        maker = Maker(composer, seed)
        for _ in range(SETS_A_CHUNK):
            lines, num_fixed = maker.make()
            print(lines, num_fixed)
            text, expected = _hydra_says(composer, lines)
            seen["error" if text == "error" else "composed"] += 1
            if text == "error":
                with pytest.raises((ConfigError, ValueError)) as caught:
                    composer.fast.compose(lines, num_fixed)
                assert f"{type(caught.value).__name__}: {caught.value}" == expected
                continue
            made = composer.fast.compose(lines, num_fixed)
            assert _exact(made.config) == _exact(expected)
            if made.way == "hydra":
                continue
            assert OmegaConf.to_yaml(composer.fast.compose_untyped(lines)) == text
            assert made.choices is not None
        seen.update(composer.fast.counts)
    print(seen)
    assert seen["composed"] > SETS_A_CHUNK / 4
    assert seen["plain"] > 0


def _exact(config: object) -> str:
    """Equality that tells 1 from 1.0 and True, and a list from a tuple."""
    return repr(copy.deepcopy(config))
