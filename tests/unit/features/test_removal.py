"""Each feature can be deleted from a copy of the project (tests/removal.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import removal
from tests.seeds import chosen_seed


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", removal.NAMES)
def test_the_rest_works_without_a_feature(name: str) -> None:
    assert removal.play(name, seed=chosen_seed(), num_tests=6).failures == {}


def test_a_name_that_is_imported_and_not_there_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "hpc_trainer"
    folder.mkdir()
    (folder / "there.py").write_text("name = 1\n")
    lines = ["from hpc_trainer.there import name", "def late():", "    from hpc_trainer.there import gone, name"]
    (folder / "asks.py").write_text("\n".join([*lines, "from hpc_trainer.missing import name"]))
    found = sorted(removal.unresolved(tmp_path))
    assert found == [
        "hpc_trainer/asks.py:3: hpc_trainer.there.gone",
        "hpc_trainer/asks.py:4: hpc_trainer.missing.name",
    ]


@pytest.mark.long
def test_every_import_of_ours_finds_what_it_names() -> None:
    assert list(removal.unresolved(removal.ROOT)) == []
