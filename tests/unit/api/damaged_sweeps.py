"""Sweeps whose runs stand in every state, and what may happen to their small files: material for the fuzzer."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.launch.submit import SubmittedArray
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import SWEEP_FILES
from hpc_trainer.record.processes import process_name
from hpc_trainer.record.reading import parse_record, seal
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.record.submissions import write_confirmation, write_intent, write_waiting
from tests.journals import JOURNALS
from tests.unit.record.lookalike import start_lookalike
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import accounting_rows, queue_rows

DONE, FAILED, RUNNING, PENDING, CANCELLED, PREEMPTED, SUCCEEDED, REQUEUED, WAITING = range(9)
"""Index of the run in each state."""

_DEAD = 2**22  # above every process id that Linux gives
_S = RunState
_MAY_BE = {
    DONE: {_S.COMPLETED},
    FAILED: {_S.FAILED},
    RUNNING: {_S.RUNNING},
    PENDING: {_S.PENDING},
    CANCELLED: {_S.CANCELLED},
    PREEMPTED: {_S.PREEMPTED},
    SUCCEEDED: {_S.REQUEUED, _S.PENDING},
    REQUEUED: {_S.REQUEUED, _S.PENDING},
    WAITING: {_S.PENDING, _S.NEW},  # no scheduler has it: to submit it again is right
}
"""States that `status` may show beside UNKNOWN, whatever one file has met."""


SUBSETS = [each for size in (1, 2, 3) for each in itertools.combinations(SWEEP_FILES, size)]
"""Which of a sweep's own files may be gone."""

SHORTER = ("cut", "lost line", "lost last line", "NUL bytes")
"""Damage after which a journal may be that of a run at work: nothing tells that a line is gone from its end."""


def may_show(index: int, state: RunState, file: str, kind: str, executor: str) -> bool:
    """True if a run may be shown so after damage of this kind to `file`."""
    if file.startswith("submissions") and not kind.endswith(("value", "type")) and state is _S.UNKNOWN:
        return False  # what a submission was stands twice
    if kind in SHORTER and _is_journal(file) and executor == "local" and state is _S.RUNNING:
        return True  # the queue lives that would have told of its end; in truth it does so within 0.1 s
    is_other_value = kind.endswith(("value", "type")) and _is_journal(file)
    if is_other_value and executor == "local" and state in (_S.PENDING, _S.RUNNING):
        return True  # a start at another time, in a line without a checksum: who can tell, while the queue lives
    if index == DONE and file.endswith("/DONE"):
        return state in (_S.COMPLETED, _S.PREEMPTED, _S.UNKNOWN)  # the last checkpoint brings it back
    if index == CANCELLED and file.endswith("/CANCEL"):
        return True  # the marker is what says so
    return state is _S.UNKNOWN or state in _MAY_BE[index]


def _is_journal(file: str) -> bool:
    return Path(file).match(JOURNALS)


