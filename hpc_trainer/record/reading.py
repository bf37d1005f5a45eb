"""Reading of small files and of the values of their records.

One damaged line, or a folder or a pipe in place of a file, costs that record only and becomes a fault. A value has the
type that our writers write, or is refused.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeVar

from hpc_trainer.record.shared_folder import Place, look_anew

T = TypeVar("T")

# A rebooted server answers ESTALE for old handles; a file that is replaced all the time causes ESTALE now and then.
_STALE_TRIES = 4
_STALE_PAUSE_S = 0.05
_MOST_SHOWN = 10


def told_few(faults: Faults) -> list[str]:
    """Return notes for the user: the first few faults, and how many more there are."""
    more = [f"{len(faults) - _MOST_SHOWN} more lines or files cannot be read."] if len(faults) > _MOST_SHOWN else []
    return [*faults[:_MOST_SHOWN], *more]


def is_there(path: Place, *, parents: int = 1, faults: Faults | None = None) -> bool:
    """Return True if this name exists on the server now; this client's cache does not count. Links are not followed.

    Args:
        path: the file or folder.
        parents: as for `look_anew`. Use 0 for repeated calls in a folder that this process uses itself: two requests.
        faults: gets a fault, and False is returned, if the file system refuses to say.

    Raises:
        OSError: the file system refused to say, and there is no `faults`.
    """
    place = os.fspath(path)
    try:
        if not look_anew(os.path.dirname(place) or ".", parents=parents):  # noqa: PTH120
            return False
        os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if faults is None:
            raise
        faults.refuse(path, error)
        return False
    return True


class Watch:
    """Repeatable check for the arrival of a file, which asks the server at most once every `every_s` seconds.

    Args:
        path: the file, in a folder that this process uses itself.
        every_s: least number of seconds between two requests to the server.
    """

    def __init__(self, path: Place, every_s: float = 1.0) -> None:
        self._path, self._every_s = path, every_s
        self._looked = -every_s
        self._found = False

    def has_come(self) -> bool:
        """Return True once the file has been seen. A file system that refuses to say counts as not yet."""
        now = time.monotonic()
        if not self._found and now - self._looked >= self._every_s:
            self._looked = now
            with contextlib.suppress(OSError):
                self._found = is_there(self._path, parents=0)
        return self._found


def names_in(folder: Place) -> list[str] | None:
    """Return the names in a folder as the server has them, in order; None if there is no such folder.

    Raises:
        OSError: the file system refused.
    """
    for is_second in (False, True):
        try:
            return sorted(retry_stale(lambda: os.listdir(folder)))  # noqa: PTH208  (names, no paths)
        except (FileNotFoundError, NotADirectoryError):  # noqa: PERF203  (two tries)
            # This client may have cached the folder itself as missing.
            if is_second or not look_anew(folder, parents=0):
                break
    return None


def retry_stale(call: Callable[[], T]) -> T:
    """Return what `call` returns; call it again while it raises ESTALE, at most three times.

    Raises:
        OSError: as raised by `call`; ESTALE if the last try still raises it.
    """
    for number in range(_STALE_TRIES):
        try:
            return call()
        except OSError as error:  # noqa: PERF203  (once, as a rule)
            if error.errno != errno.ESTALE or number == _STALE_TRIES - 1:
                raise
            time.sleep(_STALE_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def as_text(value: object) -> str:
    """Return a text value; raise ValueError for anything else."""
    if isinstance(value, str):
        return value
    raise ValueError(f"{_shown(value)} is not text")


def as_count(value: object) -> int:
    """Return an integer in [0, 2**63), such as a step, an attempt or a pid; raise ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise ValueError(f"{_shown(value)} is not a whole number ≥ 0")


