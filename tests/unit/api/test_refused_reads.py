"""The file server refuses one open, stat or listing: it costs that file's run at most, and is told by its name."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.launch.grids import submit_grid
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_submissions
from tests.seeds import chosen_seed
from tests.unit.api.damaged_sweeps import Bed, doubled, may_show
from tests.unit.api.tries import READING, VERBS, Tries, bed, expect_nothing_wrong

__all__ = ["bed"]

_SMALL = 300
_ERRORS = (errno.ESTALE, errno.EIO, errno.EACCES)
_OPERATIONS = {"open": (os, "open"), "stat": (os, "stat"), "lstat": (os, "lstat"), "listdir": (os, "listdir"),
               "scandir": (os, "scandir"), "io.open": (io, "open"), "access": (os, "access")}  # fmt: skip


class Case(NamedTuple):
    """One refusal: which verb, which call on which file, and what the system says."""

    verb: str
    operation: str
    file: str
    error: int


def _is_refused(case: Case, operation: str, file: str) -> bool:
    if case.operation == "all below":
        return case.file in Path(file).parts
    return case.file == file and case.operation in (operation, "every call")


class FileServer:
    """Stands before the calls that open or look at files: records those below a folder, and refuses one of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = str(folder)
        self.seen: set[tuple[str, str]] = set()
        self.refused: Case | None = None
        for name, (module, attribute) in _OPERATIONS.items():
            call = self._watched(name, getattr(module, attribute))
            monkeypatch.setattr(module, attribute, call)
            if name == "io.open":
                monkeypatch.setattr(builtins, "open", call)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
            if text.startswith(self._folder):
                file = os.path.relpath(text, self._folder)
                self.seen.add((name, file))
                if self.refused is not None and _is_refused(self.refused, name, file):
                    if name == "access":
                        return False
                    raise OSError(self.refused.error, os.strerror(self.refused.error), text)
            return real(path, *args, **options)

        return call


class Refusals(Tries):
    """Plays verbs while the file server refuses; the verb's choices are the same with and without."""

    def __init__(self, bed: Bed, seed: int, server: FileServer) -> None:
        super().__init__(bed, seed)
        self.server, self._seed, self.kind = server, seed, "refused"
        self._order = random.Random(seed)
        self.clean: dict[str, str] = {}
        self.known = {each.uuid for each in read_submissions(bed.paths)}

    def table(self) -> list[Case]:
        """Every call on every file of every verb, as a clean play of each shows them."""
        found = []
        for verb in VERBS:
            self.server.seen.clear()
            self.clean[verb] = self._give(verb, "clean", "")
            assert self.wrong == []
            calls = sorted(self.server.seen)
            self.bed.restore()
            if verb == "a start after the damage":  # without its spec no element can begin
                calls = [each for each in calls if "specs.jsonl" not in each[1]]
            calls += [("every call", file) for file in {file for _, file in calls}]
            calls += [("all below", self.bed.ids[index]) for index in range(len(self.bed.ids))]
            found += [Case(verb, *call, error) for call in calls for error in _ERRORS if not _is_made(call[1])]
        self._order.shuffle(found)
        return found

    def play_case(self, case: Case) -> None:
        what = f"{self.bed.executor}: {errno.errorcode[case.error]} at {case.operation} of {case.file}: {case.verb}"
        self.counts["tries"] += 1
        try:
            self.server.refused = case
            said = self._give(case.verb, what, case.file)
            self._expect_a_name(what, case, said)
        except (HpcTrainerError, OSError) as error:
            self.counts["refusals"] += 1
            self._expect_a_name(what, case, str(error))
            if case.verb in READING and not _is_the_sweep(case.file):
                self.counts["wrong refusals"] += 1
                self.wrong.append(f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
        except Exception:  # whatever it is: it is what is looked for
            self.counts["tracebacks"] += 1
            self.wrong.append(f"{what}\n{traceback.format_exc()[-1500:]}")
        finally:
            self.server.refused = None
            self._submit_again(what, case)
            self.bed.restore()

    def _give(self, verb: str, what: str, file: str) -> str:
        self.chance.seed(self._seed)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            VERBS[verb](self, what, file)
        return said.getvalue()

    def _expect_a_name(self, what: str, case: Case, said: str) -> None:
        if _words(said) != _words(self.clean[case.verb]) and Path(case.file).name not in said:
            self.counts["untold"] += 1
            self.wrong.append(f"{what}: the file is not named in: {said[-600:]}")

    def _submit_again(self, what: str, case: Case) -> None:
        """What was handed over before the refusal is not handed over once more."""
        if case.verb not in ("submit", "submit --retry-failed", "retry", "top-up"):
            return
        arrays = submit_grid(self.grid, command_line=["x"]).arrays
        new = [each for each in read_submissions(self.bed.paths) if each.uuid not in self.known]
        counts = Counter(run_id for each in new for run_id in each.run_ids)
        twice = [run_id for run_id, count in counts.items() if count > 1]
        if twice or doubled(self.bed, arrays):
            self.counts["doubled jobs"] += 1
            self.wrong.append(f"{what}, then submit: submitted again: {twice or doubled(self.bed, arrays)}")

    def see(self, what: str, file: str, submitted: Sequence[str] = ()) -> None:
        status = read_status(self.bed.paths)
        shown = {run.run_id: run.state for run in status.runs}
        for index, run_id in enumerate(self.bed.ids):
            if self.bed.executor == "local" and index in (6, 7):
                continue  # what only Slurm does
            state = shown.get(run_id)
            if run_id in submitted and state is not None and state.is_active:
                continue
            is_right = state is not None and may_show(index, state, "", "", self.bed.executor)
            if not is_right or (state is RunState.NEW and self.bed.executor == "slurm"):
                self.counts["wrong states"] += 1
                self.wrong.append(f"{what}: run {index} is {state}")
        print("\n".join(status.notes))


def _words(said: str) -> str:
    """Return what was said without numbers, durations (`34s`, `1m06s`) and the width of columns."""
    return re.sub(r"\s+", " ", re.sub(r"(?:\d+[dhms])+\b|[\d.e+-]+|0x\w+", "", said))


def _is_made(file: str) -> bool:
    """True for a file that the verb makes itself, under a name of its own."""
    return bool(re.search(r"\.(tmp|now|lock)$|[0-9a-f]{32}|code/", file))


def _is_the_sweep(file: str) -> bool:
    """Without these nobody knows what runs there are."""
    return file in (".", "sweep", "sweep/specs.jsonl")


@pytest.fixture
def refusals(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> Refusals:
    server = FileServer(bed.paths.folder.parent, monkeypatch)
    return Refusals(bed, chosen_seed(), server)


@pytest.mark.few(1)
def test_a_sample_of_refusals(refusals: Refusals) -> None:
    for case in refusals.table()[: _SMALL // 2]:
        refusals.play_case(case)
    expect_nothing_wrong(refusals)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_refusal_under_every_verb(refusals: Refusals) -> None:
    for case in refusals.table():
        refusals.play_case(case)
    expect_nothing_wrong(refusals)
