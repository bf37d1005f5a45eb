"""Plays every test file by itself, so that none needs what another has left: python -m tests.each_alone [FILE ...]"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[1]
_NO_TESTS = 5  # pytest's exit code where a file has none of those that `make unit` plays


def play(path: Path) -> str | None:
    """What pytest says of the file, if it does not pass alone."""
    words = ["-q", "-p", "no:cacheprovider", "-m", "not slurm and not long and not xla", str(path.relative_to(ROOT))]
    words[:0] = ["-W", "ignore:Module already imported"]  # it brings a plugin for pytest, and is in the warm process
    done = warm.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, text=True)
    return None if done.returncode in (0, _NO_TESTS) else f"--- {words[-1]}\n{done.stdout[-5000:]}{done.stderr[-2000:]}"


def main(names: list[str]) -> int:
    """Two at once; 1 if any fails."""
    everything = [*ROOT.glob("tests/unit/**/test_*.py"), *ROOT.glob("tests/integration/**/test_*.py")]
    paths = [Path(name).resolve() for name in names] or sorted(everything)
    with ThreadPoolExecutor(2) as pool:
        failed = [said for said in pool.map(play, paths) if said is not None]
    print("\n".join([*failed, f"{len(paths) - len(failed)} of {len(paths)} files pass alone"]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
