"""Meaning and remedy of each way a run can end: the table behind `why`; docs/failures.md explains it at length."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.record.doubts import DoubtKind, kind_of_doubt
from hpc_trainer.record.last_words import NOT_STARTED
from hpc_trainer.record.states import KILLED, LOW_GOODPUT, NOT_FINITE, RunState


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict on a run: a sentence (`says`), and the commands or changes that help (`advice`).

    Placeholders besides {run}, {sweep} and {job}: `flag` is the option that allows a refused resume. `longer` is a
    longer time limit, in minutes. `memory` is the override for twice the memory. `words` are the overrides of the
    submit. `claim` is the file by which a slot of a pool took the run. `logs` is the command that prints the relevant
    log. `idle` describes the idle rank if its number is not known.
    """

    says: str
    advice: tuple[str, ...] = ()


_LOGS = "{logs}"
_RETRY = "hpc-trainer retry {run}"
_LONGER = _RETRY + " hardware.time_limit_min={longer}"
_MEND = "fix the code, then: " + _RETRY + " (another configuration is another run: hpc-trainer submit)"
_SUBMIT = "the same `hpc-trainer submit` again, or: " + _RETRY

BY_STATE: dict[RunState, Verdict] = {
    RunState.NEW: Verdict("It has not been submitted yet.", ("hpc-trainer submit {words}",)),
    RunState.PENDING: Verdict("It waits for its turn.", ("nothing: it starts by itself",)),
    RunState.RUNNING: Verdict("It is running.", ("hpc-trainer status --watch {sweep}",)),
    RunState.REQUEUED: Verdict(
        "It was interrupted and goes back into the queue by itself.", ("nothing: it continues by itself",)
    ),
    RunState.COMPLETED: Verdict("It is complete.", ("hpc-trainer results {sweep}",)),
    RunState.CANCELLED: Verdict(
        "The run was cancelled, by `hpc-trainer cancel` or scancel. It restarts only with `hpc-trainer retry`.",
        (_RETRY,),
    ),
    RunState.GONE: Verdict(
        "It was removed, or its folder has been deleted: its results and checkpoints are gone.",
        (_RETRY + ": it is trained again from the beginning",),
    ),
    RunState.PAUSED: Verdict(
        "Its search let it train until this step, and promotes it if it is among the best there.",
        ("nothing: it continues by itself if it is promoted",),
    ),
    RunState.HELD: Verdict("It is held, and starts when it is released.", ("hpc-trainer release {run}",)),
    RunState.PREEMPTED: Verdict("It was interrupted, and could not be restarted automatically.", (_SUBMIT,)),
    RunState.TIMEOUT: Verdict(
        "Its time limit ended it, and it could not be restarted automatically.",
        (_SUBMIT, "if a step and a save take long: " + _LONGER),
    ),
    RunState.NODE_FAIL: Verdict("Its node failed, and it could not be restarted automatically.", (_SUBMIT,)),
    RunState.OUT_OF_MEMORY: Verdict(
        "It used more host memory than it had asked for, and Slurm killed it.",
        (
            _RETRY + " {memory}: the same run continues",
            "or the same `hpc-trainer submit` with more of it and --retry-failed",
        ),
    ),
    RunState.FAILED: Verdict("It failed.", (_LOGS, _MEND)),
    RunState.UNKNOWN: Verdict(
        "One of its files is damaged, and the lost part may record its state.",
        ("hpc-trainer cancel {run}, then " + _RETRY + ": it resumes from its newest checkpoint",),
    ),
}

