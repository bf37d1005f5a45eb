"""Explanation of a run's state: a verdict in a sentence, its evidence, what to do, and the history of attempts."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.rules.memory import may_be_auto, smaller_batch, ways
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import typed_words
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, HpcTrainerError, SlurmError
from hpc_trainer.operate.logs import log_files
from hpc_trainer.operate.verdicts import (
    BY_CAUSE,
    BY_STATE,
    MAY_PASS,
    NO_SLOT,
    REFUSALS,
    STRANGE_CLAIM,
    TIMEOUTS,
    TORN_CLAIM,
    WITHOUT_FOLDER,
    Verdict,
    of_unknown,
)
from hpc_trainer.record.bad_nodes import bad_node_lines, keep_bad_node
from hpc_trainer.record.chain import awaited_of, followers_of, look_at, waiting_for
from hpc_trainer.record.doubts import kind_of_doubt
from hpc_trainer.record.environment import changes_of
from hpc_trainer.record.journal import Attempt, read_first_weights
from hpc_trainer.record.last_words import NOT_STARTED
from hpc_trainer.record.ledger import RunLedger, duration, ledger_line, newest_timeouts
from hpc_trainer.record.reading import Faults, is_number, read_ends, read_json
from hpc_trainer.record.run_figures import ask_ledgers
from hpc_trainer.record.run_status import RunStatus
from hpc_trainer.record.signs import Sign
from hpc_trainer.record.states import LOW_GOODPUT, NOT_FINITE, OUT_OF_MEMORY, POOL, TIMEOUT, RunState
from hpc_trainer.record.status import SweepStatus, read_status
from hpc_trainer.record.tracebacks import found_in, sign_of
from hpc_trainer.record.turns import Stuck
from hpc_trainer.runtime.pace import better_limit_min, grace_warning
from hpc_trainer.slurm.jobs import OFF, show_preemption
from hpc_trainer.slurm.shape import Shape
from hpc_trainer.slurm.terms import Reason, explain_reason

# Evidence and help for `why` and the report: memory that was not enough, and last lines with a known meaning.

PARTS = ("weights", "gradients", "optimizer", "average", "activations")
_FRAGMENTED = 0.1  # fraction of the reserved memory: above it, another allocator setting helps


def memory_evidence(memory: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on the content of a rank's memory; `memory` is the worker's record (features/memory_report)."""
    figures = _numbers(memory)
    held = ", ".join(f"{name} {figures[name] / 1e9:.3g}" for name in PARTS if name in figures)
    when = f"after step {memory['step']}" if memory.get("step") else "before the first step"
    if held:
        yield f"GB on the rank {when}: {held} (micro-batch of {memory.get('micro_batch_size')})"
    if "need" in figures:
        yield f"one micro-batch of {memory.get('micro_batch_size')} needs {figures['need'] / 1e9:.3g} GB"
    if {"peak", "limit"} <= figures.keys():
        yield f"{figures['peak'] / 1e9:.3g} of {figures['limit'] / 1e9:.3g} GB at the most"


def memory_advice(config: TrainConfig, memory: Mapping[str, Any]) -> list[str]:
    """Return a line for each remedy legal for this configuration, the largest saving first if savings are known."""
    figures = _numbers(memory)
    parts = {name: figures[name] for name in PARTS if name in figures}
    if "activations" not in parts and "limit" in figures:  # a device that does not count activations
        parts["activations"] = max(0.0, figures["limit"] - sum(parts.values()))
    remedies = []
    for way in ways(config):
        saved = way.saves(parts)
        text = way.text
        if text.startswith("train.micro_batch_size"):
            auto = " or =auto" if may_be_auto(config) else ""
            text = f"a smaller train.micro_batch_size, as ={smaller_batch(config)}{auto}: accumulation keeps the batch"
        remedies.append((saved, f"{text} (saves about {saved / 1e9:.3g} GB)" if saved >= 5e6 else text))
    if "activations" in parts:  # mostly the largest part: without it the largest saving is not known
        remedies.sort(key=lambda remedy: -remedy[0])
    lines = [line for _, line in remedies]
    fragments = figures.get("fragmentation", 0.0)
    if fragments > _FRAGMENTED:
        setting = "+cluster.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        lines.insert(0, f"{setting} ({fragments:.0%} of what was reserved was fragmented)")
    if config.hardware.device_type == "cpu":
        return [*lines, "a larger hardware.mem_gb_per_node (or mem_gb_per_cpu), and --retry-failed: the same run"]
    return [*lines, "larger GPUs (hardware.gpu_type, hardware.constraint)"]


