"""Play every test file by itself, so that none needs what another has left: python -m tests.each_alone [FILE ...]

python -m tests.each_alone --log alone.log            # writes each file's verdict as it comes
python -m tests.each_alone --log alone.log --resume   # leaves out the files that passed in that log

"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, UNFINISHED = "passed", "FAILED", "UNFINISHED"
OF_MAKE_UNIT = "not slurm and not long and not xla"
_NO_TESTS = 5  # pytest's exit code where a file has none of the chosen tests


def play(
    path: Path,
    markers: str = OF_MAKE_UNIT,
    more: Sequence[str] = (),
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """Return the verdict on a test file that is played alone, and what pytest printed if it does not pass.

    Args:
        path: the file.
        markers: pytest's expression of the tests to choose.
        more: more words for pytest.
        timeout_s: after so long pytest and what it started end, and the verdict is UNFINISHED.
        env: variables besides this process's own.
    """
    words = ["-q", "-p", "no:cacheprovider", "-m", markers, *more, name_of(path)]
    words[:0] = ["-W", "ignore:Module already imported"]  # it brings a plugin for pytest, and is in the warm process
    verdict = ""
    # Of its own: as pytest ends it removes old folders of /tmp/pytest-of-NAME, and fails where another does so too.
    with tempfile.TemporaryDirectory(prefix="alone-", ignore_cleanup_errors=True) as folder:
        process = warm.Popen(
            [sys.executable, "-m", "pytest", f"--basetemp={folder}/t", *words],
            cwd=ROOT, env={**os.environ, **(env or {})}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            verdict = UNFINISHED
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
    verdict = verdict or (PASSED if process.returncode in (0, _NO_TESTS) else FAILED)
    return verdict, "" if verdict == PASSED else said[-7000:]


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

    def tell(text: str) -> None:
        print(text, flush=True)
        if given.log:
            with given.log.open("a") as log:
                log.write(f"{text}\n")

    def played(path: Path) -> bool:
        began = time.monotonic()
        verdict, said = play(path)
        tell(f"{verdict} {name_of(path)} {time.monotonic() - began:.0f} s\n{said}".rstrip())
        return verdict == PASSED

    with ThreadPoolExecutor(2) as pool:
        num_passed = sum(pool.map(played, paths))
    tell(f"{num_passed} of {len(paths)} files pass alone")
    return int(num_passed < len(paths))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
