"""Readers of small files: they never hang, never raise for what a file holds, and name what they set aside."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.errors import RunStateError
from hpc_trainer.record import reading
from hpc_trainer.record.files import append_lines
from hpc_trainer.record.journal import Journal, read_failure, read_heartbeat, read_result
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.metrics import MetricsLog, read_metrics
from hpc_trainer.record.reading import (
    MAX_LINE,
    Faults,
    FaultsOf,
    as_amount,
    as_bool,
    as_count,
    as_table,
    as_text,
    as_time,
    exists,
    is_finite,
    is_number,
    is_there,
    list_folder,
    metric_values,
    parse_record,
    parse_together,
    parsed_file,
    parsed_lines,
    raw_lines,
    read_bytes,
    read_ends,
    read_json,
    read_lines,
    seal,
    tell,
    tuple_of,
    typed,
)
from hpc_trainer.record.states import RunState


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.jsonl"


def _read(path: Path) -> tuple[list[dict[str, object]], list[str]]:
    faults = Faults()
    return list(read_lines(path, faults)), faults


def test_a_damaged_line_is_named_and_costs_itself(path: Path) -> None:
    append_lines(path, [{"a": 1}, {"a": 2}, {"a": 3}])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b'"a"', b'"\xe1"') + b"[1]\nnonsense\n" + lines[2])
    found, faults = _read(path)
    assert found == [{"a": 1}, {"a": 3}]
    assert faults[:2] == [
        "x.jsonl line 2 cannot be read: it is not UTF-8", "x.jsonl line 3 cannot be read: it is not a JSON object",
    ]  # fmt: skip
    assert faults[2].startswith("x.jsonl line 4 cannot be read: it is not JSON")


def test_a_torn_last_line_is_passed_over_in_silence_also_when_more_lines_follow(path: Path) -> None:
    append_lines(path, [{"a": 1}])
    path.write_bytes(path.read_bytes() + b'{"a": 2, "b')
    assert _read(path) == ([{"a": 1}], [])
    append_lines(path, [{"a": 3}])
    assert _read(path) == ([{"a": 1}, {"a": 3}], [])


def test_a_whole_last_line_without_its_end_counts(path: Path) -> None:
    path.write_text('{"a": 1}')
    append_lines(path, [{"a": 2}])
    assert _read(path) == ([{"a": 1}, {"a": 2}], [])


def test_every_flipped_bit_of_a_sealed_line_is_seen() -> None:
    """A flipped digit of a job id is JSON too."""
    record = {"event": "confirmed", "job_id": "1234_5", "steps": [1, 20]}
    line = seal(json.dumps(record)).encode()
    assert parse_record(line) == record
    for place in range(len(line)):
        for bit in range(8):
            damaged = line[:place] + bytes([line[place] ^ (1 << bit)]) + line[place + 1 :]
            try:
                found = parse_record(damaged)
            except ValueError:
                continue
            assert {key: found.get(key) for key in record} == record, "only the name of the checksum may be another"


@pytest.mark.parametrize("bit", range(24))
def test_a_checksum_whose_name_is_damaged_hides_no_other_bit(bit: int) -> None:
    """One of two flipped bits made another run of a line, the other one a line of before checksums."""
    line = bytearray(seal(json.dumps({"run_ids": ["lr0.001-s2"], "kind": "array"})).encode())
    line[line.index(b"0.001") + 4] ^= 4  # 0.005
    line[line.index(b"crc") + bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"checksum is damaged|JSON|UTF-8"):
        parse_record(bytes(line))


def test_a_checksum_that_is_none_is_no_line_of_before() -> None:
    with pytest.raises(ValueError, match="its checksum is damaged"):
        parse_record((seal('{"step": 3}')[:-10] + '0000000"}').encode())
    assert parse_record(b'{"step": 3, "crc": 0.5}') == {"step": 3, "crc": 0.5}  # a metric of that name


def test_a_line_of_before_there_were_checksums_is_read() -> None:
    assert parse_record(b'{"event": "confirmed"}\n') == {"event": "confirmed"}


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000 + b"]" * 200_000, b'{"a":' * 100 + b"1" + b"}" * 100, b"\x00" * 100, b"{", b"null", b"1e999",
        b'{"a": ' + b"9" * 5000 + b"}", b'"x"', b"\xff\xfe{", b"",
    ],
)  # fmt: skip
def test_what_is_no_record_is_a_fault(path: Path, text: bytes) -> None:
    path.write_bytes(text + b"\n")
    faults = Faults()
    assert read_json(path, faults) is None
    assert len(faults) == 1
    assert faults[0].startswith("x.jsonl cannot be read: ")
    assert read_json(path) is None


def test_half_a_character_can_be_printed(path: Path) -> None:
    path.write_text('{"a": "\\ud800", "b": "\\ud83d\\ude00"}\n')
    assert read_json(path) == {"a": "?", "b": "\U0001f600"}


def test_nothing_hangs(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    place = os.open(tmp_path, os.O_RDONLY)  # a socket's path may have 107 characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{place}/socket")
        for name in ("folder", "pipe", "device", "socket"):
            faults = Faults()
            assert read_json(tmp_path / name, faults) is None
            assert list(read_lines(tmp_path / name, faults)) == []
            assert faults == [f"{name} cannot be read: it is a {name}, not a file"] * 2
    os.close(place)
    faults = Faults()
    assert read_json(tmp_path / "loop", faults) is None
    assert faults == [f"loop cannot be read: {os.strerror(errno.ELOOP)}"]
    assert read_json(tmp_path / "none" / "x", faults) is None
    assert len(faults) == 1, "what is not there is no fault"
    with pytest.raises(RunStateError, match="pipe is not a regular file"):
        append_lines(tmp_path / "pipe", [{"a": 1}])


def test_a_line_without_an_end_takes_no_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate(3 * MAX_LINE)  # a hole: 192 MiB of NUL
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"a": 2}\n')
    found, faults = _read(path)
    assert found == [{"a": 1}, {"a": 2}]
    assert faults == ["x.jsonl line 2 cannot be read: it has more than 64 MiB"]
    faults = Faults()
    assert read_json(path, faults) is None
    assert faults == ["x.jsonl cannot be read: it has more than 16 MiB"]


VALUES = [None, True, [], {}, "", "x", -1, 10**400, 1e308, float("inf"), float("nan"), 2**63, [[None]], {"a": 1}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_of_another_type(tmp_path: Path, value: object) -> None:
    """Each value in each place that is read."""
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    journal = Journal(paths)
    start = {"event": "start", "attempt": 0, "time": 1.0, "job_id": "1", "restart_count": 0, "node": "n", "pid": 1,
             "executor": "slurm"}  # fmt: skip
    end = {"event": "end", "attempt": 0, "time": 2.0, "state": "FAILED", "cause": "x", "step": 1, "saved_step": 1,
           "action": "none", "signal": None, "error": {"type": "E", "message": "m", "memory": {}}}  # fmt: skip
    guard = {"event": "guard", "attempt": 0, "time": 1.5, "action": "skip", "step": 1, "count": 1}
    for record in (start, guard, end):
        for key in record:
            lines = [{**each, key: value} if each is record else each for each in (start, guard, end)]
            paths.journal(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
            for attempt in journal.read([]):
                assert attempt.state is None or isinstance(attempt.state, RunState)
                assert isinstance(attempt.error, dict)
            assert journal.attempt_number("2", 0) >= 0
            journal.fits()
    for key in ("step", "attempt", "time", "metrics", "steps_per_s", "cause"):
        paths.heartbeat.write_text(json.dumps({"step": 1, "attempt": 0, "time": 1.0, key: value}))
        beat = read_heartbeat(paths.heartbeat, [])
        assert isinstance(beat.get("step", 0) + beat.get("attempt", 0) + beat.get("time", 0), (int, float))
        paths.result.write_text(json.dumps({key: value}))
        assert isinstance(read_result(paths.result, []).get("metrics", {}), dict)
    for key in ("type", "message", "exit_code", "memory", "rank"):
        paths.failure(0).write_text(json.dumps({key: value}))
        assert isinstance(read_failure(paths.failure(0)).get("memory", {}), dict)
    for key in ("step", "loss"):
        paths.metrics.write_text(json.dumps({"step": 1, "loss": 1.0, key: value}) + '\n{"step": 2, "loss": 1.0}\n')
        assert read_metrics(paths.metrics, [])[-1] == {"step": 2, "loss": 1.0}
        MetricsLog(paths.metrics).rewind(5)


def test_a_flipped_key_in_metrics_costs_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`step` was read of every line, and every later start died."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"stew": 2, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n')
    MetricsLog(path).rewind(10)
    assert [record["step"] for record in read_metrics(path)] == [1, 3]
    assert "metrics.jsonl line 2 cannot be read: its step" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 2**18])
def test_files_that_are_read_at_once_and_longer_ones_have_the_same_lines(path: Path, size: int) -> None:
    """Lines end with a line feed alone: a form feed or a carriage return is a part of one."""
    data = (b"one\rtwo\x0c\x1cthree\n\nfour \xe2\x80\xa8 five\r\n" * (size // 20 + 1))[:size]
    path.write_bytes(data)
    lines = list(raw_lines(path))
    whole, _, rest = data.rpartition(b"\n")
    expected = [each + b"\n" for each in whole.split(b"\n")] if b"\n" in data else []
    assert [line.data for line in lines] == [*expected, *([rest] if rest else [])]
    assert [data[line.offset :].startswith(line.data) for line in lines[:50]] == [True] * len(lines[:50])
    assert read_bytes(str(path)) == data
    assert read_bytes(path, Faults(), limit=size) == data
    faults = Faults()
    assert read_bytes(path, faults, limit=size - 1) is None if size else not faults


def test_lines_are_parsed_together_if_each_is_a_record() -> None:
    assert parse_together([b'{"step": 1}\n', b'{"step": 2}\n']) == [{"step": 1}, {"step": 2}]
    for lines in ([b"1\n", b"2\n"], [b'{"step": 1}, {}\n'], [b'{"step": 1}\n', b"[]\n"], [b'{"step": 1']):
        assert parse_together(lines) is None


_WRONG_COUNTS = [-1, 2**63, True, 1.0, "1", None]


@pytest.mark.parametrize(
    ("convert", "right", "wrong", "words"),
    [
        (as_text, [("", ""), ("x", "x")], [3, None, b"x"], "is not text"),
        (as_count, [(0, 0), (2**63 - 1, 2**63 - 1)], _WRONG_COUNTS, "is not a whole number ≥ 0"),
        (as_time, [(0, 0.0), (1.5, 1.5), (2**36 - 1, 2.0**36 - 1)], [-1, 2**36, True, "1", math.nan], "is not a time"),
        (as_amount, [(0, 0.0), (2.5, 2.5)], [-0.1, math.inf, math.nan, True, "1", 2**63], "is not a number ≥ 0"),
        (as_bool, [(True, True), (False, False)], [0, 1, "true", None], "is neither true nor false"),
        (as_table, [({}, {}), ({"a": 1}, {"a": 1})], [[], None, "{}"], "is not a JSON object"),
        (tuple_of(as_text), [([], ()), (["a"], ("a",))], ["a", ("a",), [3], None], "is not (a list|text)"),
    ],
)
def test_a_value_is_of_its_kind_or_refused(
    convert: Callable[[object], object], right: list[tuple[object, object]], wrong: list[object], words: str
) -> None:
    for value, expected in right:
        assert convert(value) == expected
        assert type(convert(value)) is type(expected)
    for value in wrong:
        with pytest.raises(ValueError, match=words):
            convert(value)


def test_a_value_is_shown_in_few_characters() -> None:
    with pytest.raises(ValueError, match=f"^'{'x' * 39} is not a whole number ≥ 0$"):
        as_count("x" * 100)
    with pytest.raises(ValueError, match=f"^{2**63 - 1} is not text$"):
        as_text(2**63 - 1)
    for number in (2**63, -(2**63)):
        with pytest.raises(ValueError, match=r"^an integer of many digits is not text$"):
            as_text(number)


def test_keys_that_may_be_missing() -> None:
    kinds, optional = {"a": as_text}, {"b": as_count, "c": as_count}
    assert typed({"a": "x", "b": 3, "c": None, "d": 4}, kinds, optional) == {"a": "x", "b": 3}
    with pytest.raises(KeyError, match="a"):
        typed({"b": 3}, kinds, optional)
    with pytest.raises(ValueError, match="not a whole number"):
        typed({"a": "x", "c": "3"}, kinds, optional)


def test_which_values_are_numbers() -> None:
    values = [0, -1, 2**63 - 1, 1.5, math.inf, math.nan, 2**63, -(2**63), True, "1", None]
    assert [is_number(value) for value in values] == [True] * 6 + [False] * 5
    assert [is_finite(value) for value in values] == [True] * 4 + [False] * 7
    record = {
        "a": 1,
        "b": 1.5,
        "c": None,
        "d": True,
        "e": "x",
        "f": "NaN",
        "g": "-Infinity",
        "h": 2**63,
        "i": "Infinity",
    }
    found = metric_values(record)
    assert math.isnan(found.pop("f"))
    assert found == {"a": 1, "b": 1.5, "c": None, "g": -math.inf, "i": math.inf}


def test_what_the_file_system_refuses_is_a_fault_of_its_own_kind(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused, words = tmp_path / ("x" * 300), os.strerror(errno.ENAMETOOLONG)
    for read, empty in (
        (read_json, None), (read_bytes, None), (list_folder, None), (exists, None),
        (lambda path, faults: list(read_lines(path, faults)), []),
        (lambda path, faults: read_ends(path, faults, last=10), (b"", b"")),
        (lambda path, faults: is_there(path, faults=faults), False),
    ):  # fmt: skip
        faults = Faults()
        assert read(refused, faults) == empty
        assert faults == [f"{refused.name} cannot be read: {words}"]
        assert faults.refusal is not None
        assert faults.refusal.errno == errno.ENAMETOOLONG
    for refuse in (exists, is_there):
        with pytest.raises(OSError, match=words):
            refuse(refused)
    faults = Faults()
    assert (exists(tmp_path, faults), exists(tmp_path / "none", faults), is_there(tmp_path / "none" / "x")) == (
        True, False, False
    )  # fmt: skip
    assert list_folder(tmp_path / "none", faults) == []
    assert list_folder(tmp_path, faults) == ["loop"]
    assert is_there(tmp_path / "loop", faults=faults)
    assert not faults


def test_a_fault_of_a_run_is_the_sweeps_too_and_once(tmp_path: Path) -> None:
    whole = Faults()
    first, second = OSError(errno.EIO, "first"), OSError(errno.EIO, "second")
    for _ in range(2):
        faults = FaultsOf("a", whole)
        tell(faults, tmp_path / "x", KeyError("step"), 3)
        faults.refuse(tmp_path / "y", first)
        faults.refuse(tmp_path / "y", second, 4)
        assert faults == [
            "x line 3 cannot be read: it has no 'step'", "y cannot be read: first", "y line 4 cannot be read: second"
        ]  # fmt: skip
        assert faults.refusal is first
    assert whole == [f"a: {fault}" for fault in faults]
    assert whole.refusal is first
    tell(None, tmp_path / "x", "nobody listens")


def test_the_ends_of_a_file_do_not_overlap(path: Path) -> None:
    assert read_ends(path, last=4, first=3) == (b"", b"")
    path.write_bytes(b"0123456789")
    assert read_ends(path, last=4, first=3) == (b"012", b"6789")
    assert read_ends(path, last=4) == (b"", b"6789")
    assert read_ends(path, last=8, first=3) == (b"01", b"23456789")
    assert read_ends(path, last=20, first=3) == (b"", b"0123456789")


def test_a_file_is_read_up_to_its_limit(path: Path) -> None:
    path.write_bytes(b"x" * 2**20)
    assert read_bytes(path, limit=2**20) == b"x" * 2**20
    faults = Faults()
    assert read_bytes(path, faults, limit=2**20 - 1) is None
    assert faults == ["x.jsonl cannot be read: it has more than 0 MiB"]


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end(path: Path) -> None:
    data = b"0123456789" * 20_000
    path.write_bytes(data)
    for size in (0, 1, len(data) - 1, len(data), len(data) + 1):
        assert reading._read(os.open(path, os.O_RDONLY), size, reading.MAX_FILE) == data
    some = reading._read(os.open(path, os.O_RDONLY), 10, 70_000)
    assert data.startswith(some)
    assert 70_000 < len(some) < len(data)


def test_what_a_parser_refuses_is_a_fault(path: Path) -> None:
    path.write_text('{"a": "x"}\n')
    assert parsed_file(path, lambda record: as_text(record["a"])) == "x"
    faults = Faults()
    assert parsed_file(path, lambda record: as_count(record["a"]), faults) is None
    assert parsed_file(path, lambda record: as_count(record["b"]), faults) is None
    assert list(parsed_lines(path, lambda record: as_count(record["a"]), faults)) == []
    why = "'x' is not a whole number ≥ 0"
    places = ("x.jsonl cannot", "x.jsonl cannot", "x.jsonl line 1 cannot")
    whys = (why, "it has no 'b'", why)
    assert faults == [f"{place} be read: {said}" for place, said in zip(places, whys, strict=True)]


def test_lines_of_a_file_that_the_file_system_refuses_are_none_and_the_refusal_is_told(tmp_path: Path) -> None:
    faults = Faults()
    assert list(read_lines(tmp_path / ("x" * 300), faults)) == []
    assert faults.refusal is not None
    assert faults.refusal.errno == errno.ENAMETOOLONG
