"""Lookup of sweeps and runs by the names that a user types, and these names for shell completion."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpc_trainer.errors import RunStateError, UntrustedFileError, did_you_mean
from hpc_trainer.record.files import set_umask
from hpc_trainer.record.known_runs import known_by_files
from hpc_trainer.record.layout import (
    OTHER_FOLDER,
    SWEEP_FILES,
    TRASH,
    SweepPaths,
    default_runs_dir,
    is_run_id,
    no_sweeps_words,
    sweep_folder,
    sweep_folders,
)
from hpc_trainer.record.reading import Faults, exists, read_json
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.submissions import read_removed_sweep
from hpc_trainer.record.trust import check_place, check_trusted


def configured_runs_dir(option: Path | None = None) -> Path:
    """Return the folder of sweeps: --runs-dir, else $HPC_TRAINER_RUNS, the project file, the user's file, or ./runs."""
    if option is not None:
        return option
    from hpc_trainer.config.compose.own_files import own_defaults

    own = None if os.environ.get("HPC_TRAINER_RUNS") else own_defaults().get("paths.runs_dir")
    return Path(str(own)).expanduser() if own else default_runs_dir()


def list_sweeps(runs_dir: Path) -> list[SweepPaths]:
    """Return the sweeps of the user and of root under `runs_dir`, the latest submitted first.

    A team may share the folder of sweeps. Reading a colleague's sweep would be refused, so a command without a sweep's
    name never means such a sweep.
    """
    changes = {path: _newest_change(path) for path in sweep_folders(runs_dir) if _is_ours(path)}
    times = {folder: change for folder, change in changes.items() if change is not None}
    return [SweepPaths(folder) for folder in sorted(times, key=lambda folder: times[folder], reverse=True)]


def _is_ours(folder: Path) -> bool:
    """Return True if a readable sweep belongs to this user or to root, as sweeps of the site do."""
    sweep = SweepPaths(folder)
    try:
        owners = {path.stat().st_uid for path in sweep.signs}
    except OSError:  # a file that cannot be seen just now: the folder's owner decides
        owners = set()
    try:
        return sweep.exists and {folder.stat().st_uid, *owners} <= {os.getuid(), 0}
    except OSError:
        return False


def _newest_change(folder: Path) -> float | None:
    """Return when the newest of a sweep's own files was written; None if the files have just disappeared."""
    times = []
    for path in SweepPaths(folder).signs:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def prepare_to_write(sweep: SweepPaths, run_ids: Iterable[str] = (), *, page: Path | None = None) -> None:
    """Set the umask of a sweep's files; refuse to write where others may write, because a link there may lead anywhere.

    Args:
        sweep: the sweep whose files are written.
        run_ids: the runs in whose folders files are written.
        page: the only file that is written, an absolute path; nothing is refused if it is outside the sweep's folder.

    Raises:
        UntrustedFileError: others may write the sweep's folder, the folder of one of the runs, or that of the page.
    """
    if page is None or page.parent.resolve().is_relative_to(sweep.folder.resolve()):
        check_place(sweep.folder)
        folders = (sweep.run(run_id).place for run_id in run_ids) if page is None else (os.fspath(page.parent),)
        for folder in folders:
            if os.path.lexists(folder):
                check_trusted(Path(folder))
    set_umask(sweep.is_group_readable)


def find_sweep(runs_dir: Path, name: str | None) -> SweepPaths:
    """Return the sweep of this name, or the newest sweep if `name` is None.

    Raises:
        RunStateError: there is no sweep.
    """
    if name is not None:
        as_path = Path(name)
        if SweepPaths(as_path).exists:
            as_path = as_path.absolute()
            return SweepPaths(sweep_folder(as_path.parent, as_path.name))
        return SweepPaths(sweep_folder(runs_dir.absolute(), name))
    sweeps = list_sweeps(runs_dir)
    if not sweeps:
        raise RunStateError(nothing_of_yours(runs_dir))
    return SweepPaths(sweeps[0].folder.absolute())


def nothing_of_yours(runs_dir: Path) -> str:
    """Return the message for a folder without sweeps of the user: the folder, why it has none, how to name another."""
    others = sum((folder / "specs.jsonl").exists() for folder in sweep_folders(runs_dir) if os.access(folder, os.X_OK))
    whose = f" of yours, and {others} of others" if others else ""
    return f"{no_sweeps_words(runs_dir, whose)} {OTHER_FOLDER}"


