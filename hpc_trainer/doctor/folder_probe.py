"""Process that touches the folder of sweeps and prints one JSON line for each step: `folder_probe FOLDER [DAYS]`.

A dead file server stops a process that touches its files, and a lock on it may wait for ever. This process may then be
killed; its last line says how far it came. Two processes (a fork) try on the same file what two ranks would do. They
are on one machine, so differences between what two machines see cannot be found here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.own_files import others_may_write
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.record.files import node_name
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import retry_stale
from hpc_trainer.record.shared_folder import cache_age_s, mount_of
from hpc_trainer.record.states import CANCEL, DONE
from hpc_trainer.record.trust import check_place
from hpc_trainer.runtime.disk_room import free_room

ROUNDS = 8
"""Times that both processes try the same act."""
_WRITTEN = 1 << 20
_MOST_SWEEPS = 50
KEPT, REFUSED, NOT_KEPT = "kept", "refused", "not kept"
"""Results of a promise: it held; the file system refuses the call; the call succeeds and the promise is broken."""


HOME = "home begins"
"""Step before the home directory is touched."""


def main(folder: Path, purge_days: int | None) -> None:
    """Take all steps in the folder, then look at the home directory."""
    _look_at_folder(folder, purge_days)
    home = Path.home()
    _say(HOME)
    if not home.is_dir():
        _say("home", folder=str(home), exists=False)
        return
    room = free_room(home)
    is_same = home.stat().st_dev == _nearest(folder.absolute()).lstat().st_dev
    _say(
        "home", folder=str(home), exists=True, problem=_refusal(home), is_same=is_same, num_bytes=room.num_bytes,
        num_files=room.num_files,
    )  # fmt: skip


def _refusal(home: Path) -> str | None:
    """Return the error of making a folder in the home directory; None if it can be made, or only space is missing."""
    own = home / f".hpc-trainer-doctor-{node_name()}-{os.getpid()}"
    try:
        own.mkdir(0o700)
        own.rmdir()
    except OSError as error:
        return None if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
    return None


def _look_at_folder(folder: Path, purge_days: int | None) -> None:
    """Take all steps in the folder, or in the nearest folder above that exists; remove the files that were made."""
    mount = mount_of(folder)
    age = cache_age_s(folder)
    _say("mount", point=mount and mount[0], kind=mount and mount[1], age_s=age)
    present = _nearest(folder.absolute())
    _say("place", folder=str(present), exists=present == folder.absolute(), is_folder=present.is_dir())
    room = free_room(present)
    _say("room", num_bytes=room.num_bytes, num_files=room.num_files)
    own = present / f".hpc-trainer-doctor-{node_name()}-{os.getpid()}"
    try:
        before = time.time()
        os.mkdir(own)  # noqa: PTH102  (with the umask of the user, which is looked at)
    except OSError as error:
        _say("write", problem=error.strerror, code=error.errno)
        return
    try:
        info = own.stat()
        _say("umask", mode=stat.S_IMODE(info.st_mode), others=others_may_write(info), usable=os.access(own, os.X_OK))
        own.chmod(0o700)
        _say("trust", problem=_distrust(own))
        _try_to_write(own, before)
        for name, promise in _PROMISES.items():
            _say("begins", promise=name)
            result, detail = _result(promise, own)
            _say("promise", promise=name, result=result, detail=detail)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    _say("sweeps", sweeps=list(_purged_next(folder, purge_days)) if present == folder.absolute() else [])


def _say(step: str, **facts: Any) -> None:
    print(json.dumps({"step": step, **facts}), flush=True)


def _nearest(folder: Path) -> Path:
    return next(above for above in (folder, *folder.parents) if os.path.lexists(above))


def _distrust(own: Path) -> str | None:
    """Return why hpc-trainer would refuse a sweep's folder here: other users could put another folder in its place."""
    try:
        check_place(own)
    except HpcTrainerError as error:
        return str(error).replace(own.name, "a sweep")
    return None


