"""Turns of the runs of a pool: which slot has a run, and how each turn ended.

A pool is one submission whose jobs, the slots, work through its runs. A slot takes a run by a claim: the file
turns/RUN.T in the sweep's folder, which a link creates once. T counts the turns of the run, and no claim is ever
removed: whoever finds that turn T is over tries to create turn T + 1, and of any number of slots one succeeds. The
names of the folder are therefore enough to know which runs have been taken.

Each slot has a folder of its own, slot-UUID-ELEMENT, with the files of a run's folder: its journal records when the
slot began and why it ended. The slot appends the ends of its turns to ends.jsonl there. A lost end does no harm: the
run's own files record it too.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.record.files import OwnLines, claim, make_folder, to_json
from hpc_trainer.record.journal import Attempt, Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.processes import is_alive
from hpc_trainer.record.reading import (
    Faults,
    Kinds,
    as_amount,
    as_count,
    as_text,
    as_time,
    is_there,
    list_folder,
    parse_record,
    read_bytes,
    read_json,
    seal,
    tell,
    typed,
)
from hpc_trainer.record.shared_folder import look_anew
from hpc_trainer.record.states import CANCEL, NO_SERVICE, RunState
from hpc_trainer.record.submissions import Submission

_CLAIM: Kinds = {
    "uuid": as_text, "slot": as_text, "job_id": as_text, "restart_count": as_count, "place": as_count,
    "node": as_text, "process": as_text, "time": as_time,
}  # fmt: skip
_END: Kinds = {"run_id": as_text, "turn": as_count, "uuid": as_text, "state": RunState, "time": as_time}
_MAY_END: Kinds = {"seconds": as_amount}
_SLOT = "slot-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Slot that takes runs, in one incarnation of its job.

    Attributes:
        uuid: the pool's submission.
        slot: name of the slot's folder (`slot_name`).
        job_id: the slot's job, `123_4` on Slurm.
        restart_count: how often Slurm has restarted the job.
        node: the slot's node.
        process: name of the slot's process (`record.processes.process_name`).
        cluster: name of the cluster, None without Slurm.
    """

    uuid: str
    slot: str
    job_id: str
    restart_count: int
    node: str
    process: str
    cluster: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Turn of a run: the slot that has claimed it, the place in the slot, and the time in seconds since the epoch."""

    run_id: str
    number: int
    holder: Holder
    place: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """End of a turn, as its slot recorded it: the run's state, the pool, and the seconds that the turn took."""

    run_id: str
    turn: int
    uuid: str
    state: RunState
    time: float
    seconds: float = 0.0

    @property
    def is_final(self) -> bool:
        """True if the run is done, failed or cancelled, so that the pool does not take it again."""
        return not (self.state.needs_submit or self.state.is_active)


def slot_name(uuid: str, element: int) -> str:
    """Return the name of a slot's folder."""
    return f"{_SLOT}{uuid[:8]}-{element}"


def is_slot(name: str) -> bool:
    """Return True if a name in the sweep's folder is that of a slot's folder."""
    return name.startswith(_SLOT)


def pool_job(pool: Submission) -> str:
    """Return the part that the ids of a pool's slots share: the array's id, or a name for slots without Slurm."""
    return (pool.job_id or "") if pool.executor == "slurm" else f"pool-{pool.uuid[:8]}"


def living_slots(sweep: SweepPaths, pool: Submission) -> list[str]:
    """Return the names of the processes of a local pool's slots that are alive on this machine.

    A search whose slots have not begun has the process that starts them.
    """
    begun = [last for _, last in _slots(sweep, pool) if last is not None]
    is_young = pool.source is not None and not begun
    if is_young and pool.job_id is not None and is_alive(pool.job_id):
        return [pool.job_id]
    return [last.process for last in begun if not last.has_ended and is_alive(last.process)]


def may_have_slots(sweep: SweepPaths, pool: Submission) -> bool:
    """Return True unless the files of all slots of a pool say that they ended, or were cancelled."""
    for slot, last in _slots(sweep, pool):
        has_ended = last is not None and last.has_ended and last.state is RunState.COMPLETED
        if not has_ended and not is_there(slot.marker(CANCEL), faults=Faults()):
            return True
    return False


def pool_is_alive(sweep: SweepPaths, pool: Submission) -> bool | None:
    """Return True if a process of a local pool is alive; None if it is not known, as on another host."""
    signs = [is_alive(pool.job_id)] if pool.job_id else []
    signs += [is_alive(last.process) for _, last in _slots(sweep, pool) if last is not None and not last.has_ended]
    return True if any(signs) else None if None in signs else False


def _slots(sweep: SweepPaths, pool: Submission) -> Iterator[tuple[RunPaths, Attempt | None]]:
    """Yield the folder of each slot of a pool, and the slot's newest start; None if it has not begun."""
    for element in range(pool.slots):
        slot = slot_folder(sweep, pool.uuid, element)
        attempts = Journal(slot).read(Faults())
        yield slot, attempts[-1] if attempts else None