class PlayedSlurm:
    """Slurm's commands, played in this process: 10,000 tries would start 30,000 processes."""

    def __init__(self) -> None:
        self.queue: list[str] = []
        self.scancelled: list[str] = []
        self.accounting = ""
        self.uuids: dict[str, str] = {}
        """Array -> what its jobs carry."""
        self._number = 1000

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` gives for a Slurm command."""
        said = words = ""
        if argv[0] == "squeue":
            said = queue_rows("\n".join(self.queue))
        elif argv[0] == "sacct":
            said = accounting_rows(self.accounting, lambda job_id: self.uuids[job_id.split("_")[0]])
        elif argv[0] == "scancel":
            self.scancelled += argv[1:]
        elif argv[0] == "sbatch" and "--test-only" not in argv:
            self._number += 1
            said = f"Submitted batch job {self._number}\n"
        elif argv[0] == "sbatch":
            words = "sbatch: Job 1 to start at 2026-01-01T00:00:00 using 1 processors on nodes n1 in partition main\n"
        return subprocess.CompletedProcess(list(argv), 0, said, words)

    def has_cancelled(self, job_id: str) -> bool:
        """True if scancel was given this job, or the array that it is of."""
        array, _, element = job_id.partition("_")
        for word in self.scancelled:
            found = re.fullmatch(rf"{array}(?:_\[?([0-9,-]+)\]?)?", word)
            if found and (not found[1] or any(_holds(part, int(element or -1)) for part in found[1].split(","))):
                return True
        return False


def _holds(part: str, element: int) -> bool:
    first, _, last = part.partition("-")
    return int(first) <= element <= int(last or first)


class Bed:
    """One sweep on disk, a copy of it, and who lives: the fuzzer damages the one and takes it back from the other."""

    def __init__(self, folder: Path, specs: Sequence[RunSpec], slurm: PlayedSlurm, executor: str) -> None:
        self.sweep = SweepOnDisk(folder / "runs" / "sweep", specs)
        self.slurm, self.executor = slurm, executor
        self.ids = [spec.run_id for spec in specs]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.uuid = ""
        """Of the first submission."""
        self._build()
        self._copy = folder / "copy"
        shutil.copytree(self.paths.folder, self._copy, symlinks=True)

    @property
    def paths(self) -> Any:
        """The sweep's paths."""
        return self.sweep.paths

    @property
    def live_jobs(self) -> list[str]:
        """What `cancel` of the sweep must reach."""
        return ["500_2", "500_3", "900", "500_7"] if self.executor == "slurm" else []

    def files(self) -> list[str]:
        """Every small file of the sweep and of its runs, logs and batch scripts left out."""
        names = [str(path.relative_to(self.paths.folder)) for path in sorted(self.paths.folder.rglob("*"))]
        return [name for name in names if re.search(r"\.jsonl?\Z|/(DONE|CANCEL)\Z", name)]

    def restore(self) -> None:
        """The sweep as it was."""
        shutil.rmtree(self.paths.folder)
        shutil.copytree(self._copy, self.paths.folder, symlinks=True)
        self.slurm.scancelled.clear()

    def close(self) -> None:
        """Ends the processes that stand for runs and queues."""
        for process in self.processes:
            process.kill()
            process.communicate()

    def _build(self) -> None:
        sweep, paths = self.sweep, self.paths
        job = self._first_submission()
        for index in (DONE, FAILED, RUNNING, CANCELLED, PREEMPTED, SUCCEEDED, REQUEUED):
            pid = self.processes[0].pid if self.executor == "local" and index == RUNNING else _DEAD
            sweep.start(
                index, job_id=f"{job}_{index}" if self.executor == "slurm" else job, executor=self.executor, resumed=0,
                pid=pid, age_s=50,
            )  # fmt: skip
            sweep.beat(index, step=10, loss=1.5, age_s=1)
            run = sweep.run(index)
            run.log(0, 0).write_text("attempt 0: job 500_0, start 0\nhello\n")
            run.metrics.write_text(
                "".join(json.dumps({"step": step, "loss": 2.0, "lr": 0.1}) + "\n" for step in (5, 10))
            )
            write_json(run.memory, {"peak": 5e9, "limit": 6e9, "step": 3})
        sweep.end(DONE, state=_S.COMPLETED, cause="done", step=20, saved_step=20)
        sweep.done(DONE, eval_loss=0.5)
        sweep.end(FAILED, state=_S.FAILED, cause="exception", error={"type": "ValueError", "message": "no"})
        failure = {"rank": 0, "node": "n1", "exit_code": 1, "type": "ValueError", "message": "no", "traceback": ""}
        write_json(sweep.run(FAILED).failure(0), failure)
        sweep.end(CANCELLED, state=_S.CANCELLED, cause="cancelled", step=10, saved_step=10)
        sweep.mark("CANCEL", CANCELLED)
        sweep.end(PREEMPTED, state=_S.PREEMPTED, cause="preempted", step=10, saved_step=10)
        if self.executor == "slurm":
            sweep.end(SUCCEEDED, state=_S.TIMEOUT, cause="timeout", step=10, saved_step=10, action="successor")
            intent = write_intent(
                sweep.run(SUCCEEDED), executor="slurm", hardware="cpu_x1", run_ids=[self.ids[SUCCEEDED]],
                kind="successor",
            )  # fmt: skip
            write_confirmation(sweep.run(SUCCEEDED), intent, "900")
            self._script(intent.uuid, f"srun python --sweep-dir {paths.folder} --run {self.ids[SUCCEEDED]}\n")
            self.slurm.queue.append(f"900|PENDING||Dependency|{intent.uuid}|sweep-{intent.uuid[:8]}")
            sweep.end(REQUEUED, state=_S.REQUEUED, cause="preempted", step=10, saved_step=10, action="requeue")
        write_json(paths.sweep, {"sweep": "sweep", "run_ids": self.ids})

    def _first_submission(self) -> str:
        run_ids = self.ids[:WAITING]
        if self.executor == "slurm":
            write_waiting(self.paths, self.ids, "no room", None)
        intent = write_intent(self.paths, executor=self.executor, hardware="cpu_x1", run_ids=run_ids)
        if self.executor == "slurm":
            job = "500"
            self.slurm.uuids[job] = intent.uuid
            self._script(intent.uuid, f"srun python --sweep-dir {self.paths.folder} --array {intent.uuid}\n")
            for element, state in ((RUNNING, "RUNNING"), (PENDING, "PENDING"), (REQUEUED, "PENDING")):
                self.slurm.queue.append(f"500_{element}|{state}|n1|None|{intent.uuid}|sweep-{intent.uuid[:8]}")
            ended = ((FAILED, "FAILED"), (PREEMPTED, "PREEMPTED"), (SUCCEEDED, "TIMEOUT"), (CANCELLED, "CANCELLED"))
            rows = [f"500_{element}|{state}|1:0|n1" for element, state in ended]
            self.slurm.accounting = "".join(f"{row}\n" for row in (*rows, f"500_{DONE}|COMPLETED|0:0|n1"))
        else:
            self.paths.local_logs.mkdir()
            words = ["--sweep-dir", str(self.paths.folder), "--intent", intent.uuid, *run_ids]
            self.processes += [start_lookalike(), start_lookalike(*words)]
            job = process_name(self.processes[1].pid)
        write_confirmation(self.paths, intent, job)
        lines = self.paths.submissions.read_bytes().splitlines()
        records = [parse_record(line) for line in lines]
        for record in records:
            record["time"] -= 100
        self.paths.submissions.write_text("".join(seal(json.dumps(each)) + "\n" for each in records))
        self.uuid, copy = intent.uuid, self.paths.intent(intent.uuid)
        record = parse_record(copy.read_bytes())
        copy.write_text(seal(json.dumps({**record, "time": record["time"] - 100})) + "\n")
        return job

    def _script(self, uuid: str, text: str) -> None:
        self.paths.scripts.mkdir(exist_ok=True)
        (self.paths.scripts / f"{uuid}.sh").write_text(text)


def play(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands, and the start of a local queue, are played from now on."""
    played = types.SimpleNamespace(run=bed.slurm.run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("hpc_trainer.slurm.commands.subprocess", played)
    monkeypatch.setattr("hpc_trainer.launch.submit._start_queue", lambda *_: types.SimpleNamespace(pid=os.getpid()))
    slept: list[float] = []  # a clock that stands still would make a wait for a young intent endless
    clock = types.SimpleNamespace(time=lambda: 4e9 + sum(slept), sleep=slept.append)
    monkeypatch.setattr("hpc_trainer.launch.settle.time", clock)


def doubled(bed: Bed, arrays: Sequence[SubmittedArray], *, retried: Sequence[str] = ()) -> list[str]:
    """Run ids among those submitted now that had a job, or must not come back."""
    kept = {bed.ids[index] for index in (DONE, RUNNING, PENDING, SUCCEEDED, REQUEUED)}
    kept |= {bed.ids[CANCELLED], bed.ids[FAILED]} - set(retried)
    return [run_id for array in arrays for run_id in array.run_ids if run_id in kept]


# --- damage ---

_VALUES: list[Any] = [
    None, True, False, [], {}, "", "x", "../x", "\x1b[31m", "\ud800", -1, 0, 1, 10**400, 1e308, float("inf"),
    float("-inf"), float("nan"), [None], {"a": []}, 2**63, -0.5, [[]], "\x00",
]  # fmt: skip


def _bit(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return b"\x01"
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def _digit(data: bytes, chance: random.Random) -> bytes:
    places = [place for place, byte in enumerate(data) if chr(byte).isdecimal()]
    if not places:
        return _bit(data, chance)
    place = chance.choice(places)
    return data[:place] + str(chance.randrange(10)).encode() + data[place + 1 :]


def _lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Callable[[bytes, random.Random], bytes]:
    return lambda data, chance: b"".join(change(data.splitlines(keepends=True), chance))


def _any_value(chance: random.Random) -> bytes:
    return json.dumps(chance.choice(_VALUES)).encode() + b"\n"


def _other_value(data: bytes, chance: random.Random) -> bytes:
    """A value of another type in one record: in half of the cases in a line of before there were checksums."""
    lines = data.splitlines(keepends=True)
    place = chance.randrange(len(lines)) if lines else 0
    try:
        record = parse_record(lines[place])
    except (ValueError, IndexError):
        return data + b"null\n"
    key = chance.choice(sorted(record)) if record else "event"
    owner = record
    if isinstance(record.get(key), dict) and record[key] and chance.random() < 0.7:
        owner, key = record[key], chance.choice(sorted(record[key]))
    owner[key] = chance.choice(_VALUES)
    text = json.dumps(record)
    lines[place] = ((text if chance.random() < 0.5 else seal(text)[:-10] + '0000000"}') + "\n").encode()
    return b"".join(lines)


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bit": _bit,
    "digit": _digit,
    "two bits": lambda data, chance: _bit(_bit(data, chance), chance),
    "first line's bit": lambda data, chance: _bit(data[: data.find(b"\n")], chance) + data[data.find(b"\n") :],
    "cut": lambda data, chance: data[: chance.randrange(len(data) or 1)],
    "lost line": _lines(lambda lines, chance: [each for each in lines if each is not chance.choice(lines)]),
    "lost first line": _lines(lambda lines, _: lines[1:]),
    "lost last line": _lines(lambda lines, _: lines[:-1]),
    "line twice": _lines(lambda lines, chance: [*lines, chance.choice(lines or [b"\n"])]),
    "garbage line": _lines(lambda lines, _: [*lines[:1], b"garbage\n", *lines[1:]]),
    "another JSON": _lines(lambda lines, chance: [*lines[:1], _any_value(chance), *lines[1:]]),
    "another value": _other_value,
    "value of another type": _other_value,
    "empty": lambda *_: b"",
    "NUL bytes": lambda data, chance: data[: chance.randrange(len(data) or 1)] + b"\x00" * 512,
    "all NUL": lambda data, _: b"\x00" * len(data),
    "not UTF-8": lambda data, chance: data[: (p := chance.randrange(len(data) or 1))] + b"\xff\xfe\xe9" + data[p:],
    "UTF-16": lambda data, _: data.decode(errors="replace").encode("utf-16"),
    "BOM": lambda data, _: b"\xef\xbb\xbf" + data,
    "deep": lambda data, _: b'{"event":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n" + data,
    "deep value": lambda data, _: b'{"metrics": {"loss": ' + b"[" * 600 + b"]" * 600 + b"}}\n" + data,
    "long line": lambda data, _: b'{"event": "' + b"x" * 3_000_000 + b'"}\n' + data,
    "no end": lambda data, _: data.rstrip(b"\n"),
    "CRLF": lambda data, _: data.replace(b"\n", b"\r\n"),
    "bare numbers": lambda *_: b"1e999\n-0\nNaN\n[]\n",
}  # fmt: skip
KINDS = (
    "gone",
    "folder",
    "full folder",
    "pipe",
    "socket",
    "link to itself",
    "dangling link",
    "device",
    "written by all",
)


def damage(path: Path, kind: str, chance: random.Random) -> None:
    """Does `kind` to a file."""
    if kind in BYTES:
        path.write_bytes(BYTES[kind](path.read_bytes(), chance))
        return
    if kind == "written by all":
        path.chmod(0o666)
        return
    path.unlink()
    if kind.endswith("folder"):
        path.mkdir()
        if kind == "full folder":
            (path / "x").touch()
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "socket":
        place = os.open(path.parent, os.O_RDONLY)  # a socket's path may have 107 characters
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"/proc/self/fd/{place}/{path.name}")
        finally:
            os.close(place)
    elif kind != "gone":
        path.symlink_to({"link to itself": path.name, "dangling link": "nowhere", "device": "/dev/zero"}[kind])