def _numbers(memory: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in memory.items() if is_number(value)}


def meaning_of(run: RunStatus) -> Sign | None:
    """Return the sign in a failed run's last output; None if there is none, or the cause has a verdict of its own."""
    error = run.error
    if not run.state.has_failed or run.cause in (*REFUSALS, *_SAYS_ALL):
        return None
    return sign_of([*last_lines(run), f"{error.get('type', '')}: {error.get('message', '')}"])


_SAYS_ALL = ("diverged", "no_progress", LOW_GOODPUT)
"""Causes that the run itself concluded from more than its last line."""


def advice_values(run: RunStatus, meaning: Sign | None, logs: str = "") -> dict[str, str]:
    """Return the values for the placeholders of a sign's advice.

    Args:
        logs: the command that prints the log to look at; "": that of all ranks.
    """
    node = str(run.error.get("node") or run.node or "NODE")
    before = run.spec.shape.exclude
    return {
        "run": run.run_id, "found": meaning.matched if meaning else "", "memory": more_memory(run.spec.shape),
        "logs": logs or f"hpc-trainer logs {run.run_id} --all-ranks", "node": node,
        "exclude": node if not before else f"'\"{before},{node}\"'",
    }  # fmt: skip


def last_lines(run: RunStatus) -> list[str]:
    """Return the last lines that the run's job or program printed before its failure; empty if they are not known."""
    return str(run.error.get("output", "")).splitlines()


def more_memory(shape: Shape) -> str:
    """Return the override for twice the memory of a shape, or for 4 GB a core if the shape uses the site's default."""
    for name in ("mem_gb_per_gpu", "mem_gb_per_cpu", "mem_gb_per_node"):
        asked_gb = getattr(shape, name)
        if asked_gb is not None:
            return f"hardware.{name}={2 * asked_gb:g}"
    return f"hardware.mem_gb_per_node={4 * shape.tasks_per_node * shape.cpus_per_task}"