def existing_sweep(runs_dir: Path, name: str) -> SweepPaths:
    """Return the sweep of this name.

    Raises:
        RunStateError: there is none; the message has the nearest names.
    """
    sweep = find_sweep(runs_dir, name)
    if not sweep.exists:
        read_status(sweep)  # raises: it knows the names, and removed sweeps
    return sweep


def select(
    runs_dir: Path, names: Sequence[str], sweep: str | None, *, is_look: bool = False
) -> tuple[SweepStatus, list[str]]:
    """Return the sweep's status and the ids of the runs that `names` mean.

    A sweep's name means all its runs; other names are run ids, their beginnings or their ends. Without `sweep`, the
    newest sweep is searched first, then the others; SWEEP RUN.. and SWEEP/RUN name the sweep. `is_look` is passed to
    `read_status`.

    Raises:
        RunStateError: a name matches nothing.
    """
    names, sweep = in_one_sweep(runs_dir, names, sweep)
    if sweep is not None or not names:
        status = read_status(find_sweep(runs_dir, sweep), is_look=is_look)
        return status, find_runs(status, names)
    for candidate in list_sweeps(runs_dir):
        # The specs have the names: the scheduler need not be asked.
        if all(any(fits(run_id, name) for run_id in _run_ids(candidate)) for name in names):
            status = read_status(SweepPaths(candidate.folder.absolute()), is_look=is_look)
            return status, find_runs(status, names)
    removed = next((name for name in names if read_removed_sweep(runs_dir / name) is not None), None)
    status = read_status(find_sweep(runs_dir, removed), is_look=is_look)  # which raises for a removed sweep
    try:
        return status, find_runs(status, names)
    except RunStateError as error:
        sweeps = [{*_run_ids(other)} for other in list_sweeps(runs_dir)]
        if all(any(fits(run_id, name) for run_ids in sweeps for run_id in run_ids) for name in names):
            raise RunStateError(_SEVERAL.format(names=", ".join(names))) from None
        # The user may have meant a sweep.
        sweep_names = [other.name for other in list_sweeps(runs_dir)]
        meant = did_you_mean(names[0], sweep_names)
        shown = ", ".join(sweep_names[:_SWEEPS_SHOWN])
        raise RunStateError(f"there is no such sweep, and {error} {meant}Sweeps: {shown}.") from None


_SWEEPS_SHOWN = 10
_SEVERAL = "{names} are runs of several sweeps: name runs of one sweep at a time."


def in_one_sweep(runs_dir: Path, names: Sequence[str], sweep: str | None) -> tuple[Sequence[str], str | None]:
    """Split SWEEP, SWEEP RUN.. or SWEEP/RUN into run names and an existing sweep; return other names unchanged.

    SWEEP alone leaves no run names: it means all its runs.

    Raises:
        RunStateError: two names are sweeps (the second may match runs of the first), or runs are of several sweeps.
    """
    if sweep is not None or not names:
        return names, sweep
    if _is_sweep(runs_dir / names[0]):
        also = next((name for name in names[1:] if name and _is_sweep(runs_dir / name)), None)
        if also is not None:
            raise RunStateError(f"{names[0]} and {also} are sweeps: name one at a time.")
        return names[1:], names[0]
    pairs = [name.partition("/") for name in names]
    sweeps = {first for first, _, _ in pairs}
    if not all(run and "/" not in run for _, _, run in pairs) or not all(_is_sweep(runs_dir / name) for name in sweeps):
        return names, sweep
    if len(sweeps) > 1:
        raise RunStateError(_SEVERAL.format(names=", ".join(names)))
    return [run for _, _, run in pairs], sweeps.pop()


def names_runs(sweep: SweepPaths, names: Sequence[str], within: str | None = None) -> bool:
    """Return True if the names given to `select` mean runs, even if these are all runs of the sweep."""
    return bool(in_one_sweep(sweep.folder.parent, names, within)[0])


def elsewhere_too(status: SweepStatus, run_ids: Iterable[str], names: Sequence[str], sweep: str | None) -> str | None:
    """Return a remark if other sweeps have runs of these ids and the names do not say which sweep; else None."""
    names, sweep = in_one_sweep(status.sweep.folder.parent, names, sweep)
    if sweep is not None or not names:
        return None
    folder, wanted = status.sweep.folder, set(run_ids)
    others = [
        other.name for other in list_sweeps(folder.parent) if other.name != folder.name and wanted & {*_run_ids(other)}
    ]
    if not others:
        return None
    taken = f"{', '.join(names)} is the run of sweep {folder.name}"
    return f"{taken}; {', '.join(others)} has a run of this name too: write {others[-1]}/{names[0]} for that one."


