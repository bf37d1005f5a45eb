"""Doubts: why the state of a run is UNKNOWN. This is the only place where the sentences about it are written.

`operate/verdicts.py` has the meaning of each kind for the user. No other code depends on the text of a sentence.
"""

from __future__ import annotations

import enum


class DoubtKind(enum.Enum):
    """Kinds of reasons why the state of a run cannot be determined."""

    silent = "Slurm did not answer"
    interrupted = "a submit was killed before it knew whether the scheduler has the run"
    other_cluster = "the run was submitted on another cluster"
    other_host = "the run was started on another host"
    unseen_result = "its job has ended, and this machine may not see its files yet"
    accounting_behind = "its job has left the queue, and the accounting does not know the end yet"
    alive_without_job = "it gave a sign of life a moment ago, and Slurm does not know its job"
    new_word = "Slurm reports a state of its job that hpc-trainer does not know"
    taken = "a job or a local queue has it, and its submission is lost"
    maybe_taken = "a job of the sweep may have the run, and the line that names the runs of the job is lost"
    lost_spec = "its configuration is lost or damaged"
    untold_job = "its newest attempt belongs to a job that no submission names"
    unreadable = "the file system does not let its files be read now"
    damaged = "a lost or damaged part of its files may record a later attempt or end"


class Doubt(str):
    """Sentence for the user that says why a run is UNKNOWN, with its kind for code."""

    kind: DoubtKind

    def __new__(cls, kind: DoubtKind, text: str) -> Doubt:
        """Create a doubt of this kind with the sentence `text`."""
        doubt = super().__new__(cls, text)
        doubt.kind = kind
        return doubt

    def __getnewargs__(self) -> tuple[DoubtKind, str]:  # type: ignore[override]
        """Return the arguments with which copy and pickle create the doubt again."""
        return self.kind, str(self)


def kind_of_doubt(cause: str | None) -> DoubtKind:
    """Return the kind of doubt behind an UNKNOWN run's cause; `damaged` for a sentence about its files."""
    return cause.kind if isinstance(cause, Doubt) else DoubtKind.damaged


def silent(command: str) -> Doubt:
    """Return the doubt when squeue or sacct, named by `command`, did not answer."""
    return Doubt(DoubtKind.silent, f"{command} did not answer")


def silent_about(job_ids: list[str], why: object) -> Doubt:
    """Return the doubt when Slurm did not say whether these jobs, which have the sweep's name, belong to the sweep."""
    return Doubt(DoubtKind.silent, f"job {', '.join(job_ids)} may have the run: {why}")


def untold_job(job_id: str | None) -> Doubt:
    """Return the doubt when an attempt says that it runs in a job that no submission names."""
    text = f"its newest attempt belongs to job {job_id}, which submissions.jsonl does not list"
    return Doubt(DoubtKind.untold_job, text)


def unreadable(fault: str) -> Doubt:
    """Return the doubt when the file system refused a read; `fault` names the file."""
    return Doubt(DoubtKind.unreadable, fault)


def silent_after_damage(damage: str | None) -> Doubt:
    """Return the doubt when squeue did not answer and the sweep's own files do not name all its jobs.

    Args:
        damage: fault of submissions.jsonl; None if it names no job at all.
    """
    why = (
        "submissions.jsonl lists none of the submitted jobs" if damage is None else f"a job may have the run: {damage}"
    )
    return Doubt(DoubtKind.silent, f"squeue did not answer, and {why}")


def interrupted() -> Doubt:
    """Return the doubt about an intent without an answer."""
    text = "its submission was interrupted; the next submit finds out whether Slurm has it"
    return Doubt(DoubtKind.interrupted, text)


def other_cluster(where: str) -> Doubt:
    """Return the doubt about a run that another cluster got; `where` is the result of `SchedulerView.elsewhere`."""
    return Doubt(DoubtKind.other_cluster, f"it was {where}")


def other_host() -> Doubt:
    """Return the doubt about a run that was started locally on another host."""
    text = "it was started on another host (or under another name of this host): ask there"
    return Doubt(DoubtKind.other_host, text)


def unseen_result(state: str, exit_code: str, ended_s: float, age_s: float) -> Doubt:
    """Return the doubt about a job that has ended while this machine may still show old files without its result.

    Args:
        state: Slurm's term for the end.
        exit_code: the exit code as sacct prints it.
        ended_s: seconds since the end.
        age_s: seconds for which this machine may show old files.
    """
    ended = f"its job ended {max(0.0, ended_s):.0f} s ago (Slurm: {state} {exit_code})"
    why = f"its result is not seen here yet: a shared file system may show it up to {age_s:.0f} s late"
    return Doubt(DoubtKind.unseen_result, f"{ended}, and {why}")


def accounting_behind(state: str) -> Doubt:
    """Return the doubt when squeue no longer has the job but sacct still shows it as waiting or running."""
    return Doubt(DoubtKind.accounting_behind, f"it has left the queue, and sacct still says {state}: ask again")


def alive_without_job(quiet_s: float) -> Doubt:
    """Return the doubt about a run that was alive `quiet_s` seconds ago, while squeue and sacct do not know its job."""
    text = f"{max(0.0, quiet_s):.0f} s ago it gave a sign of life, and Slurm does not know its job: ask again"
    return Doubt(DoubtKind.alive_without_job, text)


def new_word(command: str, word: str) -> Doubt:
    """Return the doubt about a job whose state slurm/terms.py does not know."""
    return Doubt(DoubtKind.new_word, f"{command} calls its job {word}, a state that hpc-trainer does not know")


def taken(who: str) -> Doubt:
    """Return the doubt about a run that a job or a local queue has although submissions.jsonl does not say so."""
    return Doubt(DoubtKind.taken, f"{who} has the run, and the line of submissions.jsonl that says so is lost")


def maybe_taken(job_ids: tuple[str, ...]) -> Doubt:
    """Return the doubt about jobs of the sweep in the queue, if nothing says which runs they are for."""
    return Doubt(
        DoubtKind.maybe_taken,
        f"job {', '.join(job_ids)} of this sweep is in the queue, and the line that names its runs is lost: scancel "
        f"--state=PENDING {' '.join(job_ids)}, then submit again",
    )


def lost_spec(advice: str) -> Doubt:
    """Return the doubt about a run whose line in specs.jsonl is lost; `advice` says what writes the line again."""
    return Doubt(DoubtKind.lost_spec, f"its line in specs.jsonl is lost or damaged. {advice}")
