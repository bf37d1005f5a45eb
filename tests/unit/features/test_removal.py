"""Each feature can be deleted from a copy of the project (tests/removal.py)."""

from __future__ import annotations

import pytest

from tests import removal
from tests.seeds import chosen_seed

NEEDED = {"prune": "deploy/export_torch.py", "qat": "deploy/graphs.py"}
"""Features that the rest imports, and one file that does: docs/decisions/0064-keys-of-features.md says why."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", removal.NAMES)
def test_the_rest_works_without_a_feature(name: str) -> None:
    outcome = removal.play(name, seed=chosen_seed(), num_tests=6)
    if name in NEEDED:
        assert NEEDED[name] in outcome.failures.pop("resolves")
    assert outcome.failures == {}


def test_a_name_that_is_imported_and_not_there_is_found() -> None:
    assert list(removal.unresolved(removal.ROOT)) == []