def as_time(value: object) -> float:
    """Return seconds since 1970 in [0, 2**36) as a float; raise ValueError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**36:
        return float(value)
    raise ValueError(f"{_shown(value)} is not a time")


def as_amount(value: object) -> float:
    """Return a finite number ≥ 0 as a float; raise ValueError for anything else."""
    if isinstance(value, (int, float)) and is_number(value) and 0 <= value < math.inf:
        return float(value)
    raise ValueError(f"{_shown(value)} is not a number ≥ 0")


def as_bool(value: object) -> bool:
    """Return a boolean value; raise ValueError for anything else."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{_shown(value)} is neither true nor false")


def as_table(value: object) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for anything else."""
    if isinstance(value, dict):
        return value
    raise ValueError(f"{_shown(value)} is not a JSON object")


def tuple_of(convert: Callable[[Any], T]) -> Callable[[object], tuple[T, ...]]:
    """Return a converter from a list to a tuple that applies `convert` to each item; it raises ValueError otherwise."""

    def as_tuple(value: object) -> tuple[T, ...]:
        if isinstance(value, list):
            return tuple(map(convert, value))
        raise ValueError(f"{_shown(value)} is not a list")

    return as_tuple


Kinds = Mapping[str, Callable[[Any], Any]]
"""Key -> converter of the value in the file, which raises ValueError for a wrong value."""


def typed(record: Mapping[str, Any], kinds: Kinds, optional: Kinds = MappingProxyType({})) -> dict[str, Any]:
    """Return the converted values of a record for the keys of `kinds` and `optional`.

    Keys of `optional` that are missing or null are left out.

    Raises:
        KeyError: a key of `kinds` is missing.
        ValueError: a value is not one that our writers write.
    """
    values = {key: convert(record[key]) for key, convert in kinds.items()}
    for key, convert in optional.items():
        if record.get(key) is not None:
            values[key] = convert(record[key])
    return values


def is_number(value: object) -> bool:
    """Return True for a number that can be calculated with and shown, including NaN and infinity after a divergence."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 2**63


def is_finite(value: Any) -> bool:
    """Return True for a number that is neither NaN nor infinite."""
    return is_number(value) and math.isfinite(value)


# As `files.to_json` writes them, for JSON lacks such numbers. Older versions wrote literals that Python's json reads.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def metric_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record, NaN and infinity included, and its None values; drop all other values."""
    values: dict[str, Any] = {}
    for key, value in record.items():
        if type(value) is float or value is None or is_number(value):  # floats first: of most lines all values
            values[key] = value
        elif isinstance(value, str) and value in _NOT_FINITE:
            values[key] = _NOT_FINITE[value]
    return values


def _shown(value: object) -> str:
    return repr(value)[:40] if not isinstance(value, int) or abs(value) < 2**63 else "an integer of many digits"


class Faults(list[str]):
    """Sentences about what could not be read, in the order of reading."""

    refusal: OSError | None = None
    """The first file system error among the faults: the data that it hides may be readable later, and is not lost."""

    def refuse(self, path: Place, error: OSError, line: int | None = None) -> None:
        """Add a fault for an error of the file system."""
        tell(self, path, error.strerror or error, line)
        self.refusal = self.refusal or error


class FaultsOf(Faults):
    """Faults of one run. Each is added to its sweep's faults too, after the run id, and only once on repeated reads."""

    def __init__(self, run_id: str, whole: Faults) -> None:
        super().__init__()
        self._run_id, self._whole = run_id, whole

    def append(self, fault: str) -> None:
        super().append(fault)
        if (named := f"{self._run_id}: {fault}") not in self._whole:
            self._whole.append(named)

    def refuse(self, path: Place, error: OSError, line: int | None = None) -> None:
        super().refuse(path, error, line)
        self._whole.refusal = self._whole.refusal or error


MAX_LINE = 64 * 2**20
"""Maximum size of a line in bytes; an intent of 100,000 runs has 5 MB."""
MAX_FILE = 16 * 2**20
"""Maximum size in bytes of a file that holds one JSON value."""
_MAX_DEPTH = 32  # nesting of lists and mappings; a spec has 4
TORN = b" #torn\n"
"""End of a line whose writer was killed while writing it; no process relied on the line, so it is no fault."""
_SEAL, _SEAL_SIZE = b', "crc": "', 20

