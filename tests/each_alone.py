"""Play every test file by itself, so that none needs what another has left: python -m tests.each_alone [FILE ...]

python -m tests.each_alone --log alone.log            # writes each file's verdict as it comes
python -m tests.each_alone --log alone.log --resume   # leaves out the files that passed in that log

"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED = "passed", "FAILED"
_NO_TESTS = 5  # pytest's exit code where a file has none of those that `make unit` plays


def play(path: Path) -> str | None:
    """Return what pytest says of the file, if it does not pass alone."""
    words = ["-q", "-p", "no:cacheprovider", "-m", "not slurm and not long and not xla", name_of(path)]
    words[:0] = ["-W", "ignore:Module already imported"]  # it brings a plugin for pytest, and is in the warm process
    done = warm.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, text=True)
    return None if done.returncode in (0, _NO_TESTS) else f"{done.stdout[-5000:]}{done.stderr[-2000:]}"


def name_of(path: Path) -> str:
    """Return the path as the log names it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def passed_before(log: Path) -> set[str]:
    """Return the names of the files whose last verdict in the log is that they passed."""
    verdicts = {}
    for line in log.read_text().splitlines() if log.is_file() else []:
        verdict, _, rest = line.partition(" ")
        if verdict in (PASSED, FAILED):
            verdicts[rest.partition(" ")[0]] = verdict
    return {name for name, verdict in verdicts.items() if verdict == PASSED}


def main(words: list[str]) -> int:
    """Play two files at once, and print and log each verdict as it comes; return 1 if any fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.each_alone")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--log", type=Path, help="verdicts and the output of files that fail are added to it")
    parser.add_argument("--resume", action="store_true", help="leave out the files that passed in the log")
    given = parser.parse_args(words)
    everything = [*ROOT.glob("tests/unit/**/test_*.py"), *ROOT.glob("tests/integration/**/test_*.py")]
    paths = [path.resolve() for path in given.files] or sorted(everything)
    known = passed_before(given.log) if given.resume and given.log else set()
    paths = [path for path in paths if name_of(path) not in known]
    failed = []

    def tell(text: str) -> None:
        print(text, flush=True)
        if given.log:
            with given.log.open("a") as log:
                log.write(f"{text}\n")

    def played(path: Path) -> None:
        began = time.monotonic()
        said = play(path)
        seconds = f"{time.monotonic() - began:.0f} s"
        if said is not None:
            failed.append(path)
        tell(f"{PASSED if said is None else FAILED} {name_of(path)} {seconds}" + ("" if said is None else f"\n{said}"))

    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(played, paths):
            pass
    tell(f"{len(paths) - len(failed)} of {len(paths)} files pass alone")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