NOT_KNOWN = "not_known"
"""Diagnosis of a failure without a sign, a traceback or a recorded cause: no guess."""
_TRACEBACK_LINES = 4
_HINT_OF_HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1"
"""Beginning of the last line of every Hydra app that fails; it tells nothing of the failure."""
_LAST_LINES = 8
_ENDS_AGAIN = (BY_CAUSE["exception"], BY_CAUSE["program"])
_ALLOWS = re.compile(r"checkpoint\.allow_changes=\[[^]]*\]")
_AGAIN = "another configuration is another run: hpc-trainer submit with the key above"


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Explanation of one run; each list is in reading order."""

    run_id: str
    state: RunState
    diagnosis: str
    """Name of the cause: of a sign (record/signs.py), a cause of the journal, Slurm's reason, or the state in small
    letters; `not_known` if nothing shows why the run failed. Runs are grouped by it."""
    verdict: str
    cause: str | None
    pending_reason: str | None
    frame: str | None
    """Innermost line of the user's own code in the traceback of an exception."""
    said: str | None = None
    """Last line that a failed program printed."""
    evidence: list[str]
    advice: list[str]
    timeline: list[str]
    ledger: RunLedger | None = None
    """Use of the run's time; None if it is not known or was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clues:
    """Contribution of a domain to the explanation of a run (hook `clues`); each list is in reading order."""

    headline: str | None = None
    """Sentence that comes before all other evidence."""
    rank: int | None = None
    """Rank whose log shows the cause; None if the domain names no rank."""
    evidence: Sequence[str] = ()
    late_evidence: Sequence[str] = ()
    """Evidence that comes after that of the core."""
    advice: Sequence[str] = ()
    late_advice: Sequence[str] = ()
    """Advice that comes after that of the core."""
    events: Sequence[tuple[float, str]] = ()
    """Lines of the timeline, each with its time in seconds since the epoch."""


def explain(status: SweepStatus, run: RunStatus, *, asks_slurm: bool = True, rank: int | None = None) -> Why:
    """Return the explanation of one run, from its folder and the scheduler's answers.

    Args:
        asks_slurm: ask how the run's partition preempts if a preemption may have cost work. Also ask, once per attempt,
            how long the attempt had its nodes (`ask_ledgers`). If False, there is no ledger. Domains read all files of
            the run only if True.
        rank: the rank whose log is shown; None: the rank that a domain names, else the rank that failed first, if one
            failed by itself.
    """
    clues: list[Clues] = [find(status, run, is_alone=asks_slurm) for find in contributions("clues")]
    named = (rank, *(clue.rank for clue in clues), _rank_to_read(run))
    rank = next((candidate for candidate in named if candidate is not None), None)
    verdict, memory = _verdict(status, run), _memory(status, run)
    meaning = meaning_of(run) if memory is None else None
    if meaning is not None and (meaning.is_of_node or meaning.may_pass) and verdict in _ENDS_AGAIN:
        verdict = MAY_PASS
    diagnosis = _diagnosis(run, verdict, meaning)
    if diagnosis == NOT_KNOWN:
        says = f"{verdict.says} The reason is unknown: hpc-trainer recognises no line of its output."
        verdict = Verdict(says, verdict.advice)
    values = _values(status, run, meaning, rank)
    lines = (*meaning.advice, *verdict.advice) if meaning else verdict.advice
    advice = [line.format(**values).rstrip() for line in lines]
    evidence = [
        *_evidence(status, run, rank, clues), *_places(status, run, rank, meaning), *_of_bad_node(status, run, meaning),
        *(_followed(status, run) if asks_slurm else ()),
    ]  # fmt: skip
    followers = list(_followers(status, run)) if asks_slurm else []
    evidence += followers
    if followers:
        advice.append(
            f"hpc-trainer retry {status.sweep.name}/{run.run_id}: runs that follow it then continue by themselves"
        )
    if memory is not None:
        evidence[1:1] = memory_evidence(memory)
        with contextlib.suppress(ConfigError):  # a configuration of another version: the general advice stays
            advice = [*memory_advice(run.spec.typed(), memory), _AGAIN]
    of_limit, first, last = _of_time_limit(run, values)
    evidence += of_limit
    advice = [*first, *advice, *last]
    advice += [line for clue in clues for line in clue.advice]
    ledger = ask_ledgers(status, [run], status.faults).get(run.run_id) if asks_slurm else None
    if ledger is not None and (line := ledger_line(ledger)) is not None:
        evidence.append(line)
    warning = _grace(run) if asks_slurm else None
    if warning is not None:
        evidence.append(warning)
        advice.append("checkpoint.every=auto, or a partition with more grace")
    evidence += [line for clue in clues for line in clue.late_evidence]
    advice += [line for clue in clues for line in clue.late_advice]
    return Why(
        run_id=run.run_id,
        state=run.state,
        diagnosis=diagnosis,
        verdict=f"{verdict.says} Its last message: {meaning.says}." if meaning else verdict.says,
        cause=run.cause,
        pending_reason=run.pending_reason,
        frame=_frame(run),
        said=_said(run),
        evidence=[*(clue.headline for clue in clues if clue.headline is not None), *evidence],
        advice=advice,
        timeline=_timeline(status, run, clues),
        ledger=ledger,
    )


def _values(status: SweepStatus, run: RunStatus, meaning: Sign | None, rank: int | None) -> dict[str, str]:
    """Return the values that lines of advice name in braces."""
    stuck = _stuck(status, run)
    return {
        **advice_values(run, meaning, _logs(run, rank)), "sweep": status.sweep.name, "job": run.job_id or "JOB",
        "flag": _flag(run), "folder": str(status.sweep.run(run.run_id).folder), "idle": _IDLE if rank is None else "",
        "longer": str(_longer_limit_min(status, run)), "words": typed_words(run.spec.overrides),
        "claim": "" if stuck is None else str(stuck.path),
    }  # fmt: skip


def _of_time_limit(run: RunStatus, values: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Return evidence that the time limit is too short, and the advice that comes first and last because of it."""
    if run.limit_warning is not None:
        return [run.limit_warning], [_NOW_LONGER.format(**values)], []
    timeouts = _timeouts_with_progress(run)
    if not timeouts:
        return [], [], []
    told, more = _steps_to_go(run, timeouts)
    if not (run.state.is_active and more > 1):
        return [told], [], []
    limit_min = min(more, _MUCH_LONGER) * run.spec.shape.time_limit_min
    longer = _NOW_LONGER.format(**{**values, "longer": str(limit_min)})
    return [told], [], [f"{longer}, if its partition allows that long"]


