"""Execution of a plan: specs, then for each array intent, sbatch, confirmation. A kill at any point loses nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.environment import setup_of
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError, NoRoomError, RefusedError, SilentError, SlurmError
from hpc_trainer.launch.arrays import ArrayPlan
from hpc_trainer.launch.batch_job import BatchJob, setup_lines, start_of_ranks, worker_command
from hpc_trainer.launch.follow import mark_held
from hpc_trainer.launch.frozen_code.archive import archive_of, code_revision, store_code
from hpc_trainer.launch.frozen_code.snapshot import Snapshot
from hpc_trainer.launch.later_jobs import TopUpJob, on_choice
from hpc_trainer.launch.plan import SweepPlan, specs_to_write
from hpc_trainer.record.chain import note_followers
from hpc_trainer.record.files import make_folder, write_json, write_marker
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.processes import FileLock, process_name
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.redaction import Redaction
from hpc_trainer.record.spec import RunSpec, append_specs, read_specs
from hpc_trainer.record.states import CANCEL
from hpc_trainer.record.submissions import (
    Submission,
    claimed_by,
    write_changed,
    write_confirmation,
    write_intent,
    write_refused,
    write_waiting,
)
from hpc_trainer.record.trust import check_place, check_trusted
from hpc_trainer.runtime.start import start_words
from hpc_trainer.slurm.commands import estimate_start, is_of_nodes
from hpc_trainer.slurm.jobs import cancel_jobs, release_jobs
from hpc_trainer.slurm.shape import Shape
from hpc_trainer.worker.line import have_done_their_work


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedArray:
    """Array that the scheduler accepted."""

    job_id: str
    hardware: str
    run_ids: tuple[str, ...]
    uuid: str = ""
    choice: int | None = None
    """Number of the item of a hardware list; None without a list."""
    slots: int = 0
    """Slots of a pool that work through the runs; 0: each run is an element."""

    @property
    def place(self) -> tuple[str, int | None]:
        """Key of the hardware: the profile's name, and the number of the item of a list; None without a list."""
        return self.hardware, self.choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a plan. `waiting` are runs in the sweep's own queue, `top_up` the job that will submit them."""

    arrays: tuple[SubmittedArray, ...] = ()
    waiting: tuple[str, ...] = ()
    top_up: str | None = None
    notes: tuple[str, ...] = field(default=())


def array_script_of(plan: SweepPlan, array: ArrayPlan, uuid: str = "UUID") -> str:
    """Return the batch script that `submit` would hand to sbatch; "" for the local executor."""
    if plan.grid.executor is not Executor.slurm:
        return ""
    from hpc_trainer.launch.submitit_bridge import render_script

    return render_script(_job_of(plan, array, uuid))


