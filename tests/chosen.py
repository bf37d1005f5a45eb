"""Play the long tests that a change touches, and a sample of the others that each day draws anew: CI's second part.

    python -m tests.chosen                       # what the commits of the last day touch
    python -m tests.chosen --since main --list   # what is played, in this order, and why
    python -m tests.chosen --scenarios 2         # today's scenarios for a real Slurm (tests/slurm/scenarios)
    python -m tests.chosen --slurm-files 2       # files of tests/slurm whose long tests a change touches

Two files at once, each in a process of its own. `--minutes` bounds the time in which a file may begin; half as long
after that what is at work ends and counts as unfinished. What was chosen and not played is named: `make test-long`
plays all.
"""

from __future__ import annotations

import argparse
import datetime
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.each_alone import FAILED, PASSED, ROOT, UNFINISHED, name_of, play
from tests.integration.resume_matrix.cells import CELLS, SAMPLE
from tests.slurm.scenarios.table import ids

LONG = "long and not slurm and not xla"
NEAR = {
    "cli": ("verbs", "start"),
    "config": ("start", "grids"),
    "features": ("resume_matrix",),
    "hydra_apps": ("hydra_apps",),
    "launch": ("grids", "hydra_apps", "own_code", "shared_machine"),
    "record": ("failures", "resume", "shared_machine"),
    "runtime": ("failures", "resume"),
    "slurm": ("grids",),
    "training": ("resume", "resume_matrix", "own_code"),
    "worker": ("failures", "resume", "own_code"),
}
"""Folders of tests/integration that go through a folder of the package; `verbs` where none is named."""
ALSO = {
    "conf": ("tests/unit/config", "tests/unit/hardware"),
    "launch": ("tests/unit/api",),
    "operate": ("tests/unit/api",),
    "record": ("tests/unit/api", "tests/shared_folder"),
    "slurm": ("tests/unit/api",),
}
"""Other folders of tests that go through a folder of the package, or through conf/."""
ON_SLURM = {
    "conf": ("test_sites.py",),
    "data": ("test_data_prepare.py",),
    "hardware": ("test_hardware.py", "test_sites.py"),
    "hydra_apps": ("test_hydra_apps.py",),
    "launch": ("test_submission.py", "test_snapshot.py", "test_first_day.py"),
    "observe": ("test_ledger.py",),
    "record": ("test_submission.py", "test_ownership.py"),
    "slurm": ("test_submission.py", "test_ownership.py"),
    "training": ("test_own_loop.py",),
    "verify": ("test_verify_preempt.py",),
    "worker": ("test_own_loop.py", "test_device_move.py", "test_any_program.py"),
}
"""Files of tests/slurm whose long tests go through a folder of the package, the nearest first."""
ALWAYS: dict[str, tuple[str, ...]] = {
    "tests/shared_folder/test_checkpoints.py": (),
    "tests/shared_folder/test_many_ranks.py": (),
    "tests/shared_folder/test_promises.py": ("-k", "prepare"),
}
"""What other clients of a shared folder see of checkpoints, of code that is unpacked and of prepared data; with words
for pytest."""
PAIRS, MATRIX = "tests/unit/training/test_pairs.py", "tests/integration/resume_matrix/test_resume_matrix.py"
_NUM_CELLS = 6
SCENARIOS = ("no_progress", "requeue_refused")
"""On a real Slurm, each time: causes that no other test has."""
_FILE_S = 900
"""A file that takes longer ends as unfinished; its first failure ends it before."""


@dataclass(frozen=True)
class Chosen:
    """A test file whose long tests are played, and the reason."""

    path: str
    why: str
    more: tuple[str, ...] = ()


def long_files() -> list[str]:
    """Return the test files with long tests that need no Slurm, sorted."""
    folders = [ROOT / "tests" / name for name in ("unit", "integration", "shared_folder")]
    return [name_of(path) for folder in folders for path in sorted(folder.rglob("test_*.py")) if has_long(path)]


def has_long(path: Path) -> bool:
    """Return True if a test of the file, or what its folder's conftest.py marks, is not in `make test`."""
    sources = [path, *(conftest for conftest in [path.with_name("conftest.py")] if conftest.exists())]
    return any(re.search(r"mark\.(long|few)\b", source.read_text()) for source in sources)


