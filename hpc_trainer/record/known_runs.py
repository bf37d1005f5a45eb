"""Runs and jobs of a sweep: those that its files name, and those whose lines are lost.

The latter are found by their folders, the queue, batch scripts and processes. Each fact is in one line, and files get
damaged; a run submitted twice costs more than a run shown as UNKNOWN.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from hpc_trainer.errors import SlurmError
from hpc_trainer.record import doubts
from hpc_trainer.record.doubts import Doubt
from hpc_trainer.record.layout import OLD_JOURNAL, SweepPaths, is_run_id
from hpc_trainer.record.reading import Faults, exists, list_folder, read_bytes, read_json
from hpc_trainer.record.spec import NAMELESS, WRITE_AGAIN, RunSpec, lost_spec, read_specs
from hpc_trainer.record.submissions import Ledger, Submission, read_ledger
from hpc_trainer.slurm.jobs import show_scripts
from hpc_trainer.slurm.queue import QueueEntry, array_of

_UUID = re.compile(r"[0-9a-f]{32}")
_HEAD = re.compile(r"-([0-9a-f]{8})\Z")  # of a uuid, at the end of a job's name
_OF_ONE_RUN = re.compile(rb"--run[ =]'?([A-Za-z0-9._-]+)")
_ENDS_AS_A_RUN = re.compile(r"-[0-9a-f]{10}\Z")


def known_specs(sweep: SweepPaths, ledger: Ledger, present: Iterable[str], faults: Faults) -> dict[str, RunSpec]:
    """Return every run of the sweep in the order that all commands show.

    Runs of specs.jsonl come first, then runs known only from submissions.jsonl, sweep.json or their folders. If the
    newest grid has all of the runs, its order is used instead.

    Args:
        sweep: the sweep.
        ledger: the content of submissions.jsonl.
        present: the names in the sweep's folder. List the folder before the call: a run's spec is written before its
            folder is created.
        faults: gets the faults of damaged and lost lines.
    """
    damage = Faults()
    specs = read_specs(sweep, damage)
    hardware = {run_id: submission.hardware for submission in ledger.submissions for run_id in submission.run_ids}
    hardware_names = {**hardware, **dict.fromkeys((*ledger.waiting, *ledger.refused), "?")}
    lost = {run_id: name for run_id, name in hardware_names.items() if run_id not in specs}
    listed = (read_json(sweep.sweep, Faults()) or {}).get("run_ids")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    lost |= {name: lost.get(name, "?") for name in names if name not in specs and is_run_id(name)}
    lost |= dict.fromkeys(_run_folders(sweep, present, specs.keys() | lost.keys(), damage), "?")
    if lost and not damage:
        damage.append(f"specs.jsonl has lost {len(lost)} run(s). {WRITE_AGAIN}")
    # A damaged line may no longer name its run. If every run has its spec, the damaged line was written again.
    faults += damage if lost else [fault for fault in damage if not fault.endswith(NAMELESS)]
    faults.refusal = faults.refusal or damage.refusal
    return _as_in_the_grid(specs | {run_id: lost_spec(run_id, name) for run_id, name in lost.items()}, names)


def known_by_files(sweep: SweepPaths) -> tuple[Ledger, dict[str, RunSpec]]:
    """Return submissions.jsonl and every run of the sweep, without asking a scheduler or reporting a fault.

    Raises:
        UntrustedFileError: others may have changed a file.
    """
    ledger = read_ledger(sweep, may_fail=True)
    listed = list_folder(sweep.folder, Faults()) or ()  # before the specs, as `known_specs` requires
    return ledger, known_specs(sweep, ledger, listed, Faults())


def _as_in_the_grid(specs: dict[str, RunSpec], names: Sequence[str]) -> dict[str, RunSpec]:
    """Sort specs by the newest grid if it has all runs, because a grid that grew has later runs between the others.

    Otherwise they stay in order of submission: a `submit` of some of the runs must not move any.
    """
    is_whole = len(names) >= len(specs) and specs.keys() <= set(names)
    return {name: specs[name] for name in names if name in specs} if is_whole else specs


def _run_folders(sweep: SweepPaths, present: Iterable[str], listed: Collection[str], faults: Faults) -> list[str]:
    names = [name for name in present if name not in listed]
    runs = (sweep.run(name) for name in names if _ENDS_AS_A_RUN.search(name))
    signs = ((run.run_id, (run.journal(0), run.at(OLD_JOURNAL), run.heartbeat, run.logs)) for run in runs)
    return [run_id for run_id, paths in signs if any(exists(path, faults) is not False for path in paths)]


class Holder(NamedTuple):
    """Holder of a run that no submission names: its name in a sentence, and the job id if it is a Slurm job."""

    name: str
    job_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostJobs:
    """Jobs and processes that wait or work for a sweep but that none of its files names."""

    arrays: tuple[str, ...] = ()
    """Ids of jobs whose runs are not known."""
    runs: Mapping[str, Holder] = field(default_factory=dict)
    """Run id -> the job or local queue process that has the run."""
    unseen: Doubt | None = None
    """Reason why it is not known whether there are such jobs."""

    def cause(self, run_id: str) -> Doubt | None:
        """Return why a run may wait or work although no file says so; None if there is no sign of it."""
        if run_id in self.runs:
            return doubts.taken(self.runs[run_id].name)
        return doubts.maybe_taken(self.arrays) if self.arrays else self.unseen

    def job_of(self, run_id: str) -> str | None:
        """Return the id of the job in Slurm that has a run, if it is known."""
        holder = self.runs.get(run_id)
        return None if holder is None else holder.job_id


def find_lost_jobs(
    sweep: SweepPaths, ledger: Ledger, submissions: Sequence[Submission], queue: Mapping[str, QueueEntry] | None,
    faults: Faults, *, needs_submit: bool,
) -> LostJobs:  # fmt: skip
    """Find lost jobs in squeue's answer and, if a run would be submitted, among this machine's processes.

    Args:
        sweep: the sweep.
        ledger: the content of submissions.jsonl.
        submissions: the newest submission of each run.
        queue: squeue's answer; None if there was none.
        faults: gets a fault for each folder that cannot be listed.
        needs_submit: True if a run would be submitted.
    """
    if ledger.unread is not None:
        return LostJobs(unseen=doubts.unreadable(ledger.unread))
    in_queue = _jobs_in_queue(sweep, ledger, submissions, (queue or {}).values(), faults, needs_submit=needs_submit)
    if needs_submit and exists(sweep.local_logs, faults) is not False:
        return replace(in_queue, runs={**_runs_of_queues(sweep, ledger), **in_queue.runs})
    return in_queue


def _jobs_in_queue(
    sweep: SweepPaths, ledger: Ledger, more: Iterable[Submission], queue: Iterable[QueueEntry], faults: Faults, *,
    needs_submit: bool,
) -> LostJobs:  # fmt: skip
    """Return the jobs in the queue that carry the uuid of one of this sweep's batch scripts but of no submission.

    A job may have the sweep's name but no script here, because another sweep may have the same name. If a run may be
    submitted, Slurm is asked for that job's script.
    """
    submissions = {submission.uuid[:8]: submission for submission in (*ledger.submissions, *ledger.top_ups, *more)}
    arrays: dict[str, None] = {}
    runs: dict[str, Holder] = {}
    named: dict[str, str] = {}
    scripts: dict[str, Path] | None = None
    for entry in queue:
        job_id = array_of(entry.job_id)
        head = entry.comment[:8] if _UUID.fullmatch(entry.comment) else _head_of(entry.name, sweep)
        if head is None or job_id in arrays or _is_told(entry, submissions.get(head)):
            continue
        if scripts is None:  # one listing only: the queue may show 10,000 jobs of other sweeps
            scripts = {name[:8]: sweep.scripts / name for name in list_folder(sweep.scripts, faults) or ()}
            if faults.refusal is not None:
                return LostJobs(unseen=doubts.unreadable(faults[-1]))
        script = scripts.get(head)
        if script is None:
            if head == _head_of(entry.name, sweep):
                named[job_id] = head
        elif "_" in entry.job_id:
            arrays[job_id] = None
        elif match := _OF_ONE_RUN.search(read_bytes(script, Faults()) or b""):
            runs[match[1].decode()] = Holder(f"job {job_id}", job_id)
    if not (needs_submit and named):
        return LostJobs(arrays=tuple(arrays), runs=runs)
    try:
        paths = show_scripts(named)
    except SlurmError as error:
        return LostJobs(arrays=tuple(arrays), runs=runs, unseen=doubts.silent_about([*named], error))
    here = os.path.realpath(sweep.scripts)
    silent = [job_id for job_id in named if job_id not in paths]
    own = [job_id for job_id, path in paths.items() if os.path.realpath(os.path.dirname(path)) == here]  # noqa: PTH120
    unseen = doubts.silent_about(silent, "Slurm does not say what its script was") if silent else None
    return LostJobs(arrays=(*arrays, *own), runs=runs, unseen=unseen)


def _is_told(entry: QueueEntry, submission: Submission | None) -> bool:
    """Return True if the entry may be of the submission, which has the entry's job (or is unconfirmed) and element."""
    if submission is None or submission.job_id not in (None, array_of(entry.job_id), entry.job_id):
        return False
    _, _, element = entry.job_id.partition("_")
    return not element.isdecimal() or int(element) < submission.num_elements


def _head_of(name: str, sweep: SweepPaths) -> str | None:
    match = _HEAD.search(name) if name.startswith(f"{sweep.name}-") else None
    return match[1] if match else None


def _runs_of_queues(sweep: SweepPaths, ledger: Ledger) -> dict[str, Holder]:
    """Return the runs of this machine's local queues that work for this sweep and that no submission names."""
    import psutil  # takes 20 ms, which most commands avoid

    uuids = {submission.uuid for submission in ledger.submissions}
    runs: dict[str, Holder] = {}
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or ()
        pairs = list(itertools.pairwise(arguments))
        intents = {argument for before, argument in pairs if before == "--intent"}
        if intents and not intents <= uuids and ("--sweep-dir", str(sweep.folder)) in pairs:
            runs |= dict.fromkeys(arguments, Holder(f"the queue of process {process.pid}", None))
    return runs