def _verdict(status: SweepStatus, run: RunStatus) -> Verdict:
    if run.state is RunState.UNKNOWN:
        return of_unknown(run.cause, run.own_job)
    if run.waits_in_sweep:
        job_id = status.tending_job
        by = "the same `hpc-trainer submit` submits it" if job_id is None else f"nothing: job {job_id} submits it"
        return Verdict("It waits in the sweep's own queue until Slurm has room for it.", (by,))
    if (stuck := _stuck(status, run)) is not None:
        return TORN_CLAIM if stuck.holder is None else STRANGE_CLAIM
    if run.state is RunState.HELD and run.waits_for is not None:
        return Verdict(f"It is held: it {run.waits_for}.", (_THEN,))
    if _met_its_end(run):
        return BY_CAUSE[OUT_OF_MEMORY]
    if run.cause == NOT_FINITE:
        return BY_CAUSE[NOT_FINITE]
    waits = None if run.pending_reason is None else explain_reason(run.pending_reason)
    is_at_it = run.state in (RunState.RUNNING, RunState.REQUEUED) and run.limit_warning is None
    if is_at_it and (waits is None or not waits.advice) and _timeouts_with_progress(run):
        return BY_CAUSE[TIMEOUTS]
    if waits is not None:
        return _waits(run.state, waits)
    if run.state is RunState.NEW and run.cause is not None:
        return NO_SLOT
    if run.state is RunState.NEW and run.submission is not None:
        return WITHOUT_FOLDER
    if run.state is not RunState.FAILED:
        return BY_STATE[run.state]
    cause = NOT_STARTED if run.failure.get("cause") == NOT_STARTED else run.cause
    return BY_CAUSE.get(cause or "", BY_STATE[RunState.FAILED])


def _stuck(status: SweepStatus, run: RunStatus) -> Stuck | None:
    """Return the claim because of which no slot takes a run that waits for one; None if there is none."""
    waits = run.state is RunState.PENDING or run.state.needs_submit
    return status.stuck.get(run.run_id) if waits else None


def _is_unexplained(run: RunStatus) -> bool:
    """Return True if a run failed, and no line of its own code, no error of Python and no known cause shows why."""
    is_of_program = run.cause in ("program", None) or run.cause not in BY_CAUSE
    return run.state is RunState.FAILED and is_of_program and run.error.keys().isdisjoint(("frame", "said"))