def slot_failure(sweep: SweepPaths, pool: Submission) -> str | None:
    """Return why the slots of a pool could not begin, as text; None if none failed.

    A slot fails only if its node lacks what `pool.mps=on` demands. Errors of runs never end a slot.
    """
    if pool.per_gpu <= 1:
        return None
    for _, last in _slots(sweep, pool):
        if last is not None and last.cause == NO_SERVICE:
            return f"slot {last.job_id} of its pool failed: {last.error.get('message')}"
    return None


def slot_folder(sweep: SweepPaths, uuid: str, element: int) -> RunPaths:
    """Return the paths of a slot's folder, which has the files of a run's folder."""
    return RunPaths(sweep.at(slot_name(uuid, element)))


def read_turn(sweep: SweepPaths, run_id: str, number: int, faults: Faults | None = None) -> Turn | None:
    """Return a turn by its claim; None if there is none, or if it cannot be read."""
    faults = Faults() if faults is None else faults
    path = sweep.turns / f"{run_id}.{number}"
    record = read_json(path, faults)
    if record is None:
        return None
    try:
        values = typed(record, _CLAIM, {"cluster": as_text})
    except (KeyError, ValueError) as error:
        tell(faults, path, error)
        return None
    place, since = values.pop("place"), values.pop("time")
    return Turn(run_id=run_id, number=number, holder=Holder(**values), place=place, time=since)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Claim because of which no slot takes a run: it tells of no pool of the sweep.

    Attributes:
        path: the claim.
        holder: slot that the claim names, which no submission of the sweep has; None if the claim cannot be read.
    """

    path: Path
    holder: Holder | None

    @property
    def who(self) -> str:
        """Return the job that the claim names, with its cluster and node; "" if the claim cannot be read."""
        if self.holder is None:
            return ""
        cluster = "" if self.holder.cluster is None else f" of cluster {self.holder.cluster}"
        return f"job {self.holder.job_id}{cluster} on {self.holder.node}"

    def note(self, run_id: str) -> str:
        """Return a note for `status`: why no slot takes the run, and what helps."""
        if self.holder is None:
            return (
                f"no slot takes {run_id}, because its claim {self.path} cannot be read. A pool that is submitted two "
                "minutes after the file was written takes the run."
            )
        return (
            f"no slot takes {run_id}: by its claim {self.path}, {self.who} has it, and no submission of this sweep has "
            "that job. If the job has ended, remove the file."
        )


def use_of(sweep: SweepPaths, pool: Submission) -> tuple[float, float]:
    """Return the seconds that the places of a pool's slots had an allocation, and those in which they had a run.

    A slot at work counts until the last end of a turn that it has recorded.
    """
    turns, held_s, busy_s = Turns(sweep), 0.0, 0.0
    for element in range(pool.slots):
        slot = slot_folder(sweep, pool.uuid, element)
        ends = list(turns.all_ends([slot.run_id]))
        last_s = max((end.time for end in ends), default=0.0)
        busy_s += sum(end.seconds for end in ends)
        for attempt in Journal(slot).read(Faults()):
            held_s += max(0.0, (attempt.end_time or last_s) - attempt.start_time)
    return held_s * max(1, pool.per_node), busy_s


class Turns:
    """All turns of a sweep, as of the last look; with a holder also its own claims and ends.

    Args:
        sweep: the sweep.
        holder: the slot that takes turns; None only to read.
    """

    def __init__(self, sweep: SweepPaths, holder: Holder | None = None) -> None:
        self.sweep, self.holder = sweep, holder
        self.newest: dict[str, int] = {}
        """Run id -> its newest turn."""
        self.ends: dict[str, TurnEnd] = {}
        """Run id -> the end of its newest turn that has ended."""
        self.faults = Faults()
        self._read: dict[str, int] = {}  # slot -> bytes of its ends that were read
        self._own_open: set[str] = set()
        self._signs: dict[str, tuple[tuple[int, ...], float]] = {}
        self._whole_s: list[float] = []  # of each run that was completed in its first turn, sorted
        self._own = None if holder is None else OwnLines(Path(sweep.at(holder.slot)) / "ends.jsonl")

    def begin(self) -> None:
        """Create the folders for claims and ends, and take the first look at the turns."""
        assert self.holder is not None
        make_folder(self.sweep.turns)
        make_folder(Path(self.sweep.at(self.holder.slot)))
        self.look()

    def look(self, slots: Iterable[str] | None = None) -> None:
        """Read the claims' names, and the ends that were recorded since the last look.

        Args:
            slots: names of the slots' folders; None: those in the sweep's folder.
        """
        with contextlib.suppress(OSError):
            look_anew(self.sweep.turns)
        for name in list_folder(self.sweep.turns, self.faults) or ():
            run_id, _, number = name.rpartition(".")
            if run_id and number.isdecimal() and not name.startswith("."):  # a dot: a claim that is being written
                self.newest[run_id] = max(self.newest.get(run_id, 0), int(number))
        if slots is None:
            slots = [name for name in list_folder(self.sweep.folder, self.faults) or () if is_slot(name)]
        for slot in slots:
            for end in self._new_ends(slot):
                self._take_end(end)

    def _new_ends(self, slot: str) -> Iterator[TurnEnd]:
        path = Path(self.sweep.at(slot)) / "ends.jsonl"
        data = (read_bytes(path, self.faults) or b"")[self._read.get(slot, 0) :]
        whole = data.rpartition(b"\n")[0]
        self._read[slot] = self._read.get(slot, 0) + (len(whole) + 1 if whole else 0)
        for line in whole.splitlines():
            try:
                values = typed(parse_record(line), _END, _MAY_END)
            except (KeyError, ValueError) as error:  # noqa: PERF203  (one damaged line hides no other)
                tell(self.faults, path, error)
            else:
                yield TurnEnd(**values)

    def all_ends(self, slots: Iterable[str]) -> Iterator[TurnEnd]:
        """Yield the end of every turn that these slots recorded, also of runs that had several; not after a look."""
        for slot in slots:
            yield from self._new_ends(slot)

    def _take_end(self, end: TurnEnd) -> None:
        end_before = self.ends.get(end.run_id)
        if end_before is None and end.turn == 0 and end.state is RunState.COMPLETED:
            bisect.insort(self._whole_s, end.seconds)
        if end_before is None or end_before.turn <= end.turn:
            self.ends[end.run_id] = end

    def end_of(self, run_id: str) -> TurnEnd | None:
        """Return the end of the run's newest turn; None if that turn is not over, or if there is none."""
        end = self.ends.get(run_id)
        return end if end is not None and end.turn == self.newest.get(run_id) else None

    def take(self, run_id: str, place: int = 0) -> Turn | None:
        """Claim the run's next turn; None if another slot was faster.

        Call this only for a run that no slot has: it has no turn, or its newest turn is over or was left by a dead
        slot.

        Raises:
            OSError: the file system refused.
        """
        assert self.holder is not None
        number = self.newest.get(run_id, -1) + 1
        now = time.time()
        holder = {name: value for name in Holder.__slots__ if (value := getattr(self.holder, name)) is not None}
        record = {**holder, "place": place, "time": now}
        is_ours = claim(self.sweep.turns / f"{run_id}.{number}", f"{seal(to_json(record))}\n".encode())
        self.newest[run_id] = number
        if not is_ours:
            return None
        self._own_open.add(run_id)
        return Turn(run_id=run_id, number=number, holder=self.holder, place=place, time=now)

    def end(self, turn: Turn, state: RunState, seconds: float | None = None) -> None:
        """Record how a turn of this slot ended; a full disk is no reason to stop."""
        assert self._own is not None
        spent = max(0.0, time.time() - turn.time) if seconds is None else seconds
        end = TurnEnd(
            run_id=turn.run_id, turn=turn.number, uuid=turn.holder.uuid, state=state, time=time.time(), seconds=spent
        )
        self._take_end(end)
        self._own_open.discard(turn.run_id)
        record = {name: getattr(end, name) for name in TurnEnd.__slots__} | {"state": state.value}
        with contextlib.suppress(OSError):
            self._own.append([record])

    def path(self, run_id: str) -> Path:
        """Return the claim of the run's newest turn."""
        return self.sweep.turns / f"{run_id}.{self.newest[run_id]}"

    @property
    def has_own(self) -> bool:
        """True if this slot has a run now."""
        return bool(self._own_open)

    def shows_life(self, run_id: str, silent_s: float) -> bool:
        """Return True unless the heartbeat of a run stayed the same for `silent_s` seconds, by this process's clock.

        The first call only notes the heartbeat. So a slot sees that others are alive without asking Slurm.
        """
        folder, now = self.sweep.run(run_id), time.monotonic()
        try:
            look_anew(folder.folder)
            info = folder.heartbeat.stat()
            sign = info.st_mtime_ns, info.st_size, info.st_ino
        except OSError:
            sign = (0, 0, 0)
        seen, since = self._signs.get(run_id, ((), now))
        if sign != seen:
            self._signs[run_id] = sign, now
            return True
        return now - since < silent_s

    @property
    def median_s(self) -> float | None:
        """Median seconds of the runs that were completed in their first turn, from begin to end; None if none was."""
        if not self._whole_s:
            return None
        return (self._whole_s[len(self._whole_s) // 2] + self._whole_s[(len(self._whole_s) - 1) // 2]) / 2
