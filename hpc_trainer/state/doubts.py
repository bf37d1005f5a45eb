"""Why the state of a run is UNKNOWN: the kinds of doubt, and the one place where their sentences are written.

`operate/verdicts.py` has what each kind means for the user. Nothing else looks at the words of a sentence.
"""

from __future__ import annotations

import enum


class DoubtKind(enum.Enum):
    """Why nobody can say how a run stands."""

    silent = "Slurm did not answer"
    interrupted = "a submit was killed before it knew whether the scheduler has the run"
    other_cluster = "the run was submitted on another cluster"
    other_host = "the run was started on another host"
    unseen_result = "its job has ended, and this machine may not see its files yet"
    accounting_behind = "its job has left the queue, and the accounting does not know the end yet"
    alive_without_job = "it gave a sign of life a moment ago, and Slurm does not know its job"
    new_word = "Slurm calls the state of its job by an unknown word"
    taken = "a job or a local queue has it, and its submission is lost"
    maybe_taken = "a job of the sweep may have it, and the line that says for which runs it is is lost"
    lost_spec = "its configuration is lost or damaged"
    untold_job = "its newest attempt is of a job of which no submission tells"
    unreadable = "the file system does not let its files be read now"
    damaged = "what is lost or damaged in its files may tell of a later attempt or end"


class Doubt(str):
    """A sentence that says why a run is UNKNOWN, for the user, with its kind, for code."""

    kind: DoubtKind

    def __new__(cls, kind: DoubtKind, text: str) -> Doubt:
        """Return the sentence `text` of this kind."""
        doubt = super().__new__(cls, text)
        doubt.kind = kind
        return doubt

    def __getnewargs__(self) -> tuple[DoubtKind, str]:  # type: ignore[override]
        """Return what makes a copy."""
        return self.kind, str(self)


def kind_of_doubt(cause: str | None) -> DoubtKind:
    """Return the kind of doubt of an UNKNOWN run's cause; `damaged` for a sentence about its files."""
    return cause.kind if isinstance(cause, Doubt) else DoubtKind.damaged


def silent(command: str) -> Doubt:
    """Squeue or sacct did not answer."""
    return Doubt(DoubtKind.silent, f"{command} did not answer")


def silent_about(job_ids: list[str], why: object) -> Doubt:
    """Slurm did not tell whether these jobs of the sweep's name belong to the sweep."""
    return Doubt(DoubtKind.silent, f"job {', '.join(job_ids)} may have it: {why}")


def untold_job(job_id: str | None) -> Doubt:
    """An attempt says that it runs in a job that is in no submission."""
    text = f"its newest attempt is of job {job_id}, of which submissions.jsonl has no line"
    return Doubt(DoubtKind.untold_job, text)


def unreadable(fault: str) -> Doubt:
    """The file system refused; `fault` names the file."""
    return Doubt(DoubtKind.unreadable, fault)


def silent_after_damage(damage: str | None) -> Doubt:
    """Squeue did not answer, and the sweep's own files do not tell of all its jobs.

    Args:
        damage: what cannot be read of submissions.jsonl; None if it tells of no job at all.
    """
    why = (
        "submissions.jsonl tells of none of the jobs that were submitted"
        if damage is None
        else f"a job may have it: {damage}"
    )
    return Doubt(DoubtKind.silent, f"squeue did not answer, and {why}")


def interrupted() -> Doubt:
    """An intent without an answer."""
    text = "its submission was interrupted; the next submit finds out what became of it"
    return Doubt(DoubtKind.interrupted, text)


def other_cluster(where: str) -> Doubt:
    """The run was given to another cluster; `where` as `SchedulerView.elsewhere` says it."""
    return Doubt(DoubtKind.other_cluster, f"it was {where}")


def other_host() -> Doubt:
    """The run was started locally, and not on this host."""
    text = "it was started on another host (or under another name of this one): ask there"
    return Doubt(DoubtKind.other_host, text)


def unseen_result(state: str, exit_code: str, ended_s: float, age_s: float) -> Doubt:
    """The job has ended, and its files do not tell how; they may be younger than what this machine remembers.

    Args:
        state: Slurm's word for the end.
        exit_code: as sacct prints it.
        ended_s: seconds since the end.
        age_s: for how long this machine may show what was before.
    """
    ended = f"its job ended {max(0.0, ended_s):.0f} s ago (Slurm: {state} {exit_code})"
    why = f"its result is not seen here yet: a shared file system may show it up to {age_s:.0f} s late"
    return Doubt(DoubtKind.unseen_result, f"{ended}, and {why}")


def accounting_behind(state: str) -> Doubt:
    """Squeue no longer has the job, and sacct still has it in the queue or at work."""
    return Doubt(DoubtKind.accounting_behind, f"it has left the queue, and sacct still says {state}: ask again")


def alive_without_job(quiet_s: float) -> Doubt:
    """The run lived `quiet_s` seconds ago, and neither squeue nor sacct knows its job."""
    said = f"{max(0.0, quiet_s):.0f} s ago it gave a sign of life, and Slurm does not know its job: ask again"
    return Doubt(DoubtKind.alive_without_job, said)


def new_word(command: str, word: str) -> Doubt:
    """Slurm's state of the job is none of the known ones (slurm/states.py)."""
    return Doubt(DoubtKind.new_word, f"{command} calls its job {word}, a word that is not known here")


def taken(who: str) -> Doubt:
    """A job or a local queue has the run, and submissions.jsonl does not tell of it."""
    return Doubt(DoubtKind.taken, f"{who} has it, and submissions.jsonl has lost the line that says so")


def maybe_taken(job_ids: tuple[str, ...]) -> Doubt:
    """Jobs of the sweep are in the queue, and nothing tells for which runs."""
    return Doubt(
        DoubtKind.maybe_taken,
        f"job {', '.join(job_ids)} of this sweep is in the queue, and submissions.jsonl has lost for which runs: "
        f"scancel --state=PENDING {' '.join(job_ids)}, then submit again",
    )


def lost_spec(advice: str) -> Doubt:
    """The run's line in specs.jsonl is lost; `advice` says what writes it anew."""
    return Doubt(DoubtKind.lost_spec, f"its line in specs.jsonl is lost or damaged. {advice}")
