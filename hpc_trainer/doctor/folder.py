"""Checks of the folder of sweeps: results of the probe (folder_probe.py) and of the quota, and their consequences."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from hpc_trainer.doctor.findings import Finding, broken, ok, warning
from hpc_trainer.doctor.folder_probe import HOME
from hpc_trainer.runtime.disk_room import QuotaWatch, Room
from hpc_trainer.runtime.start import start_words

_PROBE = "hpc_trainer.doctor.folder_probe"
_START_S, _SILENCE_S, _LONGEST_S = 6.0, 6.0, 60.0
"""Most seconds until the probe's first line, between its lines, and in all if no core is free."""
_QUOTA_TIMEOUT_S = 2.0
_LEAST_BYTES, _LEAST_FILES = 5 * 2**30, 10_000
_NEEDED_BYTES, _NEEDED_FILES = 64 * 2**20, 100
"""Bytes and files that one run needs at least."""
_CLOCKS_S, _LATE_S = 90.0, 5.0
"""Seconds by which clocks may differ (docs/shared_folder.md), and from which on `doctor` warns of a difference."""
_SOON_DAYS = 7.0


def folder_findings(runs_dir: Path, purge_days: int | None) -> Iterator[Finding]:
    """Yield the findings about the folder of sweeps.

    Args:
        runs_dir: the folder, which need not exist.
        purge_days: days after which the site deletes unused files there; None: as the runs' `cluster.purge_days`.
    """
    steps, last = _probe(runs_dir, purge_days)
    facts = {step["step"]: step for step in steps}
    promises = {step["promise"]: step for step in steps if step["step"] == "promise"}
    if "place" in facts:
        yield _cached(facts["mount"])
    if last == HOME:
        yield broken(
            "home", f"{Path.home()} does not answer",
            why="Python, and most programs, look for their settings there when they start",
            fix="check whether its file system is mounted and its server is up: ls ~",
        )  # fmt: skip
    elif last is not None:
        yield broken(
            "runs folder", f"{runs_dir.absolute()} does not answer (at: {last})",
            why="a command or a rank that touches it waits too",
            fix="check whether its file system is mounted and its server is up: ls the folder; or use another "
            "paths.runs_dir",
        )  # fmt: skip
    if "home" in facts:
        yield from _home(facts["home"])
    if "write" not in facts:
        return
    yield _writable(runs_dir, facts)
    if facts["write"].get("code") is None:
        yield _trusted(facts["trust"])
        yield _umask(facts["umask"])
        yield _clock(facts["write"]["skew_s"])
    yield _room(runs_dir, facts["room"], facts["place"]["folder"])
    yield from _promises(promises)
    yield from (_purge(facts_of_sweep) for facts_of_sweep in facts.get("sweeps", {"sweeps": []})["sweeps"])


def _probe(runs_dir: Path, purge_days: int | None) -> tuple[list[dict[str, Any]], str | None]:
    """Return the probe's steps, and the step during which it went silent; None if it finished.

    A probe that only waits for a processor is given time; one that sleeps in a call of the file system is killed.
    """
    command = [
        sys.executable,
        *start_words(_PROBE),
        str(runs_dir.absolute()),
        *([str(purge_days)] if purge_days else []),
    ]
    steps: list[dict[str, Any]] = []
    said, begin, spent_s = b"", time.monotonic(), 0.0
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            while True:
                silence_s = _SILENCE_S if steps else _START_S
                if select.select([process.stdout], [], [], silence_s)[0]:
                    data = os.read(process.stdout.fileno(), 1 << 16)
                    if not data:
                        break
                    *lines, said = (said + data).split(b"\n")
                    steps += map(json.loads, lines)
                    continue
                before, (spent_s, is_ready) = spent_s, _work(process.pid)
                if time.monotonic() - begin > _LONGEST_S or not (is_ready or spent_s > before):
                    return steps, str(steps[-1].get("promise", steps[-1]["step"])) if steps else "start"
            if process.wait():
                errors.seek(0)
                raise RuntimeError(f"the probe of {runs_dir} failed: {errors.read()[-2000:].decode(errors='replace')}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its fork too
    return steps, None


def _work(pid: int) -> tuple[float, bool]:
    """Return the CPU seconds of a process and its fork, and True if one of them works or waits for a processor."""
    spent_s, is_ready = 0.0, False
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children()):
            spent_s += sum(process.cpu_times()[:2])
            is_ready = is_ready or process.status() == psutil.STATUS_RUNNING
    return spent_s, is_ready


