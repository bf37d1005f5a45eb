"""Charts of a search for `report`: the values of its trials in the order of their draws, and who reached each rung."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_trainer.operate.report.data import Bars, Dots, Panel, ReportPart
from hpc_trainer.record.reading import Faults, is_there
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus

# search.commands and search.folder are imported for a search alone: the report of a grid does without them.
if TYPE_CHECKING:
    from hpc_trainer.search.folder import Search, Trial

_SECTION = "Search"


def report_part(status: SweepStatus) -> ReportPart:
    """Return the charts of a search (hook `report_parts`); nothing for a sweep without one."""
    faults = Faults()
    if not is_there(status.sweep.search, faults=faults):
        return ReportPart(notes=faults)
    from hpc_trainer.search.commands import view_of

    view = view_of(status.sweep)
    if view is None:
        return ReportPart(notes=[f"{status.sweep.search} or a trial's file cannot be read: no charts of the search."])
    search, trials = view
    panels = [history(search, trials), *([survival(search, trials)] if search.settings.rungs else [])]
    return ReportPart(
        panels=[panel for panel in panels if panel.dots or panel.bars],
        ranked_by=(search.settings.metric, not search.is_max),
    )


def history(search: Search, trials: Sequence[Trial]) -> Panel:
    """Return the value of each trial by its number, with the best complete one so far."""
    complete = [(trial, trial.value) for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    paused = [
        (trial, trial.at_rungs[max(trial.at_rungs)])
        for trial in trials
        if trial.state is RunState.PAUSED and trial.at_rungs and math.isfinite(trial.at_rungs[max(trial.at_rungs)])
    ]
    best: list[tuple[float, float]] = []
    for trial, value in complete:
        before = best[-1][1] if best else value
        best += [(trial.number, before), (trial.number, (max if search.is_max else min)(value, before))]
    if best:
        best.append((trials[-1].number, best[-1][1]))
    groups = (("complete", complete, False), ("paused, the value at its rung", paused, True))
    return Panel(
        section=_SECTION, title="History", x_label="trial", y_label=search.settings.metric,
        note="A trial is drawn with what is known then; the line is the best complete trial so far.",
        line=("best so far", best) if best else None,
        dots=[
            Dots(
                name=name, points=[(trial.number, value) for trial, value in group],
                run_ids=[trial.run_id for trial, _ in group], is_faint=is_faint,
            )
            for name, group, is_faint in groups
            if group
        ],
    )  # fmt: skip


def survival(search: Search, trials: Sequence[Trial]) -> Panel:
    """Return how many trials have a result at each rung, and how many of them are paused there."""
    rungs = search.settings.rungs
    went_on, paused, failed, at_work = ([0] * (len(rungs) + 2) for _ in range(4))
    for trial in trials:
        has_result = bool(trial.at_rungs) or trial.state is RunState.COMPLETED
        (went_on if has_result else failed if trial.is_over else at_work)[0] += 1
        for place, rung in enumerate(rungs, start=1):
            if rung in trial.at_rungs:
                is_paused = trial.state is RunState.PAUSED and trial.until == rung
                (paused if is_paused else went_on)[place] += 1
    complete = [0] * (len(rungs) + 1) + [sum(trial.state is RunState.COMPLETED for trial in trials)]
    last = f"step {search.num_steps}" if search.num_steps else "end"
    parts = (
        ("went on", went_on, "c0"), ("paused", paused, "wait"), ("failed or cancelled", failed, "bad"),
        ("at work", at_work, "rest"), ("complete", complete, "good"),
    )  # fmt: skip
    return Panel(
        section=_SECTION, title="Rungs", x_label="", y_label="trials",
        note="Trials with a result at each rung. A paused one keeps its checkpoint, and may be promoted later.",
        categories=["drawn", *(f"step {rung}" for rung in rungs), last],
        bars=[Bars(name=name, heights=heights, tone=tone) for name, heights, tone in parts if any(heights)],
    )  # fmt: skip