def _diagnosis(run: RunStatus, verdict: Verdict, meaning: Sign | None) -> str:
    if meaning is not None:
        return meaning.name
    if _is_unexplained(run):
        return NOT_KNOWN
    if verdict in (TORN_CLAIM, STRANGE_CLAIM):
        return "claim"
    if run.state is RunState.UNKNOWN:
        return f"unknown_{kind_of_doubt(run.cause).name}"
    if run.state is RunState.OUT_OF_MEMORY and run.cause != OUT_OF_MEMORY:
        return "host_memory"
    if verdict in BY_CAUSE.values():
        name = next(name for name, of_cause in BY_CAUSE.items() if of_cause is verdict)
        return "exception" if name == "program" else name.replace(" ", "_")
    if run.pending_reason is not None:
        return run.pending_reason.partition(",")[0].strip("() ")
    return str(run.state.value).lower()


_LOOKED_THROUGH = 4 * 2**20


def _places(status: SweepStatus, run: RunStatus, rank: int | None, meaning: Sign | None) -> list[str]:
    """Return file and line of the verdict's evidence: the line with the sign, else the error's last line."""
    if not run.state.has_failed or run.cause in REFUSALS:
        return []
    said = [line for line in str(run.error.get("traceback", "")).splitlines() if line.strip()]
    line = meaning.line if meaning is not None else said[-1] if said else _said(run) or ""
    files = log_files(status, run, None)
    own = [file for file in files if rank is not None and file.name.endswith(f".rank-{rank}.log")]
    for file in [*reversed(own), *reversed([file for file in files if file not in own])]:
        for candidate in dict.fromkeys((line, line.partition(": ")[2])):
            number = _line_in(file, candidate)
            if number is not None:
                shown = candidate.strip()
                return [f"{file}:{number}: {shown if len(shown) <= _SHOWN else f'{shown[: _SHOWN - 1]}…'}"]
    journal = status.sweep.run(run.run_id).journal(run.attempts[-1].attempt) if run.attempts else None
    return [f"{journal}: {run.cause}"] if journal is not None and run.attempts[-1].has_ended else []


_SHOWN = 200


def _line_in(file: Path, line: str) -> int | None:
    """Return the number of a log's newest line with this text; None if there is none or the log is too large."""
    faults = Faults()
    try:
        if not line.strip() or file.stat().st_size > _LOOKED_THROUGH:
            return None
    except OSError:
        return None
    text = read_ends(file, faults, last=_LOOKED_THROUGH)[1].decode(errors="replace")
    return next(found_in(text.splitlines(), line), None)


def _of_bad_node(status: SweepStatus, run: RunStatus, meaning: Sign | None) -> list[str]:
    """Return lines on earlier failures of the node on which a run failed; record this failure if the node caused it."""
    node = run.error.get("node") or run.node
    if not isinstance(node, str) or not (run.state.has_failed or run.state is RunState.NODE_FAIL):
        return []
    if run.state is RunState.NODE_FAIL or (meaning is not None and meaning.is_of_node):
        name = "node_fail" if meaning is None else meaning.name
        keep_bad_node(status.sweep, run.run_id, len(run.attempts), node, name)
    return bad_node_lines(status.sweep, node)


_THEN = "restart the runs that it follows; then it continues by itself. To give it up: hpc-trainer cancel {sweep}/{run}"
_MOST_FOLLOWED = 5


def _followed(status: SweepStatus, run: RunStatus) -> list[str]:
    """Return a line for each run that a waiting run follows and that is not complete."""
    if run.attempts or not run.state.is_active or run.spec.is_lost:
        return []
    awaited = awaited_of(run.spec.config, status.sweep.folder.parent)
    stands = look_at(awaited)
    if awaited and not stands:
        return ["all runs that it follows are complete"]
    more = [f"and {len(stands) - _MOST_FOLLOWED} more"] if len(stands) > _MOST_FOLLOWED else []
    return [f"follows {stand}" for stand in stands[:_MOST_FOLLOWED]] + more


def _followers(status: SweepStatus, run: RunStatus) -> Iterator[str]:
    """Yield a line for each sweep with runs that wait for a run that nothing restarts by itself."""
    if run.state.is_active or run.state is RunState.COMPLETED:
        return
    for follower in followers_of(status.sweep):
        with contextlib.suppress(HpcTrainerError, OSError):  # a sweep that cannot be read now
            waiting = waiting_for(read_status(follower, is_look=True), status.sweep, run.run_id)
            if waiting:
                more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
                yield f"{follower.name}/{waiting[0].run_id}{more} follows it and is {waiting[0].state.value}"