def with_mail(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section `cluster` of a frozen configuration, with sbatch's options for `notify.mail`."""
    cluster: Mapping[str, Any] = config["cluster"]
    mail = config.get("notify", {}).get("mail")  # specs of older versions lack it
    if mail is None:
        return cluster
    options = {"mail-user": mail, "mail-type": "END,FAIL", **(cluster.get("sbatch") or {})}
    return {**cluster, "sbatch": options}


def _job_of(plan: SweepPlan, array: ArrayPlan, uuid: str) -> BatchJob:
    cluster, paths = with_mail(array.specs[0].config), plan.grid.sweep
    archive = archive_of(paths, plan.code) if plan.code else None
    which = ["--pool", uuid] if array.slots else ["--array", uuid, *on_choice(array.choice)]
    return BatchJob.of_runs(
        paths, array.shape, uuid, cluster, which, archive, plan.exit_codes,
        num_elements=array.num_elements, array_parallelism=array.parallelism,
    )  # fmt: skip


def ask_slurm(plan: SweepPlan, known_shapes: frozenset[Shape] = frozenset()) -> SweepPlan:
    """Return the plan with the answer of `sbatch --test-only` for each shape: a start or a problem. Submits nothing.

    Args:
        known_shapes: shapes that this Slurm has accepted before; they are not asked again.
    """
    asked: dict[Shape, tuple[str | None, str | None]] = {}
    problems, notes = list(plan.problems), list(plan.notes)
    for array in plan.arrays:
        if problems or array.shape in asked or array.shape in known_shapes:
            continue
        asked[array.shape] = None, None
        try:
            asked[array.shape] = estimate_start(array_script_of(plan, array)), None
        except NoRoomError as error:
            notes.append(f"Slurm has no room for {array.hardware} now: {error}")
            asked[array.shape] = None, notes[-1]
        except ConfigError as error:
            problems += str(error).splitlines()
        except SilentError as error:
            notes.append(str(error))
            asked[array.shape] = None, notes[-1]
        except RefusedError as error:
            if is_of_nodes(error):
                notes.append(f"Slurm cannot start {array.hardware} as the nodes are now: {error}")
                asked[array.shape] = None, notes[-1]
            else:
                problems.append(f"Slurm would refuse hardware={array.hardware}: {error}")
                asked[array.shape] = None, problems[-1]
    answers = {**plan.answers, **asked}
    starts = tuple(asked.get(array.shape, (None, None))[0] for array in plan.arrays)
    return dataclasses.replace(plan, problems=tuple(problems), notes=tuple(notes), starts=starts, answers=answers)


def submit_plan(
    plan: SweepPlan, *, command_line: Sequence[str] | None, code: Snapshot | None = None,
    lock: FileLock | None = None, skip_refused: bool = False,
) -> Outcome:  # fmt: skip
    """Submit every array of the plan. The caller holds the sweep's lock.

    Args:
        command_line: the user's command, for sweep.json; None leaves that file alone (the user did not give the grid).
        code: the code of `plan.code`, to be stored; None if it is stored already, or nothing is frozen.
        lock: renewed before each sbatch, so that a long submission does not look dead.
        skip_refused: record runs that Slurm refuses for good, and submit the others, instead of raising.

    Raises:
        ConfigError: the plan has problems; nothing was written.
        RefusedError: the scheduler refused an array; the arrays before it are submitted, and not submitted again.
        SlurmError: it is unknown whether the scheduler has an array; the next submit asks.
    """
    if plan.problems:
        raise ConfigError("\n".join(plan.problems))
    if not plan.specs:
        return Outcome()
    paths = plan.grid.sweep
    check_place(paths.folder)
    for folder in (paths.run(spec.run_id).folder for spec in plan.specs):
        if folder.is_symlink() or folder.exists():
            check_trusted(folder)  # the worker would refuse it, where nobody watches
    if code is not None:
        store_code(paths, code)
    append_specs(paths, specs_to_write(plan, read_specs(paths)))
    note_followers(paths, plan.specs)
    if plan.grid.changes:
        write_changed(paths, [spec.run_id for spec in plan.specs], plan.grid.changes)
    if command_line is not None:
        _write_sweep(plan, command_line, code)
    if plan.grid.executor is Executor.slurm:
        return _SlurmSubmission(plan, lock, skip_refused=skip_refused).run()
    return Outcome(arrays=tuple(_submit_local(plan)))


def _write_sweep(plan: SweepPlan, command_line: Sequence[str], code: Snapshot | None) -> None:
    write_json(
        plan.grid.sweep.sweep,
        {
            "sweep": plan.grid.sweep.name,
            "command": Redaction.of_process().arguments(command_line),
            "time": time.time(),
            "run_ids": [spec.run_id for spec in plan.grid.specs],
            "axes": sorted({axis for spec in plan.grid.specs for axis in spec.axes}),
            "code": code_revision(code),
        },
    )


class _SlurmSubmission:
    """Submission of a plan's arrays in order; a top-up job is placed first if runs have to wait."""

    def __init__(self, plan: SweepPlan, lock: FileLock | None, *, skip_refused: bool) -> None:
        self._plan, self._lock, self._skip_refused = plan, lock, skip_refused
        self._paths = plan.grid.sweep
        self._done: list[SubmittedArray] = []
        self._refused: set[str] = set()  # runs refused by Slurm, or cancelled: they do not wait
        self._full: dict[tuple[str | None, ...], str] = {}  # refusal message by (partition, account, QOS)
        self._race = uuid.uuid4().hex  # shared by all jobs of a run that is submitted to several shapes
        self._top_up: TopUpJob | None = None

    def run(self) -> Outcome:
        plan = self._plan
        make_folder(self._paths.scripts)
        for run_id in dict.fromkeys(run_id for array in plan.arrays for run_id in array.canaries):
            make_folder(self._paths.run(run_id).folder)
            write_marker(self._paths.run(run_id).canary)
        if plan.waiting:
            # All runs, also those submitted next: if this process is killed in between, the top-up job submits them.
            self._wait_for_room("; ".join(plan.binding))
        for index, array in enumerate(plan.arrays):
            after = array.after
            if array.behind is not None and index >= array.behind:
                earlier = [submitted for submitted in self._done if submitted.place == array.place]
                after = (earlier[-array.behind].job_id,) if len(earlier) >= array.behind else after
            self._submit_what_fits(array, after)
        if self._top_up is not None:
            counts = [(submitted.job_id, submitted.slots or len(submitted.run_ids)) for submitted in self._done]
            new = [f"{job_id}_{index}" for job_id, count in counts for index in range(count)]
            self._top_up.aim([*plan.known.elements, *new])
        return Outcome(
            arrays=tuple(self._done),
            waiting=tuple(spec.run_id for spec in self._left()),
            top_up=self._top_up.job_id if self._top_up else None,
            notes=(*self._full.values(), *(self._top_up.notes if self._top_up else ())),
        )

    def _left(self) -> list[RunSpec]:
        submitted = {run_id for array in self._done for run_id in array.run_ids} | self._refused
        return [spec for spec in self._plan.specs if spec.run_id not in submitted]

    def _wait_for_room(self, reason: str) -> None:
        left = self._left()
        if not left:  # each run has a job on other hardware of its list
            return
        if any(spec.run_id not in self._plan.known.waiting for spec in left):
            write_waiting(self._paths, [spec.run_id for spec in left], reason, self._plan.code)
        if not self._plan.keeps_room:
            self._top_up = TopUpJob(None, ("No room for a top-up job: the same command submits more as runs end.",))
        elif self._plan.known.top_up_job is not None:
            self._top_up = TopUpJob(self._plan.known.top_up_job)
        else:
            self._renew()
            self._top_up = TopUpJob.place(self._paths, left[0], self._plan.cluster)

    def _submit_what_fits(self, array: ArrayPlan, after: Sequence[str]) -> None:
        """Submit the whole array; if the cluster has less room than it reported, halve the array until it fits."""
        shape = array.shape
        key = (shape.partition, shape.account, shape.qos)
        if array.slots:
            self._submit_pool(array, key)
            return
        specs = self._without_job(array, self._not_cancelled(array.specs))
        size = 0 if key in self._full else len(specs)
        while size:
            part = dataclasses.replace(array, specs=specs[:size], parallelism=min(array.parallelism, size))
            try:
                self._done.append(self._submit(part, after))
            except NoRoomError as error:
                self._full[key] = f"{array.hardware}: {error}"
                if self._top_up is None:
                    self._wait_for_room(str(error))
                size //= 2
            except (ConfigError, RefusedError) as error:
                if not self._skip_refused:
                    raise
                submitted = {run_id for array in self._done for run_id in array.run_ids}
                run_ids = [spec.run_id for spec in specs if spec.run_id not in submitted]
                write_refused(self._paths, run_ids, str(error))
                self._refused.update(run_ids)
                return
            else:
                return

    def _submit_pool(self, array: ArrayPlan, key: tuple[str | None, ...]) -> None:
        """Submit the pool; if the cluster has less room than it reported, halve the slots until they fit."""
        slots = 0 if key in self._full else array.slots
        while slots:
            try:
                self._done.append(self._submit(dataclasses.replace(array, slots=slots, parallelism=slots), ()))
            except NoRoomError as error:  # noqa: PERF203
                self._full[key] = f"{array.hardware}: {error}"
                if slots == 1 and self._top_up is None:
                    self._wait_for_room(str(error))
                slots //= 2
            else:
                return

    def _not_cancelled(self, specs: tuple[RunSpec, ...]) -> tuple[RunSpec, ...]:
        """Return the runs that were not cancelled since the plan was made; Slurm may take a minute to report limits."""
        kept = tuple(spec for spec in specs if not is_there(self._paths.run(spec.run_id).marker(CANCEL)))
        self._refused.update({spec.run_id for spec in specs} - {spec.run_id for spec in kept})
        return kept

    def _without_job(self, array: ArrayPlan, specs: tuple[RunSpec, ...]) -> tuple[RunSpec, ...]:
        """Return the runs that no job has begun yet: a run may have begun on other hardware of its list."""
        return tuple(spec for spec in specs if array.choice is None or not self._has_begun(spec.run_id))

    def _has_begun(self, run_id: str) -> bool:
        return is_there(self._paths.run(run_id).claim(self._race))

    def _end_losers(self, array: ArrayPlan, job_id: str) -> None:
        """Cancel the elements of an array whose runs another job has begun since; they would end by themselves.

        The job that begins a run cancels the jobs that it knows of, and may not have known of this one.
        """
        if array.choice is None or not self._done:
            return
        begun = [place for place, spec in enumerate(array.specs) if self._has_begun(spec.run_id)]
        lost = [f"{job_id}_{place}" for place in begun if self._is_of_another(array.specs[place].run_id)]
        with contextlib.suppress(SlurmError):
            cancel_jobs(lost)

    def _is_of_another(self, run_id: str) -> bool:
        return claimed_by(self._paths.run(run_id), self._race) in {array.uuid for array in self._done}

    def _submit(self, array: ArrayPlan, after: Sequence[str]) -> SubmittedArray:
        from hpc_trainer.launch.submitit_bridge import hand_over

        paths = self._paths
        run_ids = [spec.run_id for spec in array.specs]
        self._renew()
        intent = write_intent(
            paths,
            executor="slurm",
            hardware=array.hardware,
            run_ids=run_ids,
            parallelism=array.parallelism,
            code=self._plan.code,
            cluster=self._plan.cluster,
            race=None if array.choice is None else self._race,
            choice=array.choice or 0,
            canaries=array.canaries,
            slots=array.slots,
            per_node=array.per_node,
            per_gpu=array.per_gpu,
        )
        jobs = [*after, *array.follows.jobs]
        options = [*([f"--dependency=afterany:{':'.join(jobs)}"] if jobs else []), *array.follows.options]
        if array.follows.is_held:
            mark_held(paths, array.specs, array.follows.reason)
        if array.canaries and not array.follows.is_held:
            options.append("--hold")
        job_id = hand_over(paths, intent, _job_of(self._plan, array, intent.uuid), options)
        if array.canaries and have_done_their_work(paths, intent):  # they looked before this array was confirmed
            release_jobs([job_id])
        self._end_losers(array, job_id)
        return SubmittedArray(
            job_id=job_id, hardware=array.hardware, run_ids=tuple(run_ids), uuid=intent.uuid, choice=array.choice,
            slots=array.slots,
        )  # fmt: skip

    def _renew(self) -> None:
        if self._lock is not None:
            self._lock.renew()


def _submit_local(plan: SweepPlan) -> list[SubmittedArray]:
    """Start one detached queue for all arrays, and a process for each pool; they outlive this command and terminal."""
    paths = plan.grid.sweep
    make_folder(paths.local_logs)
    submitted: list[SubmittedArray] = []
    queued: list[Submission] = []
    for array in plan.arrays:
        intent = write_intent(
            paths,
            executor="local",
            hardware=array.hardware,
            run_ids=[spec.run_id for spec in array.specs],
            code=plan.code,
            num_attempts=[len(Journal(paths.run(spec.run_id)).read()) for spec in array.specs],
            slots=array.slots,
            per_node=array.per_node,
            per_gpu=array.per_gpu,
        )
        if array.slots:
            job_id = process_name(_start_pool(plan, array, intent).pid)
            write_confirmation(paths, intent, job_id)
            submitted.append(
                SubmittedArray(
                    job_id=job_id, hardware=intent.hardware, run_ids=intent.run_ids, slots=intent.slots,
                )
            )  # fmt: skip
        else:
            queued.append(intent)
    if queued:
        job_id = process_name(_start_queue(plan, queued).pid)
        for intent in queued:
            write_confirmation(paths, intent, job_id)
            submitted.append(SubmittedArray(job_id=job_id, hardware=intent.hardware, run_ids=intent.run_ids))
    return submitted


def _start_queue(plan: SweepPlan, intents: Sequence[Submission]) -> subprocess.Popen[bytes]:
    paths = plan.grid.sweep
    argv = [sys.executable, *start_words("hpc_trainer.launch.local_queue"), "--sweep-dir", str(paths.folder)]
    for intent in intents:
        argv += ["--intent", intent.uuid]
    if plan.code is not None:
        argv += ["--archive", str(archive_of(paths, plan.code))]
    run_ids = [run_id for intent in intents for run_id in intent.run_ids]
    return _start_detached([*argv, "--max-parallel", str(plan.grid.max_parallel), *run_ids], paths.local_logs)


def submit_source(plan: SweepPlan, array: ArrayPlan, source: str) -> SubmittedArray:
    """Submit a pool that lists no runs: its slots take them from what a domain contributes (hook `run_sources`).

    The caller holds the sweep's lock. Raises as `submit_plan`.

    Args:
        plan: a plan of runs of the same shape and environment; its code is stored already.
        array: the slots, with one of these runs.
        source: name by which the domain knows its pools.
    """
    paths = plan.grid.sweep
    is_on_slurm = plan.grid.executor is Executor.slurm
    make_folder(paths.scripts if is_on_slurm else paths.local_logs)
    intent = write_intent(
        paths, executor=plan.grid.executor.value, hardware=array.hardware, run_ids=[], code=plan.code,
        parallelism=array.slots if is_on_slurm else None, cluster=plan.cluster if is_on_slurm else None,
        slots=array.slots, per_node=array.per_node, per_gpu=array.per_gpu, source=source,
    )  # fmt: skip
    if is_on_slurm:
        from hpc_trainer.launch.submitit_bridge import hand_over

        job_id = hand_over(paths, intent, _job_of(plan, array, intent.uuid))
    else:
        job_id = process_name(_start_pool(plan, array, intent).pid)
        write_confirmation(paths, intent, job_id)
    return SubmittedArray(job_id=job_id, hardware=array.hardware, run_ids=(), uuid=intent.uuid, slots=array.slots)


def _start_pool(plan: SweepPlan, array: ArrayPlan, intent: Submission) -> subprocess.Popen[bytes]:
    paths, cluster = plan.grid.sweep, array.specs[0].config["cluster"]
    archive = archive_of(paths, plan.code) if plan.code is not None else None
    words = start_of_ranks(paths, array.shape, cluster).words
    command = worker_command(paths.folder, ["--pool", intent.uuid, "--slots", str(array.slots)], words, archive)
    setup = setup_of(cluster)[0]
    if setup:
        command = ("bash", "-c", "\n".join([*setup_lines(setup), 'exec "$@"']), "bash", *command)
    return _start_detached(command, paths.local_logs)


def _start_detached(argv: Sequence[str], logs: Path) -> subprocess.Popen[bytes]:
    with (logs / "queue.log").open("ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # neither Ctrl-C nor the end of the terminal reaches the queue
        )
