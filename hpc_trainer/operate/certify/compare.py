"""Two runs side by side, from their traces and files alone: what differs first, and why that is likely. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.runs.checkpoint_folders import committed
from hpc_trainer.runs.interruptions import LOOSE, LOOSE_BUFFER
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.metrics_log import SPEED, read_metrics
from hpc_trainer.runs.reading import read_lines

# Speeds and times are never the same twice.
_NOT_COMPARED = frozenset(("step", "time", *SPEED))
INPUTS, RANDOM = "inputs", "random."


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first step at which two runs differ, on which rank, and in what: `names` of tensors and numbers."""

    step: int
    rank: int
    names: tuple[str, ...]

    @property
    def state(self) -> tuple[str, ...]:
        """Those that a checkpoint holds, inputs and random states left out."""
        return tuple(name for name in self.names if name != INPUTS and not name.startswith(RANDOM))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one run left: by rank the lines of its trace, each metric by step, the bytes of its last checkpoint."""

    lines: tuple[tuple[Mapping[str, Any], ...], ...]
    metrics: Mapping[int, Mapping[str, float]]
    files: Mapping[str, bytes]
    last_step: int | None

    def steps(self, rank: int) -> dict[int, Mapping[str, str]]:
        """Step -> leaves; of a step that was done twice the last time counts."""
        return {line["step"]: line["leaves"] for line in self.lines[rank] if line["kind"] == "step"}

    def find(self, rank: int, kind: str, *, step: int, before: int | None = None) -> Mapping[str, str] | None:
        """The newest line of a kind at a step, of an attempt before `before`."""
        for line in reversed(self.lines[rank]):
            if (line["kind"], line["step"]) == (kind, step) and (before is None or line["attempt"] < before):
                leaves: Mapping[str, str] = line["leaves"]
                return leaves
        return None

    def resumes(self) -> list[tuple[int, int]]:
        """(attempt, step) of every start after the first that went on from a checkpoint."""
        found = [(line["attempt"], line["step"]) for line in self.lines[0] if line["kind"] == "restored"]
        return [each for each in found[1:] if each[1] > 0]


def read_trace(paths: RunPaths, world_size: int) -> Trace:
    """Reads what a finished run left. Files that it did not write are empty."""
    newest = committed(paths.checkpoints)[:1]
    metrics: dict[int, dict[str, float]] = {}
    for record in read_metrics(paths.metrics):
        kept = {key: value for key, value in record.items() if key not in _NOT_COMPARED}
        metrics.setdefault(record["step"], {}).update(kept)
    return Trace(
        lines=tuple(tuple(read_lines(paths.trace(rank))) for rank in range(world_size)),
        metrics=metrics,
        files={
            path.name: path.read_bytes()
            for _, folder in newest
            for path in sorted(folder.iterdir())
            if path.name != "manifest.json"  # it holds the attempt's number
        },
        last_step=newest[0][0] if newest else None,
    )


def first_difference(one: Trace, other: Trace) -> First | None:
    """The first step at which the traces differ; None if they are the same at every step."""
    found = [first for rank in range(len(one.lines)) for first in _first_of_rank(one, other, rank)]
    return min(found, key=lambda first: (first.step, first.rank), default=None)


def _first_of_rank(one: Trace, other: Trace, rank: int) -> Iterator[First]:
    here, there = one.steps(rank), other.steps(rank)
    for step in sorted(here.keys() | there.keys()):
        names = _unlike(here.get(step, {}), there.get(step, {}))
        if names:
            yield First(step=step, rank=rank, names=names)
            return


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    keys = [*one, *(key for key in other if key not in one)]
    return tuple(key for key in keys if one.get(key) != other.get(key))


def other_files(one: Trace, other: Trace) -> tuple[str, ...]:
    """Names of the files of the last checkpoint whose bytes differ."""
    return _unlike(one.files, other.files)


def other_metrics(one: Trace, other: Trace, twin: Trace) -> tuple[tuple[int, str], ...]:
    """(step, metric) that differ; metrics that differ between `one` and its `twin` are times or the like: left out."""
    unsteady = {name for _, name in _unlike_metrics(one, twin)}
    return tuple(each for each in _unlike_metrics(one, other) if each[1] not in unsteady)


def _unlike_metrics(one: Trace, other: Trace) -> list[tuple[int, str]]:
    return [
        (step, name)
        for step in sorted(one.metrics.keys() | other.metrics.keys())
        for name in _unlike(one.metrics.get(step, {}), other.metrics.get(step, {}))
        # NaN is not equal to itself, and a run that diverged the same way twice is the same.
        if repr(one.metrics.get(step, {}).get(name)) != repr(other.metrics.get(step, {}).get(name))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why two runs differ, as far as the traces tell: a short name of the kind, a sentence, and what to do."""

    kind: str
    text: str
    advice: str


_UNSEEDED = (
    "Change training samples in augment(inputs, generators) of the data set: row i draws from generators[i] alone, a "
    "function of (seed, epoch, sample). __getitems__ is told no epoch: it must depend on the indices alone "
    "(docs/own_model_and_data.md)."
)
_UNSEEDED_OWN_LOOP = (
    "Draw from np.random.default_rng((seed, epoch, index)) of each sample, not from a global generator; or give the "
    "generator, and the position in the data, to run.save and run.restore."
)
_UNSAVED = (
    "Make it a buffer (register_buffer), if it is a tensor; or return it from get_extra_state of the module that holds "
    "it, and take it back in set_extra_state: both are saved with the model."
)
_UNSAVED_OWN_LOOP = (
    "Give it to run.save by a name of its own, and take it from run.restore; or make it a part of the model's state: "
    "register_buffer, or get_extra_state and set_extra_state."
)