def _waits(state: RunState, reason: Reason) -> Verdict:
    verdict = BY_STATE[state]
    return Verdict(f"{verdict.says} {reason.says[0].upper()}{reason.says[1:]}.", reason.advice or verdict.advice)


def _met_its_end(run: RunStatus) -> bool:
    """Return True if a rank itself reported that it ran out of memory; earlier versions recorded an exception."""
    error = run.error
    if run.state is RunState.OUT_OF_MEMORY:
        return run.cause == OUT_OF_MEMORY
    return run.state is RunState.FAILED and "OutOfMemoryError" in str(error.get("type", ""))


def _memory(status: SweepStatus, run: RunStatus) -> Mapping[str, Any] | None:
    """Return memory figures of a run that ran out of memory: those at its end replace those of its first steps."""
    if not _met_its_end(run):
        return None
    before = read_json(status.sweep.run(run.run_id).memory, status.faults_of(run.run_id)) or {}
    at_end = {key: value for key, value in (run.error.get("memory") or {}).items() if value is not None}
    return {**before, **at_end}


def _flag(run: RunStatus) -> str:
    """Return the option that would allow a refused resume, as the refusal names it."""
    match = _ALLOWS.search(str(run.error.get("message", "")))
    return match.group() if match else "checkpoint.allow_changes=[KEY,..]"


def _frame(run: RunStatus) -> str | None:
    is_told = run.state.has_failed and run.cause not in REFUSALS
    frame = run.error.get("frame") if is_told else None
    return None if frame is None else str(frame).partition("\n")[0]


def _said(run: RunStatus) -> str | None:
    lines = last_lines(run) if run.state.has_failed and run.cause not in REFUSALS else []
    return next(
        (line.strip() for line in reversed(lines) if line.strip() and not line.startswith(_HINT_OF_HYDRA)), None
    )


def _evidence(status: SweepStatus, run: RunStatus, rank: int | None, clues: Sequence[Clues]) -> Iterator[str]:
    error = run.error
    if (stuck := _stuck(status, run)) is not None:
        yield f"claim: {stuck.path}" + (f", of {stuck.who}" if stuck.who else "")
    if run.state.has_failed and error:
        where = f"rank {error['rank']} on {error.get('node')}: {error.get('type')}" if "rank" in error else run.cause
        yield f"{where}: {str(error.get('message', '')).strip()}"
        frames = [
            line for line in str(error.get("traceback", "")).splitlines() if line.startswith("  ") and line.strip(" ^~")
        ]
        yield from (f"  {line}" for line in last_lines(run)[-_LAST_LINES:])
        if run.cause not in REFUSALS:
            yield from frames[-_TRACEBACK_LINES:]
    elif run.cause == NOT_FINITE and run.warning is not None:
        yield run.warning
    elif run.pending_reason is not None:  # the verdict says what this reason means
        yield "; ".join([*([] if run.cause is None else [run.cause]), f"Slurm's reason: {run.pending_reason}"])
    elif run.reason is not None and run.state is not RunState.COMPLETED and run.reason.upper() != run.state.value:
        yield run.reason
    if run.turn is not None:
        where = f"place {run.turn.place} of slot {run.turn.holder.job_id} on {run.turn.holder.node}"
        yield f"it is at work in {where}, since {_clock(run.turn.time)}"
    if run.rivals and not run.is_claimed:
        listed = ", ".join(f"{job_id} ({submission.hardware})" for submission, job_id in run.rivals)
        yield f"the first of its jobs that starts executes the run; the others are {listed}"
    yield f"step {run.progress.replace('/', ' of ')}, {len(run.attempts)} attempt(s)".removeprefix("step -, ")
    paths = status.sweep.run(run.run_id)
    first_weights = read_first_weights(paths, status.faults_of(run.run_id))
    if first_weights is not None:
        yield first_weights.line()
    yield from (line for clue in clues for line in clue.evidence)
    yield from changes_of(paths, len(run.attempts))
    if run.state is not RunState.COMPLETED:
        yield from (f"log: {path}" for path in _newest_log(status, run, rank))