def _cached(mount: Mapping[str, Any]) -> Finding:
    age, kind = float(mount["age_s"]), mount["kind"]
    age_text = os.environ.get("HPC_TRAINER_CACHE_AGE_S", "")
    if age_text:
        try:
            float(age_text)
        except ValueError:
            return warning(
                "cache age", f"HPC_TRAINER_CACHE_AGE_S={age_text!r} is not a number of seconds and has no effect",
                why="status waits this long before it believes that a file is missing",
                fix="export HPC_TRAINER_CACHE_AGE_S=60, or unset it",
            )  # fmt: skip
        return ok("cache age", f"{kind}: at most {age:g} s, by HPC_TRAINER_CACHE_AGE_S")
    if age > 60.0:
        return warning(
            "cache age", f"{kind} at {mount['point']}: this machine may show files as they were {age:g} s ago",
            why="status says UNKNOWN for as long after each run's end, and submit waits for it",
            fix="ask the site for a mount with actimeo=60 or less",
        )  # fmt: skip
    return ok("cache age", f"{kind or 'unknown file system'}: answers are at most {age:g} s old")


def _writable(runs_dir: Path, facts: Mapping[str, Mapping[str, Any]]) -> Finding:
    written, place = facts["write"], facts["place"]
    if written["problem"] is None:
        return ok("runs folder", f"{runs_dir.absolute()}{'' if place['exists'] else ' (will be made)'}")
    fixes = {
        errno.ENOSPC: "delete what you do not need there (du -sh *), or use another paths.runs_dir",
        errno.EDQUOT: "delete what you do not need there (quota -s, lfs quota), or ask the site for more",
        errno.ENOENT: "check where that link leads (ls -l), and whether its file system is mounted; or use another "
        "folder: export HPC_TRAINER_RUNS=FOLDER",
        errno.EROFS: "use a folder that is mounted for writing: export HPC_TRAINER_RUNS=FOLDER",
    }
    return broken(
        "runs folder", f"nothing can be written to {place['folder']}: {written['problem']}",
        why="submit and every run write there",
        fix=fixes.get(written["code"], "choose a folder of yours: export HPC_TRAINER_RUNS=FOLDER"),
    )  # fmt: skip


def _trusted(trust: Mapping[str, Any]) -> Finding:
    if trust["problem"] is None:
        return ok("permissions", "no other user can replace your sweeps")
    return broken(
        "permissions", str(trust["problem"]),
        why="specs and code in the folder run as you, so hpc-trainer refuses such a folder",
        fix="do what the line above says",
    )  # fmt: skip


def _umask(made: Mapping[str, Any]) -> Finding:
    mode = f"{made['mode']:04o}"
    if not made["usable"]:
        return broken(
            "umask", f"a new folder of yours gets mode {mode}: you cannot enter it",
            why="programs of yours cannot read what they have just written",
            fix="umask 022 in the shell's start-up file",
        )  # fmt: skip
    if made["others"]:
        return warning(
            "umask", f"a new folder of yours gets mode {mode}: other users can write to it",
            why="hpc-trainer gives its own files safe modes, and refuses your conf/ and project files if others can "
            "write to them",
            fix="umask 022 (or 077) in the shell's start-up file; for files that are there: chmod -R go-w conf",
        )  # fmt: skip
    return ok("umask", f"new folders get mode {mode}")


def _clock(skew_s: float) -> Finding:
    if abs(skew_s) <= _LATE_S:
        return ok("clock", f"the file server's clock differs by {abs(skew_s):.1f} s")
    report = broken if abs(skew_s) > _CLOCKS_S else warning
    return report(
        "clock", f"the file server's clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'} of this "
        "machine's",
        why=f"ages of heartbeats and of files are wrong; states are right up to {_CLOCKS_S:g} s",
        fix="ask the site to set the clocks by NTP (timedatectl shows this machine's)",
    )  # fmt: skip


def _room(runs_dir: Path, measured: Mapping[str, Any], present: str) -> Finding:
    room, remaining = _remaining(Path(present), measured)
    low = _is_below(room, _LEAST_BYTES, _LEAST_FILES)
    if not low:
        return ok("room", f"{remaining} left")
    report = broken if _is_below(room, _NEEDED_BYTES, _NEEDED_FILES) else warning
    return report(
        "room", f"only {remaining} are left for {runs_dir.absolute()}",
        why="an attempt ends when the disk has no space for a save, and a run has some 20 files and its checkpoints",
        fix="delete what you do not need there, keep fewer checkpoints (checkpoint.keep_last=1), or use another "
        "paths.runs_dir",
    )  # fmt: skip


def _remaining(folder: Path, measured: Mapping[str, Any]) -> tuple[Room, str]:
    """Return the room in a folder by its file system and the user's quota, and the same as text."""
    quota = QuotaWatch(folder).answer(_QUOTA_TIMEOUT_S)
    room = Room(_least(measured["num_bytes"], quota.num_bytes), _least(measured["num_files"], quota.num_files))
    limited = " (quota)" if (room.num_bytes, room.num_files) != (measured["num_bytes"], measured["num_files"]) else ""
    return room, f"{_gigabytes(room.num_bytes)} and {_count(room.num_files)} files{limited}"