TORN_CLAIM = Verdict(
    "No slot takes it: its claim cannot be read.",
    ("hpc-trainer submit with the same arguments, two minutes after the file was written",),
)
"""Verdict on a run that waits for a slot of a pool, if the file by which a slot took it is damaged."""
STRANGE_CLAIM = Verdict(
    "No slot takes it: by its claim a job has it that no submission of this sweep has.",
    ("if that job has ended: rm {claim}",),
)
"""Like `TORN_CLAIM`, if the file names a job of another cluster or of a lost submission."""
SILENT = Verdict("Slurm does not answer, so its state is not known now.", ("ask again later: its job continues",))
WITHOUT_FOLDER = Verdict(
    "It was submitted to this machine and has no files: it has not begun, or its folder has been deleted.",
    ("to train it from the beginning: hpc-trainer submit {words}",),
)
NO_SLOT = Verdict(
    "It has not begun: no slot of its pool could begin.",
    ("when the reason is gone, or with another value of pool.mps: hpc-trainer submit {words}",),
)
TAKEN = Verdict(
    "A job or a local queue has it, and the line that says so is lost.",
    (
        "nothing: it continues; once it has ended, the same `hpc-trainer submit`",
        "to end it: hpc-trainer cancel {run}",
    ),
)
_ANEW = "hpc-trainer cancel {run}, then " + _RETRY
_DAMAGED = BY_STATE[RunState.UNKNOWN]
BY_DOUBT: dict[DoubtKind, Verdict] = {
    DoubtKind.unseen_result: Verdict(
        "Its job has ended, and this machine may not see yet what it wrote.",
        ("ask again in a minute: the same command",),
    ),
    DoubtKind.unreadable: Verdict(
        "The file system does not let its files be read now.",
        ("ask again; if it stays so: can this machine read the run's folder, and is the file server up?",),
    ),
    DoubtKind.untold_job: _DAMAGED,
    DoubtKind.damaged: _DAMAGED,
    DoubtKind.silent: SILENT,
    DoubtKind.taken: TAKEN,
    DoubtKind.maybe_taken: Verdict(
        "A job of the sweep may have it: the line that recorded that job's runs is lost.",
        ("the scancel that the cause names, then the same `hpc-trainer submit`; runs that are at work continue",),
    ),
    DoubtKind.lost_spec: Verdict(
        "It was interrupted, and the line that holds its configuration is lost or damaged.",
        ("the same `hpc-trainer submit`: it writes the line again, and the run continues",),
    ),
    DoubtKind.interrupted: Verdict(
        "A submit was killed before it knew whether the run was taken.",
        ("the same `hpc-trainer submit`: it asks Slurm, and submits the runs without a job",),
    ),
    DoubtKind.other_cluster: Verdict(
        "Another cluster has it.",
        ("the same command there", "if that cluster is gone: touch {folder}/CANCEL, then " + _RETRY),
    ),
    DoubtKind.other_host: Verdict("Another host has it.", ("the same command there", "if that host is gone: " + _ANEW)),
    DoubtKind.accounting_behind: Verdict(
        "Slurm's queue no longer has its job, and its accounting does not know the end yet.",
        ("ask again in ten minutes", "if it stays so for a day: " + _ANEW),
    ),
    DoubtKind.alive_without_job: Verdict(
        "It gave a sign of life a moment ago, and Slurm does not know its job.",
        ("ask again in a minute; on its own cluster, if this is another one",),
    ),
    DoubtKind.new_word: Verdict(
        "Slurm has its job, in a state that is not known here.", ("ask again later", "squeue -j {job} shows the job")
    ),
}


def of_unknown(cause: str | None, job_id: str | None) -> Verdict:
    """Return the verdict on an UNKNOWN run, by the kind of doubt that its cause names.

    Args:
        cause: the cause in the run's status.
        job_id: the job in Slurm's queue that is surely its own; None if there is none.
    """
    verdict = BY_DOUBT[kind_of_doubt(cause)]
    return TAKEN if verdict is _DAMAGED and job_id is not None else verdict


INCOMPATIBLE_RESUME = "incompatible_resume"
INVALID_CONFIG = "invalid_config"
REFUSALS = (INCOMPATIBLE_RESUME, INVALID_CONFIG)
"""Causes without a traceback: the line of hpc_trainer that raised them does not help the user."""

TIMEOUTS = "timeouts"
"""Diagnosis of a run that the time limit ends again and again, each time with progress."""

MAY_PASS = Verdict(
    "It ended with an error that need not come again. After an error a run is not restarted automatically.", (_LOGS,)
)
"""Verdict in place of that on an exception or a program, if the sign does not speak of the code or its input."""