def why_undisturbed_differ(first: First, *, deterministic: bool, has_own_loop: bool = False) -> Reason:
    """Two runs with the same seed that nobody disturbed are not the same.

    Args:
        has_own_loop: `train.main` is a person's own, which knows epochs and has calls of run.save.
    """
    where = f"at step {first.step}"
    if INPUTS in first.names:
        return Reason(
            kind="unseeded data",
            text=f"the model's inputs differ {where} already between two undisturbed runs: the data set, or an "
            "augmentation in it, draws from a generator that nobody seeds.",
            advice=_UNSEEDED_OWN_LOOP if has_own_loop else _UNSEEDED,
        )
    if not first.state and any(name.startswith(RANDOM) for name in first.names):
        return Reason(
            kind="random numbers drawn",
            text=f"the random state differs {where} while all tensors are the same: something draws now more, now "
            "fewer numbers, or seeds a global generator by the clock.",
            advice="Look for seeding and for draws that hang on time, threads or the process.",
        )
    switch = "" if deterministic else " train.deterministic=false allows it; set it to true."
    return Reason(
        kind="nondeterministic computation",
        text=f"two undisturbed runs get the same inputs and random states, and {_some(first.state)} differ {where}: an "
        f"operation gives now one result, now another, or your model draws from a generator that nobody seeds.{switch}",
        advice="Name the operation with torch.use_deterministic_algorithms(True), or seed the generator.",
    )


def why_resumed_differs(
    first: First, undisturbed: Trace, resumed: Trace, *, num_workers: int, has_own_loop: bool = False
) -> Reason:
    """Undisturbed runs are the same; the one that was interrupted is not. Arguments as above."""
    earlier = [(attempt, step) for attempt, step in resumed.resumes() if step < first.step]
    if not earlier:
        return Reason(
            kind="unknown",
            text="it differs before any resume: a start counts, though not what was saved.",
            advice="Compare the logs of the attempts.",
        )
    attempt, step = earlier[-1]
    rank = first.rank
    saved, restored = (
        resumed.find(rank, "saved", step=step, before=attempt),
        _line_of(resumed, rank, attempt, "restored"),
    )
    began = _line_of(resumed, rank, attempt, "began")
    where = f"after the resume at step {step}"
    if saved and restored:
        names = _unlike({k: v for k, v in saved.items() if not k.startswith((LOOSE, LOOSE_BUFFER))}, restored)
        if names:
            what = "run.restore, what run.save was given" if has_own_loop else "loading the checkpoint, what was saved"
            return Reason(
                kind="not put back",
                text=f"{_some(names)} are not, after {what} at step {step}.",
                advice="load_state_dict (of a module set_extra_state too) must take over all that is saved of it.",
            )
    if INPUTS in first.names:
        return _why_inputs(where, num_workers, has_own_loop)
    if saved and began:
        names = tuple(
            name for name in _unlike(saved, began) if name.startswith((LOOSE, LOOSE_BUFFER)) and name in saved
        )
        if names:
            return _why_loose(names, saved, began, step, has_own_loop)
    num_ranks = len(resumed.lines)
    if num_ranks > 2 and not any(name.startswith(RANDOM) for name in first.names):
        return Reason(
            kind="reduction order",
            text=f"inputs, random states and all that is saved are the same {where}, and sums over {num_ranks} ranks "
            "are not: gradients may be summed in another order in the first steps of a start.",
            advice="DistributedDataParallel(.., find_unused_parameters=True), and train.deterministic=true."
            if has_own_loop
            else "train.deterministic=true",
        )
    return Reason(
        kind="missing state",
        text=f"all that is saved was put back, and inputs are the same, but {_some(first.names)} differ {where}: "
        "something outside of what is saved has a part in it (a global, a closure, a generator of your own).",
        advice=f"Compute it from the step, or keep it. {_UNSAVED_OWN_LOOP}"
        if has_own_loop
        else f"Keep it in the model. {_UNSAVED}",
    )


def _why_loose(
    names: tuple[str, ...], saved: Mapping[str, str], began: Mapping[str, str], step: int, has_own_loop: bool
) -> Reason:
    """What a model carries and no checkpoint holds is not, after the resume, what it was at the save."""
    shown = [name.removeprefix(LOOSE).removeprefix(LOOSE_BUFFER) for name in names]
    was, now = (lines.get(names[0], "nothing") for lines in (saved, began))
    values = f"{_some(shown)}: {was} when step {step} was saved, {now} after the resume at step {step}."
    if names[0].startswith(LOOSE_BUFFER):
        return Reason(
            kind="missing state",
            text=f"{values} It is a buffer with persistent=False, so no checkpoint holds it.",
            advice="register_buffer(.., persistent=True), the default: then it is saved with the model.",
        )
    return Reason(
        kind="missing state",
        text=f"{values} It is no part of state_dict, so no checkpoint holds it.",
        advice=_UNSAVED_OWN_LOOP if has_own_loop else _UNSAVED,
    )


def _why_inputs(where: str, num_workers: int, has_own_loop: bool) -> Reason:
    workers = (
        f" The {num_workers} loader processes begin with the same random state at every start."
        if num_workers
        else " It keeps something of its own: a position, a counter, a generator."
    )
    return Reason(
        kind="unseeded data",
        text=f"the model's inputs differ {where}: the data set makes a batch from more than the indices.{workers}",
        advice=_UNSEEDED_OWN_LOOP if has_own_loop else _UNSEEDED,
    )


def _line_of(trace: Trace, rank: int, attempt: int, kind: str) -> Mapping[str, str] | None:
    found = (line["leaves"] for line in trace.lines[rank] if (line["kind"], line["attempt"]) == (kind, attempt))
    return next(found, None)


def _some(names: tuple[str, ...] | list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else "nothing"