_HOME_WHY = "Hugging Face, torch and Triton keep caches there, and what hardware check --run measured is kept there"


def _home(home: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the finding about the home directory; none if it shares the disk of the sweeps, reported separately."""
    if not home["exists"]:
        yield warning(
            "home", f"your home directory {home['folder']} does not exist",
            why="your own settings (~/.config/hpc_trainer) are not found, and caches of other packages cannot be made",
            fix="ask the site; or export HOME=FOLDER, a folder of yours that the nodes have too",
        )  # fmt: skip
        return
    if home["problem"] is not None:
        yield warning(
            "home", f"nothing can be written to your home directory {home['folder']}: {home['problem']}",
            why=_HOME_WHY,
            fix="ask the site; or move caches: export HF_HOME=FOLDER XDG_CACHE_HOME=FOLDER XDG_STATE_HOME=FOLDER",
        )  # fmt: skip
        return
    if home["is_same"]:
        return
    room, remaining = _remaining(Path(home["folder"]), home)
    if not _is_below(room, _NEEDED_BYTES, _NEEDED_FILES):
        yield ok("home", f"{remaining} left in {home['folder']}")
        return
    yield warning(
        "home", f"only {remaining} are left in your home directory {home['folder']}",
        why=_HOME_WHY,
        fix="du -sh ~/.[a-z]* ~/*, and delete what you do not need; or move caches: export HF_HOME=FOLDER "
        "XDG_CACHE_HOME=FOLDER",
    )  # fmt: skip


def _least(first: int | None, second: int | None) -> int | None:
    return min((value for value in (first, second) if value is not None), default=None)


def _is_below(room: Room, num_bytes: int, num_files: int) -> bool:
    pairs = ((room.num_bytes, num_bytes), (room.num_files, num_files))
    return any(value is not None and value < least for value, least in pairs)


def _gigabytes(num_bytes: int | None) -> str:
    return "any number of bytes" if num_bytes is None else f"{num_bytes / 2**30:,.1f} GiB"


def _count(number: int | None) -> str:
    return "any number of" if number is None else f"{number:,}"


_WHY = {
    "O_EXCL": "two submits at once could both start the runs",
    "link": "two submits at once could both start the runs",
    "rename": "a reader could see half a file",
    "O_APPEND": "lines of metrics and journals would be lost",
    "mmap": "checkpoints and data sets of safetensors, numpy and Arrow are mapped",
}
_LOCKS = "hpc_trainer takes no locks there; SQLite, filelock, the caches of Hugging Face and of Triton do"


def _promises(promises: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each promise that the file system breaks; a refused `link` does no harm if `O_EXCL` works."""
    # Where nothing can be written, nothing was tried: other lines name the full disk.
    promises = {name: step for name, step in promises.items() if step["detail"] not in ("ENOSPC", "EDQUOT")}
    failed = {name: step for name, step in promises.items() if step["result"] != "kept"}
    if promises.get("O_EXCL", {}).get("result") == "kept" and failed.get("link", {}).get("result") == "refused":
        del failed["link"]
    for name, step in failed.items():
        is_lock = name in ("flock", "fcntl")
        how = f"is refused ({step['detail']})" if step["result"] == "refused" else f"is not kept: {step['detail']}"
        report = warning if is_lock else broken
        yield report(
            "file system", f"{name} {how}", why=_LOCKS if is_lock else _WHY[name],
            fix="put such caches on this node's disk: export HF_HOME=/tmp/$USER/hf TRITON_CACHE_DIR=/tmp/$USER/triton"
            if is_lock else "use a folder on another file system: export HPC_TRAINER_RUNS=FOLDER",
        )  # fmt: skip
    kept = [name for name in promises if name not in failed]
    if kept and not failed:
        yield ok("file system", f"keeps {', '.join(kept)} between two processes of this machine")


def _purge(sweep: Mapping[str, Any]) -> Finding:
    left = sweep["purge_days"] - sweep["unused_days"]
    if left > _SOON_DAYS:
        return ok("purge", f"sweep {sweep['sweep']}: {left:.0f} days until the first file would be deleted")
    report = broken if left <= 0 else warning
    when = f"in {left:.0f} days" if left > 0 else "any day now"
    return report(
        "purge", f"the site may delete {sweep['path']} {when} (unused for {sweep['unused_days']:.0f} of "
        f"{sweep['purge_days']} days), and {sweep['unfinished']} runs of sweep {sweep['sweep']} are not done",
        why="without its specs, code and checkpoints a run cannot continue",
        fix=f"continue the runs (hpc-trainer retry {sweep['sweep']}), or copy the sweep's folder to storage that is "
        "not purged",
    )  # fmt: skip