def changed_since(commit: str | None) -> list[str]:
    """Return the files that differ from a commit; None: from the newest one that is older than a day."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    base = commit or git("rev-list", "-1", "--before=1 day ago", "HEAD") or git("rev-list", "--max-parents=0", "HEAD")
    return git("diff", "--name-only", base.split()[0], "--").splitlines() if base else []


def folders_near(changed: str) -> list[str]:
    """Return the folders of tests that a changed file touches, the nearest one first."""
    parts = Path(changed).parts
    if parts[0] == "tests":
        is_helper = len(parts) > 2 and not parts[-1].startswith("test_")
        return [str(Path(changed).parent)] if is_helper else ["tests/integration/tools"][: len(parts) == 2]
    if parts[0] != "hpc_trainer" or len(parts) < 3:
        return ["tests/integration/start", *ALSO.get(parts[0], ())]
    unit = Path("tests/unit", *parts[1:-1])
    while not (ROOT / unit).is_dir():
        unit = unit.parent
    nearest = [] if unit == Path("tests/unit") else [str(unit)]
    integration = [f"tests/integration/{name}" for name in NEAR.get(parts[1], ("verbs",))]
    return [*nearest, *integration, *ALSO.get(parts[1], ())]


def slurm_files(changed: Iterable[str], count: int) -> list[str]:
    """Return up to `count` files of tests/slurm whose long tests a change touches: changed ones, then the nearest."""
    found: dict[str, int] = {}
    for each in changed:
        parts = Path(each).parts
        if parts[:2] == ("tests", "slurm") and parts[-1].startswith("test_") and (ROOT / each).exists():
            found[each] = -1
        for distance, name in enumerate(ON_SLURM.get(parts[parts[0] == "hpc_trainer"], ()) if len(parts) > 1 else ()):
            found[f"tests/slurm/{name}"] = min(found.get(f"tests/slurm/{name}", distance), distance)
    return sorted((path for path in found if has_long(ROOT / path)), key=lambda path: (found[path], path))[:count]


def choose(changed: Iterable[str], files: Sequence[str], today: datetime.date) -> list[Chosen]:
    """Return what is played, in order: `ALWAYS`, what a change touches, the nearest first, then the day's draw of all
    others.
    """
    rank: dict[str, int] = {}
    for each in changed:
        if each in files:
            rank[each] = 0
        for distance, folder in enumerate(folders_near(each), start=1):
            for path in files:
                if Path(path).is_relative_to(folder):
                    rank[path] = min(rank.get(path, distance), distance)
    dice = random.Random(today.toordinal())
    draw = dice.sample(files, len(files))
    cells = dice.sample(sorted(CELLS.keys() - set(SAMPLE)), _NUM_CELLS)
    # Of what takes hours, minutes.
    bounded = {PAIRS: ("-k", "sample"), MATRIX: ("-k", " or ".join(cells))}
    touched = sorted((path for path in draw if path in rank and path not in ALWAYS), key=rank.__getitem__)
    return [
        *(Chosen(path, "always", more) for path, more in ALWAYS.items()),
        *(Chosen(path, "touched", bounded.get(path, ())) for path in touched),
        *(Chosen(path, "drawn", bounded.get(path, ())) for path in draw if path not in rank and path not in ALWAYS),
    ]


def play_all(chosen: Sequence[Chosen], minutes: float, minutes_drawn: float) -> int:
    """Play two files at once and print each verdict; return 1 if one fails.

    Args:
        chosen: what to play, in this order.
        minutes: no file begins later; half as long after that all end.
        minutes_drawn: drawn files begin for so long after the first of them.
    """
    began = time.monotonic()
    verdicts: dict[str, str] = {}
    first_drawn: list[float] = []
    lock = threading.Lock()

    def played(each: Chosen) -> None:
        now = time.monotonic()
        with lock:
            if each.why == "drawn":
                first_drawn.append(now)
        is_late = now - began > 60 * minutes
        if is_late or (each.why == "drawn" and now - first_drawn[0] > 60 * minutes_drawn):
            return
        verdict, said = play(
            ROOT / each.path, LONG, (*each.more, "-x"), timeout_s=min(_FILE_S, began + 90 * minutes - now)
        )
        verdicts[each.path] = verdict
        print(f"{verdict} {each.path} ({each.why}) {time.monotonic() - now:.0f} s\n{said}".rstrip(), flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(played, chosen))
    count = {verdict: list(verdicts.values()).count(verdict) for verdict in (PASSED, FAILED, UNFINISHED)}
    late = [each.path for each in chosen if each.why != "drawn" and each.path not in verdicts]
    if late:
        print("For want of time not played:", *late, sep="\n  ")
    print(", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    return int(count[FAILED] > 0)


def scenarios_of(today: datetime.date, count: int) -> list[str]:
    """Return the names of the scenarios that are played: `SCENARIOS`, and those that the day draws."""
    names = sorted({name.rpartition("-")[0] for name in ids()} - set(SCENARIOS))
    return [*SCENARIOS, *random.Random(today.toordinal()).sample(names, count)]


def main(words: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chosen")
    parser.add_argument("--since", metavar="COMMIT", help="what changed since then; else in the last day")
    parser.add_argument("--date", type=datetime.date.fromisoformat, default=datetime.date.today(), help="whose draw")
    parser.add_argument("--minutes", type=float, default=30, help="no file begins later")
    parser.add_argument("--minutes-drawn", type=float, default=10, help="so long files begin that no change touches")
    parser.add_argument("--list", action="store_true", help="only say what would be played")
    parser.add_argument(
        "--scenarios", type=int, metavar="COUNT", help="only say the scenarios, with so many that the day draws"
    )
    parser.add_argument("--slurm-files", type=int, metavar="COUNT", help="only say up to so many files of tests/slurm")
    given = parser.parse_args(words)
    if given.slurm_files:
        print(*slurm_files(changed_since(given.since), given.slurm_files))
        return 0
    if given.scenarios:
        print(",".join(scenarios_of(given.date, given.scenarios)))
        return 0
    chosen = choose(changed_since(given.since), long_files(), given.date)
    print(f"draw of {given.date}; again: python -m tests.chosen --date {given.date}")
    if given.list:
        print(*(f"{each.why} {each.path} {' '.join(each.more)}".rstrip() for each in chosen), sep="\n")
        return 0
    return play_all(chosen, given.minutes, given.minutes_drawn)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
