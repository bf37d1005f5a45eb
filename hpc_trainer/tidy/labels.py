"""Tags and the note of a sweep, in its `labels.json`; and the name of a sweep, which `rename` changes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_trainer.config import script_words as words
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError, valid
from hpc_trainer.operate.find import prepare_to_write
from hpc_trainer.operate.show import Labels
from hpc_trainer.record.files import rename, write_json
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import file_lock, submit_lock
from hpc_trainer.record.reading import Faults, is_there, read_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.trust import check_place, is_ours

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,49}")
_MOST_TAGS = 50
_LONGEST_NOTE = 1000
# `tag` and `note` take milliseconds.
_WAIT_S = 10.0


def read_labels(sweep: SweepPaths) -> Labels:
    """Return the labels of a sweep; empty ones if it has none, or if others may have changed the file."""
    try:
        record = (read_json(sweep.labels, Faults()) if is_ours(sweep.labels, Faults()) else None) or {}
    except HpcTrainerError:
        return Labels()
    tags, note = record.get("tags"), record.get("note")
    listed = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Labels(tags=tuple(sorted(listed)), note=note if isinstance(note, str) else "")


def change_tags(sweep: SweepPaths, add: Sequence[str], remove: Sequence[str] = ()) -> Labels:
    """Add and remove tags of a sweep, and return its labels.

    Raises:
        ConfigError: a tag to add is not legal, there are too many tags, or a tag to remove is not there.
    """
    wrong = next((tag for tag in add if not _TAG.fullmatch(tag)), None)
    if wrong is not None:
        near = re.sub(r"[^A-Za-z0-9._:/-]+", "-", wrong).strip("-._:/")[:50] or "best"
        raise ConfigError(
            f"the tag {wrong!r} must be a letter or digit and then letters, digits and ._:/- only, 50 at most. "
            f"Use {near}."
        )
    with _changing(sweep):
        labels = read_labels(sweep)
        missing = next((tag for tag in remove if tag not in labels.tags), None)
        if missing is not None:
            raise ConfigError(f"{sweep.name} has no tag {missing}. {valid(missing, labels.tags)}")
        tags = sorted({*labels.tags, *add} - {*remove})
        if len(tags) > _MOST_TAGS:
            raise ConfigError(f"{sweep.name} would have {len(tags)} tags, and {_MOST_TAGS} is the most. Remove some.")
        labels = dataclasses.replace(labels, tags=tuple(tags))
        _write(sweep, labels)
    return labels


def change_note(sweep: SweepPaths, note: str) -> Labels:
    """Set the note of a sweep, "" for none, and return its labels.

    Raises:
        ConfigError: the note is too long.
    """
    with contextlib.suppress(UnicodeError):  # where the locale is not UTF-8, Python escapes other letters of arguments
        note = note.encode(errors="surrogateescape").decode(errors="replace")
    if len(note) > _LONGEST_NOTE:
        raise ConfigError(f"the note has {len(note)} characters, and {_LONGEST_NOTE} is the most. Shorten it.")
    with _changing(sweep):
        labels = dataclasses.replace(read_labels(sweep), note=note)
        _write(sweep, labels)
    return labels


def label(sweep: SweepPaths, add: Sequence[str] = (), remove: Sequence[str] = (), note: str | None = None) -> Labels:
    """Change the tags and the note of a sweep, and return its labels; without changes only return them.

    Raises:
        ConfigError: as `change_tags` and `change_note`.
    """
    if note is not None:
        change_note(sweep, note)
    return change_tags(sweep, add, remove) if add or remove else read_labels(sweep)


@contextlib.contextmanager
def _changing(sweep: SweepPaths) -> Iterator[None]:
    _check_exists(sweep)
    prepare_to_write(sweep)
    with file_lock(sweep.folder / "labels.lock", "tag or note", wait_s=_WAIT_S):
        yield


def _write(sweep: SweepPaths, labels: Labels) -> None:
    write_json(sweep.labels, {"tags": list(labels.tags), "note": labels.note})


def _check_exists(sweep: SweepPaths) -> None:
    if not sweep.exists:
        read_status(sweep)  # raises, with the names that are there
        raise RunStateError(f"{sweep.folder} holds no sweep.")


# Sweeps at rest: nothing of them waits or works, and no submit can begin meanwhile.

_SHOWN = 3


@contextlib.contextmanager
def at_rest(sweep: SweepPaths, verb: str, run_ids: Sequence[str] | None = None) -> Iterator[SweepStatus]:
    """Hold the sweep's lock and yield its status, if the sweep, or these runs of it, neither wait nor work.

    Raises:
        RunStateError: there is no such sweep, or a run waits, works, or may do so.
        SubmitError: another command holds the lock.
    """
    _check_exists(sweep)
    check_place(sweep.folder)
    prepare_to_write(sweep)
    with submit_lock(sweep):
        status = read_status(sweep)
        check_rests(status, verb, run_ids)
        yield status


def check_rests(status: SweepStatus, verb: str, run_ids: Sequence[str] | None = None) -> None:
    """Check that nothing of the sweep, or of these runs, waits or works. Raises RunStateError as `at_rest`."""
    named = [*status.specs] if run_ids is None else run_ids
    runs = [run for run in status.open_among(named) if run.state.is_active or run.rivals]
    if runs:
        listed = ", ".join(f"{run.run_id} ({run.state.value})" for run in runs[:_SHOWN])
        more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
        raise RunStateError(
            f"{verb} is refused while something of {status.sweep.name} waits or works: {listed}{more}. "
            f"{_advice(status, runs)}"
        )
    hidden = status.lost.unseen or (f"job {', '.join(status.lost.arrays)}" if status.lost.arrays else None)
    if hidden is not None:
        raise RunStateError(f"{verb} is refused: {status.sweep.name} may have jobs that none of its files names: "
                            f"{hidden}. hpc-trainer status {status.sweep.name} says more.")  # fmt: skip
    if run_ids is None and status.tending_job is not None:
        raise RunStateError(f"{verb} is refused: the top-up job {status.tending_job} of {status.sweep.name} is in the "
                            f"queue. Cancel it first: scancel {status.tending_job}")  # fmt: skip


def _advice(status: SweepStatus, runs: Sequence[RunStatus]) -> str:
    if all(run.state is RunState.UNKNOWN for run in runs):
        return f"Ask again later, or see: hpc-trainer why {runs[0].run_id}"
    return f"Wait for its end, or cancel first: hpc-trainer cancel {status.sweep.name}"


def rename_sweep(sweep: SweepPaths, name: str) -> tuple[SweepPaths, str | None]:
    """Give a sweep another name; its old name stays valid, by a symbolic link beside it.

    Paths that other runs were frozen with, such as those of `init_from` and `--extend`, go through the link.

    Returns:
        The sweep under its new name, and a note for the user if there is one.

    Raises:
        ConfigError: the name is not legal.
        RunStateError: the name is taken, or a run of the sweep waits or works.
    """
    problem = next(iter(words.word_problem("the new name", name, words.NAME)), None)
    if problem is not None:
        raise ConfigError(problem)
    new = SweepPaths(sweep.folder.with_name(name))
    if new.folder == sweep.folder:
        raise ConfigError(f"{name} is its name already. Give another one.")
    with at_rest(sweep, "rename"):
        _take_name(sweep, new)
        record = read_json(sweep.sweep, Faults())
        rename(sweep.folder, new.folder)
        note = _leave_link(sweep.folder, name)
        if record is not None:
            write_json(new.sweep, {**record, "sweep": name})
        (new.folder / sweep.lock.name).unlink(missing_ok=True)  # where there is no link, the lock would stay
    return new, note


def _take_name(sweep: SweepPaths, new: SweepPaths) -> None:
    if new.folder.is_symlink() and new.folder.resolve() == sweep.folder.resolve():
        new.folder.unlink()  # an earlier name of this very sweep
    elif is_there(new.folder):
        raise RunStateError(f"{new.folder} exists already. Give another name, or remove that one: hpc-trainer rm "
                            f"{new.name}")  # fmt: skip


def _leave_link(old: Path, name: str) -> str | None:
    try:
        old.symlink_to(name)
    except OSError as error:
        return (f"the name {old.name} no longer leads to it ({error.strerror or error}); runs that were frozen with "
                f"paths in {old} do not find them any more.")  # fmt: skip
    return None