# Verdicts on FAILED runs, by the cause that the worker recorded.
BY_CAUSE: dict[str, Verdict] = {
    "exception": Verdict(
        "The training raised an exception. A restart would raise it again, so the run was not restarted.",
        (_LOGS, _MEND),
    ),
    INCOMPATIBLE_RESUME: Verdict(
        "It refused to resume from a checkpoint of another training; the differences are below (was -> is).",
        (
            "to resume all the same, if weights and optimizer still fit: the same command with {flag} (and with "
            "--retry-failed, if it is submit)",
            "else undo the change, or begin anew: --fresh or another sweep_name, and without the "
            "checkpoint.resume_from that names this checkpoint",
        ),
    ),
    INVALID_CONFIG: Verdict(
        "Its configuration is invalid, which only the run could detect; the rule and the legal choice are below.",
        (
            "change the key that it names, then submit: that makes another run",
            _RETRY + " if the change is in your own code",
        ),
    ),
    "program": Verdict(
        "Your program ended with an error. A restart would end with it again, so the run was not restarted.",
        (_LOGS, _MEND),
    ),
    "diverged": Verdict(
        "The training diverged: gradients were NaN or inf, or spikes, more often than train.max_skipped_steps and "
        "train.guard allow.",
        ("a smaller optim.lr, schedule.warmup_steps, train.max_grad_norm=1.0, precision=fp32", "NaN in the data?"),
    ),
    NOT_FINITE: Verdict(
        "It did all its steps, but a final metric is NaN or infinite.",
        (
            "hpc-trainer results {sweep}, and the losses in metrics.jsonl: where did it begin?",
            "a smaller optim.lr, schedule.warmup_steps, train.max_grad_norm=1.0, precision=fp32; NaN in the data?",
        ),
    ),
    "out_of_memory": Verdict(
        "A rank ran out of memory in a step.",
        ("a smaller train.micro_batch_size: accumulation keeps the batch", "train.recompute=full, parallel=fsdp"),
    ),
    "no_progress": Verdict(
        "It was restarted again and again without a new step, so it was stopped for good (exit 76).",
        (_LOGS, "a longer time limit or grace if the first step comes late", _RETRY + " counts anew"),
    ),
    TIMEOUTS: Verdict(
        "Its time limit ends one attempt after the other, and each trains further. It continues by itself.",
        ("nothing: it continues by itself",),
    ),
    LOW_GOODPUT: Verdict(
        "Its time limit ended one attempt after the other, and nearly all of their time went to other things than "
        "training, so it was stopped for good (exit 76).",
        (
            _LONGER + ": the same run continues; another partition is the key hardware.partition",
            "hpc-trainer plan names limits that are too short, hpc-trainer advise {run} names what else takes the time",
            "to let it continue unchanged: " + _RETRY + " cluster.min_goodput=0",
        ),
    ),
    "storage": Verdict(
        "Storage or data failed more often than cluster.max_failures allows (exit 74).",
        ("check quota and free space", _RETRY),
    ),
    NOT_STARTED: Verdict(
        "It ended before its worker began: by a line of cluster.setup, the environment, or the frozen code.",
        (
            "hpc-trainer logs {run}",
            "fix cluster.setup, cluster.python or the environment, then the same `hpc-trainer submit` with "
            "--retry-failed: the same run continues, with the cluster's present settings",
            "or: "
            + _RETRY
            + ", which uses the earlier settings; a corrected cluster.setup or cluster.python may be added to it",
        ),
    ),
    KILLED: Verdict(
        "Its process was killed from outside (kill -9, or the machine ran out of memory).", (_LOGS, _RETRY)
    ),
    "peer_lost": Verdict(
        "A rank was killed or its node failed, more often than cluster.max_failures allows: the others lost contact.",
        (_LOGS, _RETRY + "; if the kernel killed it for memory: " + _RETRY + " {memory}"),
    ),
    "stuck": Verdict(
        "A rank showed no sign of life for monitor.watchdog_s seconds: a hung collective, or a stuck loader.",
        (_LOGS + ": it ends with the stack of each thread{idle}", _RETRY),
    ),
}