def _rank_to_read(run: RunStatus) -> int | None:
    """Return the rank that failed first; None if it may only have waited for another rank."""
    if run.spec.shape.world_size == 1:
        return 0
    rank = run.error.get("rank")
    return rank if isinstance(rank, int) and run.cause not in _WAITED else None


def _timeouts_with_progress(run: RunStatus) -> list[tuple[int, float]]:
    """Return steps and seconds of the newest attempts if the time limit ended at least two in a row, else [].

    Each of them made steps. A program does not say where it begins: it begins where the attempt before it was.
    """
    if run.state is RunState.COMPLETED or run.state.has_failed:
        return []
    made: list[tuple[int, float]] = []
    ended = [attempt for attempt in run.attempts if attempt.has_ended]
    for before, attempt in zip([None, *ended], ended, strict=False):
        begin = attempt.resumed_step if before is None or before.saved_step is None else before.saved_step
        begin = 0 if begin is None or (before is None and run.spec.is_program) else begin
        steps = (attempt.saved_step or 0) - begin
        if attempt.cause != TIMEOUT or steps <= 0:
            made = []
        else:
            made.append((steps, (attempt.end_time or attempt.start_time) - attempt.start_time))
    return made[-_LOOKED_AT:] if len(made) > 1 else []


def _steps_to_go(run: RunStatus, timeouts: Sequence[tuple[int, float]]) -> tuple[str, int]:
    """Return a line about the attempts that the remaining steps need, and their number; 0 if it is not known."""
    steps, seconds = (math.fsum(column) / len(timeouts) for column in zip(*timeouts, strict=True))
    line = (
        f"the time limit of {run.spec.shape.time_limit_min} min ended its last {len(timeouts)} attempts, and each made "
        f"some {steps:.3g} steps"
    )
    if not run.num_steps:
        return f"{line}; how many steps it has is not known", 0
    left = max(0, run.num_steps - run.step)
    more = math.ceil(left / steps)
    return f"{line}: for the other {left} steps it needs {more} more, {duration(more * seconds)}", more


def _longer_limit_min(status: SweepStatus, run: RunStatus) -> int:
    """Return a longer time limit, in minutes, for a run whose time limit is too short."""
    shape = run.spec.shape
    asked_s = None if run.spec.is_lost else run.spec.config["cluster"].get("signal_lead_s")
    ended = newest_timeouts(status.sweep.run(run.run_id), run.attempts, _LOOKED_AT, faults=Faults())
    return better_limit_min(shape.time_limit_min, 0.0 if ended is None else ended.other_s, asked_s)


_LOOKED_AT = 3
_MUCH_LONGER = 4  # partitions bound it, and a longer job waits longer
_NOW_LONGER = (
    "hpc-trainer cancel {run} && hpc-trainer retry {run} hardware.time_limit_min={longer}: it continues with more time"
)
_WAITED = ("stuck", "peer_lost")
_IDLE = "; the rank that is not in a collective is the one to look at"


def _logs(run: RunStatus, rank: int | None) -> str:
    option = "" if run.spec.shape.world_size == 1 else " --all-ranks" if rank is None else f" --rank {rank}"
    return f"hpc-trainer logs {run.run_id}{option}"


def _newest_log(status: SweepStatus, run: RunStatus, rank: int | None) -> list[Path]:
    files = log_files(status, run, rank or 0)
    return ([file for file in files if file.name.endswith(f".rank-{rank}.log")] or files)[-1:]


