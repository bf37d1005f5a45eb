"""The rules of `clean`, and the removal of runs and sweeps by `rm`: files are listed first and deleted afterwards.

Kept always: the newest complete checkpoint of each run, the best one by `checkpoint.keep_best`, pinned ones, those
from which a longer run may begin (`--extend`), and those that a frozen run of any sweep in the folder of sweeps names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.output import best_is_max, kept_best
from hpc_trainer.config.user_files import open_given, read_given
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError
from hpc_trainer.launch.extend import same_until
from hpc_trainer.launch.frozen_code.archive import shared_code
from hpc_trainer.record.chain import followers_of, waiting_for
from hpc_trainer.record.checkpoint_folders import MANIFEST, Retention, committed, discard, is_pinned, manifest_tail
from hpc_trainer.record.files import make_folder, rename
from hpc_trainer.record.layout import TRASH, RunPaths, SweepPaths
from hpc_trainer.record.metrics import scores_in
from hpc_trainer.record.reading import Faults, is_there, names_in, read_json
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.record.states import DONE, RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.submissions import latest_of_each_run, write_removed, write_removed_sweep
from hpc_trainer.tidy.walk import Size, size_of

RULES = {
    "checkpoints": "old checkpoints, beyond the newest and the best",
    "failed": "all checkpoints of failed runs",
    "code": "frozen code and compile caches of a sweep that has ended",
}
"""Rules of `clean`, each with what it deletes."""
_LEFTOVER = re.compile(r"step-\d{8,}\.tmp-\d+|\.trash-.*")
_PIECE = 1 << 22
_MOST_STEPS = 5_000_000
_LEFT_ALONE = (RunState.NEW, RunState.GONE, RunState.PAUSED)  # a search may go on with a paused run


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Folder or file that a rule of `clean` deletes."""

    path: Path
    rule: str
    run_id: str | None = None
    size: Size = field(default_factory=Size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Path in a sweep that a frozen run names: its weights, its first checkpoint, its old data."""

    path: Path
    sweep: str
    run_id: str
    is_done: bool
    """True if the run that names the path is complete."""


# Paths that frozen runs name.


class Needs:
    """Paths under a folder of sweeps that frozen runs of its sweeps name, whoever owns these.

    Every text in `specs.jsonl` that begins with the folder of sweeps counts, so that keys of later versions count too.

    Args:
        runs_dir: the folder of sweeps.
    """

    def __init__(self, runs_dir: Path) -> None:
        places = {os.path.abspath(runs_dir), os.path.realpath(runs_dir)}  # noqa: PTH100
        # As JSON has them: with other letters escaped, or not.
        texts = {json.dumps(f"{place}/", ensure_ascii=escaped)[:-1] for place in places for escaped in (True, False)}
        heads = tuple(text.encode(errors="surrogateescape") for text in texts)
        self._at: dict[str, list[Need]] = {}
        self._below: dict[str, list[Need]] = {}
        """Needs by every folder above their path."""
        for name in names_in(runs_dir) or ():
            sweep = SweepPaths(runs_dir / name)
            if name.startswith(TRASH) or sweep.folder.is_symlink():
                continue
            for need in _needs_of(sweep, heads):
                self._at.setdefault(str(need.path), []).append(need)
                for above in need.path.parents:
                    self._below.setdefault(str(above), []).append(need)

    def of(self, path: Path) -> list[Need]:
        """Return the needs whose path is this one, is in it, or contains it."""
        place = Path(os.path.realpath(path))
        above = (need for folder in place.parents for need in self._at.get(str(folder), ()))
        return [*self._at.get(str(place), ()), *self._below.get(str(place), ()), *above]


def _needs_of(sweep: SweepPaths, heads: tuple[bytes, ...]) -> Iterator[Need]:
    named = re.compile(rb"(?<!\\)(?:%s)(?:[^\"\\]|\\.)*\"" % b"|".join(map(re.escape, heads)))
    try:
        with open_given(sweep.specs) as file:  # a colleague's may be a pipe
            for line in file:  # the lines of 100,000 runs take 1 GB
                texts = dict.fromkeys(named.findall(line))
                run_id = re.search(rb'"run_id": ?"([A-Za-z0-9._-]+)"', line) if texts else None
                if run_id is None:
                    continue
                name = run_id[1].decode()
                is_done = os.path.lexists(sweep.run(name).marker(DONE))
                for text in texts:
                    path = Path(os.path.realpath(json.loads(text)))
                    yield Need(path=path, sweep=sweep.name, run_id=name, is_done=is_done)
    except OSError:  # no sweep, or a colleague's that cannot be read
        return


# Rules of `clean`.


def find_items(status: SweepStatus, rules: Sequence[str], needs: Needs) -> tuple[list[Item], list[str]]:
    """Return the files and folders of a sweep that these rules delete, and notes on runs of which nothing is deleted.

    The sweep may be at work: runs that wait or work are left alone.
    """
    items: list[Item] = []
    notes: list[str] = []
    limits = _Limits()
    for run in status.runs if {"checkpoints", "failed"} & {*rules} else ():
        if run.state.is_active or run.rivals or run.state in _LEFT_ALONE or run.spec.is_lost:
            continue
        paths = status.sweep.run(run.run_id)
        if run.state.has_failed and "failed" in rules:
            deleted, rule = [path for _, path in committed(paths.checkpoints) if not is_pinned(path)], "failed"
        elif "checkpoints" in rules:
            deleted, rule = _old_checkpoints(run, paths, limits, notes), "checkpoints"
        else:
            continue
        deleted = [path for path in deleted if not needs.of(path)]
        names = names_in(paths.checkpoints) or ()
        leftovers = [paths.checkpoints / name for name in names if _LEFTOVER.fullmatch(name)]
        items += [_item(path, rule, run.run_id) for path in (*deleted, *leftovers)]
    if "code" in rules:
        items += _code_of(status, notes)
    return items, notes


def _item(path: Path, rule: str, run_id: str | None = None) -> Item:
    return Item(path=path, rule=rule, run_id=run_id, size=size_of(path))


def _old_checkpoints(run: RunStatus, paths: RunPaths, limits: _Limits, notes: list[str]) -> list[Path]:
    """Return the checkpoints that are neither the newest whole one nor the best, and that no longer run needs."""
    checkpoints = committed(paths.checkpoints)
    if len(checkpoints) < 2:
        return []
    newest = next(((step, path) for step, path in checkpoints if is_whole(path)), None)
    if newest is None:
        notes.append(f"{run.run_id}: no checkpoint is whole; all are kept for inspection.")
        return []
    kept = {newest[0], best_step(run.spec, paths)}
    for limit in limits.of(run.spec):
        kept.add(next((step for step, _ in checkpoints if step <= limit), None))
    older = [(step, path) for step, path in checkpoints if step < newest[0]]  # a damaged newer one is evidence
    return [path for step, path in older if step not in kept and not is_pinned(path)]


def best_step(spec: RunSpec, paths: RunPaths) -> int | None:
    """Return the step of the run's best checkpoint by `checkpoint.keep_best`; None without that key or a score."""
    how = kept_best(spec.config.get("checkpoint", {}))
    if how.keep_best is None:
        return None
    scores = scores_in(paths.metrics, how.keep_best)
    steps = [step for step, _ in committed(paths.checkpoints)]
    return Retention(best_is_max=best_is_max(how)).best({step: scores[step] for step in steps if step in scores})


class _Limits:
    """Last steps of a run from which a longer run of the same schedule may begin, computed once for each schedule."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, spec: RunSpec) -> tuple[int, ...]:
        """Return the last step up to which longer runs of several lengths have the learning rate of this run."""
        if not 0 < spec.num_steps <= _MOST_STEPS or spec.is_own_loop:
            return ()
        key = repr([spec.config.get(name) for name in ("train", "schedule", "optim", "parallel")])
        if key not in self._known:
            self._known[key] = self._compute(spec)
        return self._known[key]

    def _compute(self, spec: RunSpec) -> tuple[int, ...]:
        try:
            config = spec.typed()
        except HpcTrainerError:  # of another version: nobody extends it
            return ()
        limits = []
        for longer in (spec.num_steps + 1, 2 * spec.num_steps, 10 * spec.num_steps):
            config.train.num_steps = longer
            limits.append(same_until(config, spec.num_steps)[0])
        return tuple(dict.fromkeys(limits))


def is_whole(checkpoint: Path, *, reads: bool = False) -> bool:
    """Return True if a checkpoint has all files of its manifest, with their sizes; with `reads` also their bytes."""
    try:
        data = read_given(checkpoint / MANIFEST)
        if not data.endswith(manifest_tail(data.rpartition(b',"checksum":"')[0])):
            return False
        for record in json.loads(data)["files"]:
            path = checkpoint / record["name"]
            if path.stat().st_size != record["size"] or (reads and _crc32(path) != record["crc32"]):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _crc32(path: Path) -> int:
    checksum = 0
    with open_given(path) as file:
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _code_of(status: SweepStatus, notes: list[str]) -> list[Item]:
    sweep = status.sweep
    runs = status.open_runs.values()
    going = [run for run in runs if run.state.is_active or run.state.needs_submit or run.state is RunState.PAUSED]
    if going:
        notes.append(
            f"the frozen code stays: {len(going)} run(s) of {sweep.name} have not ended "
            f"({going[0].run_id} is {going[0].state.value})."
        )
        return []
    paths = [sweep.code / name for name in names_in(sweep.code) or ()]
    paths += [sweep.compile_cache] if is_there(sweep.compile_cache) else []
    items = [_item(path, "code") for path in paths]
    # A file whose other names are those of other sweeps takes no room of this one.
    return [replace(item, size=Size(0, 1)) if _is_shared(item.path) else item for item in items]


def _is_shared(archive: Path) -> bool:
    try:
        return archive.is_file() and archive.stat().st_nlink > 2  # its own name, and the one in the shared folder
    except OSError:
        return False


def drop_unused_code(runs_dir: Path) -> None:
    """Delete shared archives that no sweep of this user has any more. A submit that needs one writes it again."""
    for kind in names_in(shared_code(runs_dir)) or ():
        folder = shared_code(runs_dir) / kind
        for name in names_in(folder) or ():
            with contextlib.suppress(OSError):
                if (folder / name).lstat().st_nlink == 1:
                    (folder / name).unlink()


def delete_items(items: Sequence[Item], tell: Callable[[str], None]) -> list[Item]:
    """Delete these items and return those that are gone. The caller holds the sweep's lock.

    Before a run's old checkpoints are deleted, every byte of its newest one is read; if it is damaged, all stay.

    Args:
        items: result of `find_items` under the same lock.
        tell: called with each reason why a file or folder stays.
    """
    deleted, sound = [], dict[str | None, bool]()
    for item in items:
        if item.rule == "checkpoints" and item.run_id not in sound:
            newest = next((path for _, path in committed(item.path.parent) if is_whole(path)), None)
            sound[item.run_id] = newest is None or is_whole(newest, reads=True)
            if not sound[item.run_id]:
                tell(f"{item.run_id}: {newest} is damaged, so the older checkpoints stay.")
        if item.rule == "checkpoints" and not sound[item.run_id]:
            continue
        try:
            _delete(item.path)
        except OSError as error:
            tell(f"{item.path} stays: {error.strerror or error}.")
        else:
            deleted.append(item)
    return deleted


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        if path.name.startswith(TRASH):
            shutil.rmtree(path, ignore_errors=True)
        else:
            discard(path)
    else:
        path.unlink(missing_ok=True)


# `rm`: a tombstone first, then the folder under a name that no reader takes for a run, then its files.


def check_ours(status: SweepStatus) -> None:
    """Check that a folder is a sweep, and not another program's with a file of the same name.

    Raises:
        RunStateError: no run of it is known, and no submit has written its sweep.json or search.json.
    """
    sweep = status.sweep
    written = ((sweep.sweep, "run_ids"), (sweep.search, "space"))
    if not status.specs and not any(key in (read_json(path, Faults()) or {}) for path, key in written):
        raise RunStateError(
            f"{sweep.folder} has no run, and no sweep.json or search.json of hpc-trainer: nothing of it is "
            f"removed. If nobody needs it: rm -r {shlex.quote(str(sweep.folder))}"
        )


def check_not_needed(folders: Sequence[Path], sweep: SweepPaths, needs: Needs, run_ids: Sequence[str]) -> None:
    """Raise if a run that stays and is not complete starts from files in these folders, or waits for these runs.

    Raises:
        RunStateError: there is such a run; the message names it.
    """
    removed = {(sweep.name, run_id) for run_id in run_ids}
    for folder in folders:
        for need in needs.of(folder):
            if not need.is_done and (need.sweep, need.run_id) not in removed:
                raise RunStateError(
                    f"{need.sweep}/{need.run_id} is not complete and begins with {need.path}. Wait for its end, or "
                    f"remove that run first: hpc-trainer rm {need.sweep}/{need.run_id}"
                )
    for follower in followers_of(sweep):
        status = read_status(follower, is_look=True)
        waiting = [run for run_id in run_ids for run in waiting_for(status, sweep, run_id)]
        if waiting and follower.folder != sweep.folder:
            raise RunStateError(
                f"{follower.name}/{waiting[0].run_id} waits for {sweep.name} (`after`). Wait for its end, or cancel it "
                f"first: hpc-trainer cancel {follower.name}"
            )


def remove_runs(status: SweepStatus, run_ids: Sequence[str]) -> None:
    """Remove the folders of these runs, each with a tombstone. The caller holds the sweep's lock.

    After a kill in between, the run counts as removed, and the same command deletes its remaining files.
    """
    sweep, latest = status.sweep, latest_of_each_run(status.ledger.submissions)
    sweep.finished.unlink(missing_ok=True)  # it may say that they are complete; the next look writes it again
    for run_id in run_ids:
        write_removed(sweep, run_id, latest[run_id][0].uuid if run_id in latest else "")
        folder = sweep.run(run_id).folder
        if is_there(folder):
            rename(folder, sweep.folder / f"{TRASH}{time.time_ns()}-{run_id}.rm")
    for name in names_in(sweep.folder) or ():
        if name.startswith(TRASH):
            shutil.rmtree(sweep.folder / name, ignore_errors=True)
    for path in (sweep.walk, sweep.summaries):
        path.unlink(missing_ok=True)


def remove_sweep(sweep: SweepPaths) -> None:
    """Remove a sweep's folder and leave one with its tombstone. The caller holds the lock, which is deleted too.

    Earlier names of the sweep, which `rename` left as links, are removed first.
    """
    runs_dir = sweep.folder.parent
    for name in names_in(runs_dir) or ():
        path = runs_dir / name
        if path.is_symlink() and str(path.readlink()) == sweep.name:
            path.unlink()
    trash = sweep.folder.with_name(f"{TRASH}{time.time_ns()}-{sweep.name}.rm")
    rename(sweep.folder, trash)
    make_folder(sweep.folder)
    write_removed_sweep(sweep.folder)
    shutil.rmtree(trash, ignore_errors=True)
    drop_unused_code(runs_dir)
    for name in names_in(runs_dir) or ():  # what a killed `rm` left
        if name.startswith(TRASH) and name.endswith(".rm") and (runs_dir / name).lstat().st_uid == os.getuid():
            shutil.rmtree(runs_dir / name, ignore_errors=True)


def checked_rules(chosen: Mapping[str, bool], *, is_done: bool) -> list[str]:
    """Return the chosen rules; all of them for a look without a choice.

    Raises:
        ConfigError: something would be deleted without a choice.
    """
    rules = [rule for rule in RULES if chosen[rule]]
    if not rules and is_done:
        raise ConfigError(
            f"clean --yes deletes what you choose: {', '.join(f'--{rule}' for rule in RULES)}. Without --yes it shows "
            "what each of them would delete."
        )
    return rules or [*RULES]


def totals(items: Sequence[Item]) -> dict[str, Any]:
    """Return rule -> number of items, bytes and files, in the order of `RULES`."""
    return {
        rule: {
            "items": sum(item.rule == rule for item in items),
            "bytes": sum(item.size.num_bytes for item in items if item.rule == rule),
            "files": sum(item.size.inodes for item in items if item.rule == rule),
        }
        for rule in RULES
    }
