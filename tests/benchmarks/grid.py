"""How long a grid takes from words to frozen runs, beside Hydra's own compose; each size in a process of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.compose.grid import expand_grid

REPEATS = 5
# Points -> words: eight axes, four of groups and four of values.
_GROUPS = ["model=mlp,cnn", "optim=adamw,sgd", "hardware=cpu_x1,cpu_x2", "schedule=cosine,constant"]
_FIXED = ["cluster=local", "experiment=digits", "sweep_name=bench"]
GRIDS = {
    96: ["optim.lr=1e-3,3e-3,1e-2", "optim.weight_decay=0,0.1", "train.num_steps=100", "seed=0"],
    960: ["optim.lr=1e-3,3e-3,1e-2", "optim.weight_decay=0,0.1", "train.num_steps=100,200", "seed=range(5)"],
    9600: ["optim.lr=1e-3,3e-3,1e-2", "optim.weight_decay=0,0.1", "train.num_steps=100,200,300,400", "seed=range(25)"],
}
BUDGETS = {960: 0.7, 9600: 3.0}
_CHILD = """
import json, resource, sys, time
begin = time.perf_counter()
from hpc_trainer.launch.freeze import freeze_grid
imported = time.perf_counter()
grid = freeze_grid(sys.argv[1:])
print(json.dumps({
    "points": len(grid.specs) + grid.num_duplicates, "import_s": imported - begin, "all_s": time.perf_counter() - begin,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "ways": dict(grid.compose_counts),
    "torch": "torch" in sys.modules,
}))
"""


def measure(words: Sequence[str]) -> dict[str, object]:
    """One fresh process: seconds with the import, peak memory in MiB, points by the way they were composed."""
    done = subprocess.run([sys.executable, "-c", _CHILD, *words], check=True, capture_output=True, text=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def hydra_s_a_point(words: Sequence[str], num_points: int = 8) -> float:
    """Median seconds of Hydra's own compose for one point of this grid."""
    times = []
    with GridComposer() as composer:
        for point in expand_grid(composer, words).points[:num_points]:
            begin = time.perf_counter()
            composer.compose(point.overrides)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def run() -> None:
    """Prints the table: median and range over 5 processes each, and the ratio to Hydra's own compose."""
    print(
        f"\n{'grid':<14} {'median s':>9} {'min':>7} {'max':>7} {'budget s':>9} {'peak MiB':>9} "
        f"{'Hydra / ours':>13}   ways   n={REPEATS}"
    )
    for count, axes in GRIDS.items():
        words = [*_FIXED, *_GROUPS, *axes]
        results = [measure(words) for _ in range(REPEATS)]
        times = [float(str(result["all_s"])) for result in results]
        assert not any(result["torch"] for result in results)
        ratio = hydra_s_a_point(words) * count / statistics.median(times)
        budget = f"{BUDGETS[count]:.1f}" if count in BUDGETS else "-"
        peak = max(float(str(result["peak_mib"])) for result in results)
        print(
            f"{count:>6} points  {statistics.median(times):>9.3f} {min(times):>7.3f} {max(times):>7.3f} {budget:>9} "
            f"{peak:>9.0f} {ratio:>12.0f}x   {results[0]['ways']}"
        )