# A file system that is full, over quota, broken, read-only after an error, or unreachable (NFS); EFBIG: `ulimit -f`.
_STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_NO_FILE = {errno.ENXIO: "it is a socket, not a file", errno.ELOOP: os.strerror(errno.ELOOP)}
_KINDS = (
    (stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)  # fmt: skip


def is_storage_error(error: BaseException) -> bool:
    """Return True for an error of the file system that may pass, such as a full disk."""
    return isinstance(error, OSError) and error.errno in _STORAGE_ERRORS


def seal(text: str) -> str:
    """Return the text of a JSON object with the checksum of its text as the last value: `..., "crc": "0a1b2c3d"}`."""
    body = text[:-1]
    return f'{body}, "crc": "{zlib.crc32(body.encode()):08x}"}}'


def has_seal(data: bytes) -> bool:
    """Return True if a JSON line, given without its line end, carries its checksum; False if it has no checksum.

    Raises:
        ValueError: the checksum does not fit the text.
    """
    is_sealed = data[-_SEAL_SIZE:-10] == _SEAL
    if is_sealed and b"%08x" % zlib.crc32(memoryview(data)[:-_SEAL_SIZE]) != data[-10:-2]:
        raise ValueError("its checksum belongs to another text (if you have edited the line, remove its last key, crc)")
    return is_sealed


# A line with a damaged checksum key must not pass as a line from before checksums: the rest may be damaged too.
# No key that hpc-trainer writes matches this pattern.
_ALMOST_A_SEAL = re.compile(rb', "[^"]{1,12}": "[0-9a-f]{8}"\}\Z')
_decode = json.JSONDecoder().decode  # a tenth faster than json.loads on 50,000 lines


def parse_record(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a line or file without its checksum; a checksum is not required.

    Raises:
        ValueError: the data is not a valid record; the message gives the reason briefly.
    """
    data = data.strip()
    is_sealed = has_seal(data)
    try:
        text = data.decode()
        value = _decode(text)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    if not is_sealed and text.count("{") + text.count("[") > 2 * _MAX_DEPTH and _is_deep(value):
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    if "\\ud" in text or "\\uD" in text:  # perhaps half a surrogate pair, which no terminal can print
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    record: dict[str, Any] = value
    if is_sealed:
        del record["crc"]
    elif isinstance(record.get("crc"), str) or _ALMOST_A_SEAL.search(data[-2 * _SEAL_SIZE :]):
        raise ValueError("its checksum is damaged")
    return record


def parse_together(lines: Sequence[bytes]) -> list[dict[str, Any]] | None:
    """Return the records of lines in a third of the time that parsing one by one takes.

    None: a line is damaged, has a checksum or needs another look, so they have to be parsed one by one.
    """
    joined = b",".join(lines)
    if not joined.endswith(b"\n") or any(word in joined for word in (b'"crc"', b"\\ud", b"\\uD")):
        return None
    try:
        values = json.loads(b"[%b]" % joined)
    except (ValueError, RecursionError):
        return None
    are_sound = len(values) == len(lines) and all(type(value) is dict for value in values)
    return values if are_sound else None


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for parent in level
            if isinstance(parent, (dict, list))
            for item in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return bool(level)


def open_file(path: Place, faults: Faults | None = None) -> io.BufferedReader | None:
    """Open a file for reading without blocking; return None if there is none or, with a fault, if it is unreadable.

    Raises:
        OSError: the file system failed, so the file may exist, and there is no `faults` to report it to.
    """
    opened = _open(path, faults)
    return None if opened is None else os.fdopen(opened[0], "rb")


def _open(path: Place, faults: Faults | None) -> tuple[int, int] | None:
    """Open a file as `open_file` does, and return its descriptor and its size in bytes."""
    try:
        descriptor = retry_stale(lambda: os.open(path, _TO_READ))
        info = os.fstat(descriptor)
        if stat.S_ISREG(info.st_mode):
            return descriptor, info.st_size
        os.close(descriptor)
        kind = next((name for is_kind, name in _KINDS if is_kind(info.st_mode)), "thing")
        why = f"it is a {kind}, not a file"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno not in _NO_FILE:
            _refused(faults, path, error)
            return None
        why = _NO_FILE[error.errno]
    tell(faults, path, why)
    return None


_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def _read(descriptor: int, size: int, limit: int) -> bytes:
    """Return the file's bytes to its present end, or a little more than `limit` of them, and close the descriptor.

    Args:
        descriptor: the open file.
        size: its size when it was opened, in bytes; a file that has not grown takes one read.
        limit: bytes after which reading stops.
    """
    try:
        data = os.read(descriptor, min(size, limit) + 1)
        if len(data) == size:  # one more byte was requested, and the file has none
            return data
        parts = [data]
        num_bytes = len(data)
        while data and num_bytes <= limit:
            data = os.read(descriptor, _BLOCK)
            parts.append(data)
            num_bytes += len(data)
        return b"".join(parts)
    finally:
        os.close(descriptor)


# A sweep has 30,000 small files: a file that fits into one read gets no buffered reader, which costs 10 µs.
_BLOCK = 2**16


def _refused(faults: Faults | None, path: Place, error: OSError, line: int | None = None) -> None:
    if faults is not None:
        faults.refuse(path, error, line)
    elif is_storage_error(error):
        raise error


def exists(path: Place, faults: Faults | None = None) -> bool | None:
    """Return True if the path exists by this client's knowledge; None, with a fault, if the file system fails.

    The answer may be a minute old on a shared file system: `is_there` asks the server.

    Raises:
        OSError: the file system failed, and there is no `faults` to report it to.
    """
    try:
        os.stat(path)  # noqa: PTH116  (three for each of 10,000 runs: no Path is made)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        if faults is None:
            raise
        faults.refuse(path, error)
        return None
    return True


def list_folder(path: Place, faults: Faults) -> list[str] | None:
    """Return the names in a folder, sorted, as the server has them; [] if there is no such folder.

    The result is None, with a fault, if the folder cannot be listed.
    """
    try:
        return names_in(path) or []
    except OSError as error:
        if error.errno in _ABSENT:
            return []
        faults.refuse(path, error)
        return None


def tell(faults: list[str] | None, path: Place, why: object, line: int | None = None) -> None:
    """Add a fault such as `specs.jsonl line 17 cannot be read: it is not UTF-8`.

    Args:
        faults: the list that gets the fault; None discards it.
        path: the file.
        why: the reason as text or as an error; a KeyError means that a key is missing.
        line: number of the line, from 1; None for the whole file.
    """
    if faults is not None:
        name = Path(path).name
        place = name if line is None else f"{name} line {line}"
        faults.append(f"{place} cannot be read: {f'it has no {why}' if isinstance(why, KeyError) else why}")


def read_bytes(path: Place, faults: Faults | None = None, limit: int = MAX_FILE) -> bytes | None:
    """Return the bytes of a small file; None if there is none, if it is unreadable, or if it exceeds `limit` bytes."""

    def read() -> bytes | None:
        opened = _open(path, faults)
        return None if opened is None else _read(*opened, limit)

    try:
        data = retry_stale(read)  # another client may replace it while it is read
    except OSError as error:
        _refused(faults, path, error)
        return None
    if data is None:
        return None
    if len(data) > limit:
        tell(faults, path, f"it has more than {limit // 2**20} MiB")
        return None
    return data


def read_ends(path: Place, faults: Faults | None = None, *, last: int, first: int = 0) -> tuple[bytes, bytes]:
    """Return up to `first` bytes of a file's beginning and up to `last` bytes of its end, which do not overlap.

    Both are empty if there is no file.
    """

    def read() -> tuple[bytes, bytes]:
        opened = _open(path, faults)
        if opened is None:
            return b"", b""
        descriptor, size = opened
        begin = max(0, size - last)
        try:
            return os.pread(descriptor, min(first, begin), 0), os.pread(descriptor, last, begin)
        finally:
            os.close(descriptor)

    try:
        return retry_stale(read)
    except OSError as error:
        _refused(faults, path, error)
        return b"", b""


class Line(NamedTuple):
    """A line of a file, including its line end: its number from 1, its offset in bytes, and its bytes."""

    number: int
    offset: int
    data: bytes


def raw_lines(path: Place, faults: Faults | None = None) -> Iterator[Line]:
    """Yield every line of a file; none if there is no file."""

    def open_it() -> BinaryIO | None:
        opened = _open(path, faults)
        if opened is None:
            return None
        descriptor, size = opened
        if size <= _BLOCK:
            return io.BytesIO(_read(descriptor, size, MAX_FILE))
        # Twice as fast as the usual buffer, of which a line of specs.jsonl fills most.
        return io.BufferedReader(io.FileIO(descriptor, "rb"), _BLOCK)

    number = offset = 0
    try:
        opened = retry_stale(open_it)
        if opened is None:
            return
        with opened as file:
            while data := file.readline(MAX_LINE):
                number += 1
                size = len(data)
                if size == MAX_LINE and not data.endswith(b"\n"):
                    while rest := file.readline(MAX_LINE):
                        size += len(rest)
                        if rest.endswith(b"\n"):
                            break
                    tell(faults, path, f"it has more than {MAX_LINE // 2**20} MiB", number)
                else:
                    yield Line(number, offset, data)
                offset += size
    except OSError as error:
        _refused(faults, path, error, number + 1)


def is_torn(data: bytes) -> bool:
    """Return True if the line's writer was killed while writing it."""
    return not data.endswith(b"\n") or data.endswith(TORN)


def records(path: Place, faults: Faults | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number, JSON object) of a JSONL file; the object is None, with a fault, if a line is unreadable.

    An unreadable torn line (`is_torn`) is left out without a fault: no process relied on it.
    """
    for number, _, data in raw_lines(path, faults):
        is_lost = is_torn(data)
        try:
            yield number, parse_record(data.removesuffix(TORN))
        except ValueError as error:
            if not is_lost:
                tell(faults, path, error, number)
                yield number, None


def read_lines(path: Place, faults: Faults | None = None) -> Iterator[dict[str, Any]]:
    """Return an iterator over the JSON objects of a JSONL file. A damaged line is skipped; a missing file has none."""
    return (record for _, record in records(path, faults) if record is not None)


def parsed_lines(path: Place, parse: Callable[[dict[str, Any]], T], faults: Faults | None = None) -> Iterator[T]:
    """Yield `parse(object)` for each JSON object of a JSONL file; a KeyError or ValueError of `parse` is a fault."""
    for number, record in records(path, faults):
        if record is not None:
            try:
                yield parse(record)
            except (KeyError, ValueError) as error:
                tell(faults, path, error, number)


def parsed_file(path: Place, parse: Callable[[dict[str, Any]], T], faults: Faults | None = None) -> T | None:
    """Return `parse(object)` for the JSON object of a small file; None if there is none or `parse` refuses it."""
    record = read_json(path, faults)
    try:
        return None if record is None else parse(record)
    except (KeyError, ValueError) as error:
        tell(faults, path, error)
        return None


def read_json(path: Place, faults: Faults | None = None) -> dict[str, Any] | None:
    """Return the JSON object of a small file; None if there is no file or no object in it."""
    data = read_bytes(path, faults)
    if data is None:
        return None
    try:
        return parse_record(data)
    except ValueError as error:
        tell(faults, path, error)
        return None
