"""From the names that a person types to sweeps and runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_trainer.errors import RunStateError, UntrustedFileError, did_you_mean
from hpc_trainer.runs.files import check_place, check_trusted
from hpc_trainer.runs.layout import OTHER_FOLDER, SweepPaths, default_runs_dir
from hpc_trainer.runs.modes import set_umask
from hpc_trainer.runs.reading import Faults, exists
from hpc_trainer.state.lost import known_by_files
from hpc_trainer.state.status import SweepStatus, read_status


def configured_runs_dir() -> Path:
    """$HPC_TRAINER_RUNS, else the project file, else the person's own file, else ./runs."""
    from hpc_trainer.config.compose.project import own_defaults

    own = None if os.environ.get("HPC_TRAINER_RUNS") else own_defaults().get("paths.runs_dir")
    return Path(str(own)).expanduser() if own else default_runs_dir()


def list_sweeps(runs_dir: Path) -> list[SweepPaths]:
    """Every sweep of ours under `runs_dir`, the one submitted last first.

    A team may share the folder of sweeps. A colleague's sweep would be refused when it is read, so it is none of those
    that a command without its name may mean.
    """
    changes = {path: _newest_change(path) for path in _folders(runs_dir) if _is_ours(path)}
    found = {folder: change for folder, change in changes.items() if change is not None}
    return [SweepPaths(folder) for folder in sorted(found, key=lambda folder: found[folder], reverse=True)]