def check_one_each(status: SweepStatus, names: Sequence[str], sweep: str | None) -> None:
    """Check before an irreversible action that each name given to `select` is the sweep's or matches one run.

    Raises:
        RunStateError: a name matches several runs.
    """
    for name in in_one_sweep(status.sweep.folder.parent, names, sweep)[0]:
        run_ids = find_runs(status, [name])
        if len(run_ids) > 1:
            listed = ", ".join(run_ids[:5]) + (" .." if len(run_ids) > 5 else "")
            of = f"{len(run_ids)} runs of {status.sweep.name}: {listed}"
            raise RunStateError(f"{name} matches {of}. Write more of the id, or name the sweep.")


def _is_sweep(folder: Path) -> bool:
    """Return True if the folder is a sweep; False if it cannot be seen just now, as most names are runs."""
    return bool(exists(folder, Faults())) and SweepPaths(folder).exists


def _run_ids(sweep: SweepPaths) -> Iterable[str]:
    """Return the run ids of a sweep; none if others may have changed its files, which is an error once it is named."""
    try:
        return known_by_files(sweep)[1]
    except UntrustedFileError:
        return ()


def fits(run_id: str, name: str) -> bool:
    """Return True if `name` is the run's id, its beginning, or its end."""
    return bool(name) and (run_id.startswith(name) or run_id.endswith(name))


def find_runs(status: SweepStatus, names: Iterable[str]) -> list[str]:
    """Return the ids that equal, or else begin or end with, one of `names`; all ids if `names` is empty.

    Raises:
        RunStateError: a name matches no run.
    """
    wanted = list(names)
    if not wanted:
        return [*status.specs]
    run_ids: dict[str, None] = {}
    for name in wanted:
        chosen = [name] if name in status.specs else [run_id for run_id in status.specs if fits(run_id, name)]
        if not chosen:
            listed = ", ".join([*status.specs][:10]) or "none"
            raise RunStateError(f"no run of {status.sweep.name} is named {name!r}. Runs: {listed}.")
        run_ids.update(dict.fromkeys(chosen))
    return [*run_ids]


_MOST_NAMES = 20_000
"""Number of runs after which older sweeps are not listed."""
_RUN_FOLDER = re.compile(r".+-[0-9a-f]{10}")


def sweep_names(runs_dir: Path) -> list[str]:
    """Return the names of the sweeps, the latest changed first."""
    times: dict[str, float] = {}
    with contextlib.suppress(OSError), os.scandir(runs_dir) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                is_earlier_name = entry.is_symlink() and sweep_folder(runs_dir, entry.name).name != entry.name
                if is_earlier_name or entry.name.startswith(TRASH):
                    continue
                if is_run_id(entry.name) and any(os.path.lexists(f"{entry.path}/{name}") for name in SWEEP_FILES):
                    times[entry.name] = entry.stat().st_mtime
    return sorted(times, key=lambda name: times[name], reverse=True)


def run_names(runs_dir: Path, sweep: str | None, prefix: str) -> list[str]:
    """Return run ids with this prefix, of one sweep or of all; an empty prefix lists the newest sweep only."""
    sweeps = [sweep] if sweep is not None else sweep_names(runs_dir)
    names: dict[str, None] = {}
    num_seen = 0
    for sweep_name in sweeps if prefix else sweeps[:1]:
        for name in _runs_of(SweepPaths(runs_dir / sweep_name)):
            num_seen += 1
            if name.startswith(prefix):
                names[name] = None
        if num_seen > _MOST_NAMES:
            break
    return [*names]


def _runs_of(paths: SweepPaths) -> Iterator[str]:
    """Yield runs of the newest submit and runs with a folder; runs of older submits that never began are missing."""
    newest = (read_json(paths.sweep) or {}).get("run_ids")
    listed = newest if isinstance(newest, list) else ()
    yield from (name for name in listed if isinstance(name, str) and is_run_id(name))
    with contextlib.suppress(OSError), os.scandir(paths.folder) as entries:
        yield from (entry.name for entry in entries if _RUN_FOLDER.fullmatch(entry.name) and is_run_id(entry.name))
