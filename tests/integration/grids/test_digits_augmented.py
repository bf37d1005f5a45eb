"""What `conf/experiment/digits_augmented.yaml` says of itself; tests/unit/features/augment has the quick form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_cnn_reaches_its_accuracy_with_each_seed(local: LocalDriver) -> None:
    local.run("submit", "cluster=local", "experiment=digits_augmented", "seed=0,1,2", "--wait")
    found = {row["seed"]: row["eval_accuracy"] for row in local.json("results", "digits_augmented")}
    print(f"accuracy by seed {found}")
    assert len(found) == 3
    assert min(found.values()) >= 0.985