def _folders(runs_dir: Path) -> list[Path]:
    try:
        return list(runs_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_ours(folder: Path) -> bool:
    """Of what another user owns, or may not be looked into, nothing is ours; root's is the site's."""
    sweep = SweepPaths(folder)
    try:
        owners = {path.stat().st_uid for path in sweep.signs}
    except OSError:  # one that is not to be seen just now: its folder is ours
        owners = set()
    try:
        return sweep.exists and {folder.stat().st_uid, *owners} <= {os.getuid(), 0}
    except OSError:
        return False


def _newest_change(folder: Path) -> float | None:
    """When the newest of a sweep's own files was written; None if they went in this moment."""
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
        page: the only file that is written, an absolute path; nothing is refused if it lies outside the sweep's folder.

    Raises:
        UntrustedFileError: others may write the sweep's folder, the folder of one of the runs, or that of the page.
    """
    if page is None or page.parent.resolve().is_relative_to(sweep.folder.resolve()):
        check_place(sweep.folder)
        folders = [sweep.run(run_id).folder for run_id in run_ids] if page is None else [page.parent]
        for folder in folders:
            if os.path.lexists(folder):
                check_trusted(folder)
    set_umask(sweep.is_group_readable)


def find_sweep(runs_dir: Path, name: str | None) -> SweepPaths:
    """The sweep of this name, or the newest one.

    Raises:
        RunStateError: there is none.
    """
    if name is not None:
        as_path = Path(name)
        if SweepPaths(as_path).exists:
            return SweepPaths(as_path.absolute())
        return SweepPaths(runs_dir.absolute() / name)
    sweeps = list_sweeps(runs_dir)
    if not sweeps:
        others = sum((folder / "specs.jsonl").exists() for folder in _folders(runs_dir) if os.access(folder, os.X_OK))
        whose = f" of yours, and {others} of others" if others else ""
        is_there = "" if runs_dir.is_dir() else ": there is no such folder"
        raise RunStateError(f"{runs_dir.absolute()} holds no sweep{whose}{is_there}. {OTHER_FOLDER}")
    return SweepPaths(sweeps[0].folder.absolute())


def select(
    runs_dir: Path, names: Sequence[str], sweep: str | None, *, is_look: bool = False
) -> tuple[SweepStatus, list[str]]:
    """The ids of the runs that `names` name: a sweep's name stands for all its runs, else run ids or their ends.

    Without `sweep`, runs are looked for in the newest sweep first, then in the others; SWEEP RUN.. and SWEEP/RUN say
    which. `is_look` is of `read_status`.

    Raises:
        RunStateError: a name fits nothing.
    """
    names, sweep = in_one_sweep(runs_dir, names, sweep)
    if sweep is not None or not names:
        status = read_status(find_sweep(runs_dir, sweep), is_look=is_look)
        return status, find_runs(status, names)
    for candidate in list_sweeps(runs_dir):
        # Specs tell names without asking the scheduler.
        if all(any(fits(run_id, name) for run_id in _run_ids(candidate)) for name in names):
            status = read_status(SweepPaths(candidate.folder.absolute()), is_look=is_look)
            return status, find_runs(status, names)
    status = read_status(find_sweep(runs_dir, None), is_look=is_look)
    try:
        return status, find_runs(status, names)
    except RunStateError as error:
        sweeps = [{*_run_ids(each)} for each in list_sweeps(runs_dir)]
        if all(any(fits(run_id, name) for run_ids in sweeps for run_id in run_ids) for name in names):
            raise RunStateError(_SEVERAL.format(names=", ".join(names))) from None
        # A person may have meant a sweep.
        known = [each.name for each in list_sweeps(runs_dir)]
        meant = did_you_mean(names[0], known)
        shown = ", ".join(known[:_SWEEPS_SHOWN])
        raise RunStateError(f"there is no such sweep, and {error} {meant}Sweeps: {shown}.") from None


_SWEEPS_SHOWN = 10
_SEVERAL = "{names} are runs of several sweeps: name those of one at a time."


def in_one_sweep(runs_dir: Path, names: Sequence[str], sweep: str | None) -> tuple[Sequence[str], str | None]:
    """Names and sweep, where names are SWEEP, SWEEP RUN.. or each SWEEP/RUN, of a sweep that is there; else unchanged.

    No name is left of SWEEP alone: it stands for all its runs.

    Raises:
        RunStateError: they are two sweeps, the second one's name may fit runs of the first; or runs of several.
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
    if not all(run and "/" not in run for _, _, run in pairs) or not all(_is_sweep(runs_dir / each) for each in sweeps):
        return names, sweep
    if len(sweeps) > 1:
        raise RunStateError(_SEVERAL.format(names=", ".join(names)))
    return [run for _, _, run in pairs], sweeps.pop()


def elsewhere_too(status: SweepStatus, run_ids: Iterable[str], names: Sequence[str], sweep: str | None) -> str | None:
    """In words: other sweeps have runs of these ids, and nobody said which is meant. None: it is clear."""
    names, sweep = in_one_sweep(status.sweep.folder.parent, names, sweep)
    if sweep is not None or not names:
        return None
    folder, wanted = status.sweep.folder, set(run_ids)
    others = [
        each.name for each in list_sweeps(folder.parent) if each.name != folder.name and wanted & {*_run_ids(each)}
    ]
    if not others:
        return None
    taken = f"{', '.join(names)} is taken of sweep {folder.name}"
    return f"{taken}; {', '.join(others)} has it too: {others[-1]}/{names[0]} names that one."


def check_one_each(status: SweepStatus, names: Sequence[str], sweep: str | None) -> None:
    """For what nothing undoes: each of the names that `select` was given is the sweep's, or fits one run.

    Raises:
        RunStateError: one fits several.
    """
    for name in in_one_sweep(status.sweep.folder.parent, names, sweep)[0]:
        found = find_runs(status, [name])
        if len(found) > 1:
            listed = ", ".join(found[:5]) + (" .." if len(found) > 5 else "")
            of = f"{len(found)} runs of {status.sweep.name}: {listed}"
            raise RunStateError(f"{name} fits {of}. Write more of the id, or name the sweep.")


def _is_sweep(folder: Path) -> bool:
    """False of one that is not to be seen just now: what a person names is mostly a run."""
    return bool(exists(folder, Faults())) and SweepPaths(folder).exists


def _run_ids(sweep: SweepPaths) -> Iterable[str]:
    """Of a sweep that others may have changed none: who names it is told so."""
    try:
        return known_by_files(sweep)[1]
    except UntrustedFileError:
        return ()


def fits(run_id: str, name: str) -> bool:
    """True if a person may mean this run by `name`: the whole id, its beginning, or its end."""
    return bool(name) and (run_id.startswith(name) or run_id.endswith(name))


def find_runs(status: SweepStatus, names: Iterable[str]) -> list[str]:
    """The ids of the runs whose id is, or else begins or ends with, one of `names`; all runs if there are none.

    Raises:
        RunStateError: a name fits no run.
    """
    wanted = list(names)
    if not wanted:
        return [*status.specs]
    found: dict[str, None] = {}
    for name in wanted:
        chosen = [name] if name in status.specs else [run_id for run_id in status.specs if fits(run_id, name)]
        if not chosen:
            listed = ", ".join([*status.specs][:10]) or "none"
            raise RunStateError(f"no run of {status.sweep.name} is named {name!r}. Runs: {listed}.")
        found.update(dict.fromkeys(chosen))
    return [*found]