def _try_to_write(own: Path, before: float) -> None:
    """Write a file, and compare the server's time of it with this machine's clock."""
    path = own / "written"
    try:
        with path.open("wb") as file:
            file.write(b"\0" * _WRITTEN)
            file.flush()
            os.fsync(file.fileno())
        written = path.stat().st_mtime
    except OSError as error:
        _say("write", problem=error.strerror, code=error.errno)
    else:
        after = time.time()
        _say("write", problem=None, skew_s=min(written - before, 0.0) + max(written - after, 0.0))


# --- promises, tried by two processes ---


def _result(promise: Callable[[Path], str | None], own: Path) -> tuple[str, str]:
    try:
        broken = promise(own)
    except OSError as error:
        return REFUSED, errno.errorcode.get(error.errno or 0, str(error))
    except _ChildError as error:
        return REFUSED, str(error)
    return (KEPT, "") if broken is None else (NOT_KEPT, broken)


class _ChildError(Exception):
    """Error of the file system in the second process."""


def _both(act: Callable[[int], Any]) -> list[Any]:
    """Return the results of `act(0)` in this process and of `act(1)` in a fork of it, at the same time.

    Raises:
        OSError, _ChildError: the act failed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            message = json.dumps({"result": act(1)})
        except OSError as error:
            message = json.dumps({"error": errno.errorcode.get(error.errno or 0, str(error))})
        except BaseException:  # a fork must not run the caller's code
            code, message = 1, json.dumps({"error": "the second process failed"})
        os.write(writer, message.encode())
        os._exit(code)
    os.close(writer)
    try:
        own = act(0)
    finally:
        with os.fdopen(reader) as pipe:
            message = json.loads(pipe.read() or '{"error": "the second process was killed"}')
        os.waitpid(child, 0)
    if "error" in message:
        raise _ChildError(message["error"])
    return [own, message["result"]]


def _created_once(own: Path) -> str | None:
    def create(_: int) -> list[bool]:
        return [_is_first(partial(_create_new, own / f"once-{number}")) for number in range(ROUNDS)]

    return _winners(_both(create), "O_EXCL")


def _create_new(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def _linked_once(own: Path) -> str | None:
    def link(who: int) -> list[bool]:
        source = own / f"source-{who}"
        source.write_bytes(b"")
        return [_is_first(partial(os.link, source, own / f"link-{number}")) for number in range(ROUNDS)]

    return _winners(_both(link), "link")


def _is_first(create: Callable[[], object]) -> bool:
    try:
        create()
    except FileExistsError:
        return False
    return True


def _winners(results: list[list[bool]], call: str) -> str | None:
    counts = [sum(pair) for pair in zip(*results, strict=True)]
    wrong = sum(count != 1 for count in counts)
    return f"{wrong} of {len(counts)} names were not made by exactly one of two processes ({call})" if wrong else None


def _renamed_whole(own: Path) -> str | None:
    target = own / "renamed"
    target.write_bytes(b"first")

    def replace(who: int) -> int:
        content, torn = (b"a", b"b")[who] * 4096, 0
        for _ in range(ROUNDS):
            source = own / f"new-{who}"
            source.write_bytes(content)
            os.rename(source, target)  # noqa: PTH104
            try:
                seen = retry_stale(target.read_bytes)  # as every reader of ours does
            except FileNotFoundError:
                torn += 1
            else:
                torn += seen not in (b"a" * 4096, b"b" * 4096)
        return torn

    torn = sum(_both(replace))
    return f"{torn} of {2 * ROUNDS} reads beside a rename found no file, or a part of one" if torn else None


def _appended_whole(own: Path) -> str | None:
    path = own / "appended"
    path.write_bytes(b"")

    def append(who: int) -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            return sum(os.write(descriptor, (b"a", b"b")[who] * 99 + b"\n") for _ in range(ROUNDS))
        finally:
            os.close(descriptor)

    _both(append)
    lines = path.read_bytes().splitlines()
    whole = sum(line in (b"a" * 99, b"b" * 99) for line in lines)
    return None if whole == 2 * ROUNDS else f"{whole} of {2 * ROUNDS} lines that two processes appended are whole"


def _mapped(own: Path) -> str | None:
    path = own / "mapped"
    path.write_bytes(b"a" * mmap.PAGESIZE)

    def look(_: int) -> str:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view[:1].decode()

    return None if _both(look) == ["a", "a"] else "a mapped file shows other bytes than were written"


def _locked(lock: Callable[[int, int], None], own: Path) -> str | None:
    path = own / "locked"
    path.touch()
    gate, opened = os.pipe()

    def take(who: int) -> bool:
        with path.open("r+b") as file:
            if who == 0:
                try:
                    lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                finally:
                    os.write(opened, b"1")
                return _holds_until_read(answer)
            os.read(gate, 1)
            try:
                lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                return False
            finally:
                os.write(tried, b"1")
            return True

    answer, tried = os.pipe()
    try:
        both = _both(take)
    finally:
        for descriptor in (gate, opened, answer, tried):
            os.close(descriptor)
    return "two processes hold the same lock" if both[1] else None


def _holds_until_read(answer: int) -> bool:
    """Keep the lock until the other process has tried to take it."""
    os.read(answer, 1)
    return True


_PROMISES: dict[str, Callable[[Path], str | None]] = {
    "O_EXCL": _created_once,
    "link": _linked_once,
    "rename": _renamed_whole,
    "O_APPEND": _appended_whole,
    "mmap": _mapped,
    "flock": lambda own: _locked(fcntl.flock, own),
    "fcntl": lambda own: _locked(fcntl.lockf, own),
}
"""Act -> function that tries it and returns how its promise was broken, or None. Locks come last: they may hang."""


# --- files that the site deletes next ---


def _purged_next(folder: Path, purge_days: int | None) -> Iterator[dict[str, Any]]:
    """Yield, for each sweep with unfinished runs, the file that was unused for the longest time."""
    from hpc_trainer.operate.find import list_sweeps
    from hpc_trainer.record.known_runs import known_by_files

    for listed in list_sweeps(folder)[:_MOST_SWEEPS]:
        sweep = SweepPaths(listed.folder)
        with contextlib.suppress(OSError, HpcTrainerError):
            used = [(_last_use(path), str(path)) for path in _files_of_sweep(sweep.folder)]  # before specs are read
            specs = known_by_files(sweep)[1]
            present = {spec.run_id: _names(sweep.folder / spec.run_id) for spec in specs.values()}
            left = [spec for spec in specs.values() if not present[spec.run_id] & {DONE, CANCEL}]
            days = purge_days or _days_of([spec.config for spec in left])
            used += [
                (_last_use(path), str(path)) for spec in left[:_MOST_SWEEPS] for path in _saved(sweep, spec.run_id)
            ]
            if left and days and used:
                since, path = min(used)
                yield {
                    "sweep": sweep.name, "unfinished": len(left), "purge_days": days, "path": path,
                    "unused_days": (time.time() - since) / 86_400,
                }  # fmt: skip


def _days_of(configs: list[Any]) -> int | None:
    days = [config.get("cluster", {}).get("purge_days") for config in configs]
    return min((day for day in days if day), default=None)


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return set()


def _files_of_sweep(folder: Path) -> Iterator[Path]:
    """Yield the files of a sweep without which none of its runs can continue: specs, submissions, frozen code."""
    for place in (folder, folder / "submissions", folder / "code"):
        yield from (path for path in place.glob("*") if path.is_file())


def _saved(sweep: SweepPaths, run_id: str) -> Iterator[Path]:
    yield from (path for path in sweep.run(run_id).checkpoints.glob("*/*") if path.is_file())


def _last_use(path: Path) -> float:
    info = path.stat()
    return max(info.st_atime, info.st_mtime)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