def _grace(run: RunStatus) -> str | None:
    """Return the warning of `plan` for a run that may have lost work by a preemption."""
    was_preempted = any(attempt.cause == "preempted" or not attempt.has_ended for attempt in run.attempts)
    partition = run.spec.shape.partition
    if run.stop_s is None or not was_preempted or partition is None or run.state is RunState.RUNNING:
        return None
    try:
        preemption = show_preemption(partition)
    except SlurmError:
        return None
    if preemption is None or preemption.mode == OFF:
        return None
    return grace_warning(run.stop_s, partition, preemption.grace_s, preemption.kill_wait_s)


def _timeline(status: SweepStatus, run: RunStatus, clues: Sequence[Clues]) -> list[str]:
    events = [(attempt.start_time, list(_story(attempt))) for attempt in run.attempts]
    events += [
        (change.time, [f"{_clock(change.time)}  {change.user} changed {' '.join(change.changes)}"])
        for change in status.ledger.changes
        if run.run_id in change.run_ids
    ]
    events += [(seconds, [f"{_clock(seconds)}  {line}"]) for clue in clues for seconds, line in clue.events]
    return [line for _, lines in sorted(events, key=lambda event: event[0]) for line in lines]


def _story(attempt: Attempt) -> Iterator[str]:
    has_job = attempt.executor in ("slurm", POOL)
    where = f"{'job' if attempt.executor == 'slurm' else 'slot'} {attempt.job_id} on {attempt.node}" if has_job else ""
    where = where or f"on {attempt.node}"
    # A program never reports where it begins, and an attempt may end before it knows its first step.
    step = "" if attempt.resumed_step is None else f" from step {attempt.resumed_step}"
    yield f"{_clock(attempt.start_time)}  attempt {attempt.attempt} began{step}, {where}"
    for note in attempt.guarded:
        said = note.get("text") or f"{note.get('count', 1)} spike(s) up to step {note['step']} skipped"
        yield f"{_clock(float(note['time']))}  attempt {attempt.attempt}: {said}"
    if not attempt.has_ended or attempt.end_time is None or attempt.state is None:
        return
    cause = attempt.cause if attempt.cause is not None and attempt.cause.upper() != attempt.state.value else ""
    parts = [f"attempt {attempt.attempt} ended: {attempt.state.value}", cause]
    parts += [attempt.signal or "", "" if attempt.saved_step is None else f"saved step {attempt.saved_step}"]
    parts += [attempt.action if attempt.action not in (None, "none") else ""]
    yield f"{_clock(attempt.end_time)}  {', '.join(part for part in parts if part)}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# --- runs with equal explanations ---

_WHERE = re.compile(r"^rank \d+ on \S+: ")
"""Prefix of an error; the same error on another rank or node counts as equal."""
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


def by_cause(found: Sequence[Why]) -> list[list[Why]]:
    """Return the explanations in groups of runs that failed for the same cause, in the order of their first run."""
    groups: dict[tuple[str, ...], list[Why]] = {}
    for why in found:
        groups.setdefault(_cause_of(why), []).append(why)
    return list(groups.values())


def because_of(group: Sequence[Why]) -> list[str]:
    """Return the evidence that the runs of a group share; an error omits its rank and node if these differ."""
    first = [*([] if group[0].frame is None else [group[0].frame]), *_because(group[0])]
    if len({*map(tuple, map(_because, group))}) > 1:
        first[-1] = _WHERE.sub("", first[-1])
    return first


def _because(why: Why) -> list[str]:
    return [] if why.state is RunState.CANCELLED else why.evidence[:1]  # its steps differ from those of other runs


def _cause_of(why: Why) -> tuple[str, ...]:
    """Return a key that is equal for runs with the same cause: numbers, paths, ranks and nodes do not count."""
    lines = [_WHERE.sub("", line).partition("\n")[0] for line in _because(why)]
    words = [" ".join(word for word in line.split() if "/" not in word) for line in lines]
    frame = [] if why.frame is None else [why.frame]
    return (why.diagnosis, why.state.value, *frame, *(_NUMBER.sub("0", text) for text in words))
