"""Process that says which axes of a sweep matter for a metric, by a forest of scikit-learn; the login node asks it.

It is asked through runtime/torch_process.py, because the login node's layers never import scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpc_trainer.runtime.torch_process import answer

_TREES, _SEED = 100, 0


def importances(columns: Sequence[Sequence[Any]], targets: Sequence[float]) -> list[tuple[float, float]]:
    """Return each column's share of the forest's decisions, and its standard deviation over the trees.

    Args:
        columns: for each axis the values of all runs; values that are not numbers are numbered in alphabetical order.
        targets: the metric of each run.
    """
    import numpy as np
    from sklearn.ensemble import RandomForestRegressor

    inputs = np.array([_as_numbers(column) for column in columns], dtype=np.float64).T
    forest = RandomForestRegressor(n_estimators=_TREES, random_state=_SEED, n_jobs=1).fit(inputs, np.asarray(targets))
    of_trees = np.array([tree.feature_importances_ for tree in forest.estimators_])
    return [(float(share), float(std)) for share, std in zip(forest.feature_importances_, of_trees.std(0), strict=True)]


def _as_numbers(column: Sequence[Any]) -> list[float]:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in column):
        return [max(-3e38, min(3e38, float(value))) for value in column]  # the forest computes with float32
    order = {value: float(place) for place, value in enumerate(sorted({str(value) for value in column}))}
    return [order[str(value)] for value in column]


def _answer(asked: dict[str, Any], _tell: Callable[[int, int], None]) -> dict[str, Any]:
    return {name: importances(one["columns"], one["targets"]) for name, one in asked["metrics"].items()}


if __name__ == "__main__":
    answer({"importance": _answer})
