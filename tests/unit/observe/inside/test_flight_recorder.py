"""What a rank writes when it fails or hangs: its newest spans, steps and collectives, once for each end."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.observe import flight_recorder as module
from hpc_trainer.observe.flight import Collective, Flight, read_flights
from hpc_trainer.observe.flight_recorder import FlightRecorder
from hpc_trainer.record.files import sha256_of
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.ledger import Kind
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker.conclude import Stop
from tests.unit.observe.inside.flights import entered
from tests.unit.record.builders import make_config


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run")
    found.logs.mkdir(parents=True)
    return found


def _recorder(paths: RunPaths, spans: Spans | None = None, *collectives: Collective) -> FlightRecorder:
    stop = Stop(config=make_config(), paths=paths, env=read_rank_env({}), flag=StopFlag(), attempt=0, saved_step=None)
    return FlightRecorder(stop, spans or Spans(), lambda: collectives)


def _running(recorder: FlightRecorder, *ends: tuple[float, int]) -> None:
    recorder.run = SimpleNamespace(step_ends=[*ends])  # type: ignore[assignment]


def _read(paths: RunPaths) -> Flight:
    (found,) = read_flights(paths, 0).values()
    return found


def test_spans_steps_and_collectives_are_put_together(paths: RunPaths) -> None:
    spans, began = Spans(), time.time()
    with spans.within(Kind.step, 6):
        pass
    with spans.within(Kind.step, 7), spans.within(Kind.data_wait):
        time.sleep(0.06)
        made = [
            entered(1, begin=began - 60, step=None, during=None), entered(2, begin=began - 8, step=None, during=None),
            entered(3, begin=time.time(), step=None, during=None, is_open=True),
        ]  # fmt: skip
        recorder = _recorder(paths, spans, *made)
        _running(recorder, (began - 20, 5), (began - 10, 6), (began - 5, 7))
        recorder.write("no sign of life for 9 s")
    found = _read(paths)
    assert (found.rank, found.why, found.step, found.error) == (0, "no sign of life for 9 s", 7, None)
    assert [(each.kind, each.end is None, each.step) for each in found.spans[-3:]] == [
        ("start_up", True, None), ("step", True, 7), ("data_wait", True, None),
    ]  # fmt: skip
    assert [(each.step, each.during) for each in found.collectives] == [(None, None), (7, None), (8, "data_wait")]
    assert found.frame is None, "tests are no code of ours, and what started us is none of a person's"


def test_another_thread_tells_where_the_main_thread_is_stuck(paths: RunPaths, tmp_path: Path) -> None:
    recorder = _recorder(paths)
    (tmp_path / "data").write_text("x")

    def stuck_here() -> None:
        thread = threading.Thread(target=recorder.write, args=("no sign of life",))
        thread.start()
        thread.join()

    sha256_of(tmp_path / "data", beat=stuck_here)  # code of ours, which calls that of a person
    found = _read(paths)
    assert "in sha256_of" in found.stack[0], "what started us is left out"
    assert re.fullmatch(r"\S*test_flight_recorder\.py:\d+ in stuck_here", str(found.frame))


def test_an_error_is_its_traceback(paths: RunPaths) -> None:
    try:
        raise ValueError("no data")
    except ValueError as error:
        _recorder(paths).write("it failed", error)
    found = _read(paths)
    assert found.error == "ValueError"
    assert found.stack[-1] == "ValueError: no data"
    assert "test_flight_recorder.py" in str(found.frame)


def test_who_lost_another_rank_waited_in_its_last_collective(paths: RunPaths) -> None:
    lost = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    _recorder(paths, None, entered(1), entered(2)).write("it failed", lost)
    found = _read(paths)
    assert found.error == "PeerLostError"
    assert [each.is_open for each in found.collectives] == [False, True]


def test_the_echo_of_another_ranks_end_replaces_nothing(paths: RunPaths) -> None:
    recorder = _recorder(paths)
    _running(recorder, (1.0, 5))
    recorder.write("no sign of life")
    recorder.write("it failed", ValueError("closed by peer"))
    assert _read(paths).why == "no sign of life"
    _running(recorder, (1.0, 5), (2.0, 6))
    recorder.write("it failed", ValueError("after another step"))
    assert _read(paths).error == "ValueError"


def test_a_full_disk_and_a_strange_recorder_are_lines_in_the_log(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def strange() -> list[Collective]:
        raise KeyError("entries")

    recorder = _recorder(paths)
    recorder._collectives = strange
    recorder.write("it failed")
    assert "torch's flight recorder did not answer: KeyError" in capsys.readouterr().err
    assert _read(paths).collectives == ()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hpc_trainer.observe.flight_recorder.write_flight", full)
    _recorder(paths).write("it failed")
    assert "the flight record could not be written: OSError" in capsys.readouterr().err


def test_where_another_rank_has_failed_it_is_written_before_slurm_kills(paths: RunPaths) -> None:
    recorder = _recorder(paths)
    recorder.look(60.0)
    recorder._stop.flag.request("SIGTERM")
    recorder.look(60.0)
    assert read_flights(paths, 0) == {}, "no rank has failed: it is a preemption"
    paths.failure(0).write_text("{}")
    recorder.look(1.0)
    assert read_flights(paths, 0) == {}, "it goes on"
    recorder.look(5.0)
    assert _read(paths).why.startswith("another rank has failed")


_WRITER = """
import sys
from hpc_trainer.record.files import sha256_of
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.observe.flight import write_flight
from tests.unit.observe.inside.flights import entered, flight
import dataclasses
one = dataclasses.replace(flight(0, 5), collectives=tuple(entered(seq, name="x" * 400) for seq in range(256)))
paths = RunPaths(sys.argv[1])
write_flight(paths, one)  # so that there is one, however busy the machine is
print("begins", flush=True)
while True:
    write_flight(paths, one)
"""


def test_a_kill_while_it_writes_leaves_no_half_file(paths: RunPaths) -> None:
    root = Path(__file__).resolve().parents[4]
    for wait_s in (0.0, 0.003, 0.011):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, paths.place],
            cwd=root,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": str(root)},
        )
        with writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.05 + wait_s)
            writer.kill()
        assert len(_read(paths).collectives) == 256


@pytest.mark.long
def test_without_a_process_group_torch_has_no_collectives() -> None:
    asked = "from hpc_trainer.observe.flight_recorder import recent_collectives; print(recent_collectives())"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)  # a new process
    assert told.stdout == "[]\n"


def test_a_driver_that_does_not_answer_keeps_no_rank(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_S", 0.05)
    answers = threading.Event()
    stop = Stop(config=make_config(), paths=paths, env=read_rank_env({}), flag=StopFlag(), attempt=0, saved_step=None)

    def ask() -> list[Collective]:
        answers.wait(60.0)
        return []

    recorder = FlightRecorder(stop, Spans(), ask)
    recorder.write("no sign of life for 312 s")
    assert read_flights(paths, 0) == {}, "it waited for the driver"
    answers.set()
    for each in threading.enumerate():
        if each.name == "flight recorder":
            each.join(60.0)
    assert _read(paths).why == "no sign of life for 312 s"


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_opens_and_closes_no_span(paths: RunPaths, set_by_s: float) -> None:
    spans = Spans()
    with spans.within(Kind.imports):
        pass
    time.sleep(0.06)
    spans._zero -= set_by_s  # it was read when the process began
    recorder = _recorder(paths, spans)
    with spans.within(Kind.data_wait):
        recorder.write("no sign of life")
    assert {each.kind: each.end is None for each in _read(paths).spans} == {
        "imports": False, "start_up": True, "data_wait": True,
    }  # fmt: skip
