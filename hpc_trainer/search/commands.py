"""`plan` and `submit` of a search, and its lines in `status` and `results`."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError, ExitCode, HpcTrainerError, RunStateError
from hpc_trainer.operate.find import existing_sweep
from hpc_trainer.operate.results import BestRun
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.reading import Faults, is_there, read_json
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus
from hpc_trainer.search.folder import Search, Trial, Trials, override_of, read_search, write_search
from hpc_trainer.search.next_run import brackets, is_over, stop_reason

if TYPE_CHECKING:
    from hpc_trainer.cli.options import Chosen, Given
    from hpc_trainer.launch.freeze import Grid
    from hpc_trainer.launch.plan import SweepPlan
    from hpc_trainer.launch.searches import SearchPlan, SubmittedSearch
    from hpc_trainer.search.define import Defined

SOURCE = "search"
"""Source in the submission of a search's pool (pool_runs.py)."""
_SHORT_WORDS = ("search=", "search.sampler=")


class SearchKind:
    """Searches among the grids of `plan` and `submit`, of the command line and in Python (hook `grid_kinds`)."""

    def takes(self, overrides: Sequence[str]) -> bool:
        """Return True if the overrides have `search=SAMPLER` with another sampler than none."""
        named = [word for word in overrides if word.startswith(_SHORT_WORDS)]
        return bool(named) and named[-1].partition("=")[2] != "none"

    def plan_search(
        self, overrides: Sequence[str], *, app: str | None, config_dirs: Sequence[Path], trust: Sequence[str]
    ) -> SearchPlan:
        """Return the plan of a search; write nothing."""
        from hpc_trainer.search.define import define

        return plan_search(define(overrides, app=app, config_dirs=config_dirs, trust=trust))

    def submit_search(
        self, overrides: Sequence[str], *, app: str | None, config_dirs: Sequence[Path], trust: Sequence[str]
    ) -> SubmittedSearch:
        """Write a search and start its slots."""
        from hpc_trainer.search.define import define

        return submit_search(define(overrides, app=app, config_dirs=config_dirs, trust=trust))

    def plan(self, given: Given, chosen: Chosen, *, as_json: bool) -> None:
        """Show the search; write nothing. Exit with 2 if it could not be submitted."""
        from hpc_trainer.cli.common import print_json, print_next, say
        from hpc_trainer.cli.show_plan import submit_words

        defined = _defined(given, chosen)
        plan = plan_search(defined)
        if as_json:
            print_json(plan_json(plan, defined))
        else:
            for line in [*plan_lines(plan, defined), *(f"Note: {note}" for note in plan.notes)]:
                say(line)
            for problem in plan.problems:
                say(problem, "[red]Problem:[/] ")
            if not plan.problems:
                print_next(f"submit {submit_words()}")
        if plan.problems:
            sys.exit(ExitCode.USAGE)

    def submit(self, given: Given, chosen: Chosen, *, wait: bool, as_json: bool) -> None:
        """Write the search and start its slots; with `wait`, show progress to the end."""
        from hpc_trainer.cli.common import print_json, print_next, say

        defined = _defined(given, chosen)
        done = submit_search(defined)
        name, settings = defined.sweep.name, defined.search.settings
        if as_json and not wait:
            drawn = _count(defined)  # slots may have drawn trials since
            print_json({"sweep": name, "trials": settings.trials, "drawn": drawn, "job_id": done.job_id or None})
            return
        if not as_json:
            say(f"Search {name}: {_submitted(defined, done)}")
        if wait:
            _wait(defined, done.job_id, as_json=as_json)
        elif not as_json:
            print_next(f"status --watch {name}" if done.job_id else f"best {name}")


KIND = SearchKind()


def _submitted(defined: Defined, done: SubmittedSearch) -> str:
    """Return what a submit did, as a sentence."""
    trials = defined.search.settings.trials
    if not done.job_id:
        return (
            f"{done.num_already} trials were drawn and have ended; nothing is left to submit. For more trials repeat "
            "the command with a larger search.trials."
        )
    if not done.arrays:
        return f"{trials} trials; the slots of job {done.job_id}, which an earlier submit started, draw them."
    slots, per_node = done.plan.arrays[0].slots, done.plan.arrays[0].per_node
    places = f" with {per_node} places each" if per_node > 1 else ""
    return f"{trials} trials, drawn as trials end, by {slots} slot(s){places} of job {done.job_id}."


def _defined(given: Given, chosen: Chosen) -> Defined:
    from hpc_trainer.search.define import define

    for option, is_given in (("--fresh", chosen.fresh), ("--extend", chosen.extend)):
        if is_given:
            raise ConfigError(f"{option} is for grids. For a search that begins anew, use another sweep_name.")
    return define(given.overrides or (), app=given.app, **given.places)


def _problems(defined: Defined) -> list[str]:
    """Return why the search does not fit into its sweep's folder."""
    from hpc_trainer.search.define import find_change

    problems = []
    sweep = defined.sweep
    old = read_search(sweep)
    if old is None and is_there(sweep.specs):
        problems.append(f"the sweep {sweep.name} has runs of a grid. Give the search a sweep_name of its own.")
    change = None if old is None else find_change(old, defined.search)
    if change is not None:
        problems.append(
            f"the sweep {sweep.name} has another search: {change}. Repeat the old values, or give this search a "
            f"sweep_name of its own; with search.from={sweep.name} its sampler knows the old trials."
        )
    reason = None if old is None or change is not None else stop_reason(defined.search, _known(defined), sweep.name)
    if reason is not None:
        problems.append(f"the search has stopped: {reason}")
    if defined.search.bases[0].spec.shape.num_nodes > 1:
        problems.append("hardware.num_nodes: a trial of a search is on one node. Use hardware.num_nodes=1.")
    return problems


def _sample(defined: Defined) -> Grid:
    """Return a grid of one run, which has the shape and environment of all trials."""
    return dataclasses.replace(defined.grid, specs=(defined.search.bases[0].spec,))


def _known(defined: Defined) -> list[Trial]:
    return Trials(defined.sweep, defined.search).read()


def _count(defined: Defined) -> int:
    return Trials(defined.sweep, defined.search).count()


def plan_search(defined: Defined) -> SearchPlan:
    """Return the plan that `submit_search` would carry out; write nothing."""
    from hpc_trainer.launch.grids import check_new

    plan, _ = check_new(_sample(defined), to_draw=defined.search.settings.trials, must_answer=False)
    return _search_plan(defined, plan)


def _search_plan(defined: Defined, plan: SweepPlan) -> SearchPlan:
    """Return the plan of a search from the plan of a run of it, which has the shape and environment of all trials."""
    from hpc_trainer.launch.arrays import ArrayPlan
    from hpc_trainer.launch.pools import asks_for_pool, slot_shape
    from hpc_trainer.launch.searches import SearchPlan

    search, spec = defined.search, defined.search.bases[0].spec
    if plan.arrays and asks_for_pool(spec):
        array = dataclasses.replace(plan.arrays[0], parallelism=plan.arrays[0].slots)
    else:  # without a pool, or without room for one job: then sbatch says so
        slots = min(search.settings.parallel, -(-search.settings.trials // spec.per_gpu))
        array = ArrayPlan(
            hardware=spec.hardware, shape=slot_shape(spec.shape, spec.per_gpu, spec.per_gpu), specs=(spec,),
            parallelism=slots, slots=slots, per_node=spec.per_gpu, per_gpu=spec.per_gpu,
        )  # fmt: skip
    of_sample = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    of_search = {
        "grid": dataclasses.replace(plan.grid, specs=()), "states": {}, "arrays": (array,), "twins": (),
        "problems": (*_problems(defined), *plan.problems),
    }  # fmt: skip
    return SearchPlan(
        **{**of_sample, **of_search},
        sampler=search.settings.sampler.value, metric=search.settings.metric, is_max=search.is_max,
        space=tuple(map(str, search.space)), trials=search.settings.trials, drawn=_count(defined),
        earlier=len(search.earlier), rungs=tuple(search.settings.rungs or ()), whole_runs=full_runs(search),
        hours_of_trial=max(base.spec.gpu_hours for base in search.bases),
    )  # fmt: skip


def submit_search(defined: Defined) -> SubmittedSearch:
    """Write search.json and submit the search's pool.

    A repeated call with the same search submits slots only if none wait or work, and a trial is left.

    Raises:
        ConfigError: the search cannot be submitted; nothing was written.
        SubmitError, SlurmError: as in `submit_grid`.
    """
    from hpc_trainer.launch.frozen_code.archive import store_code
    from hpc_trainer.launch.grids import check_new
    from hpc_trainer.launch.searches import SubmittedSearch, slots_at_work
    from hpc_trainer.launch.settle import settle_intents
    from hpc_trainer.launch.submit import Outcome, submit_source
    from hpc_trainer.record.files import remove, set_umask
    from hpc_trainer.record.processes import submit_lock

    of_sample, code = check_new(_sample(defined), to_draw=defined.search.settings.trials, must_answer=True)
    plan = _search_plan(defined, of_sample)
    if plan.problems:
        raise ConfigError("\n".join(plan.problems))
    sweep = defined.sweep
    set_umask(defined.grid.group_readable)
    with submit_lock(sweep):
        problems = _problems(defined)  # another command may have submitted a search since
        if problems:
            raise ConfigError("\n".join(problems))
        if code is not None:
            store_code(sweep, code)
        write_search(sweep, dataclasses.replace(defined.search, code=plan.code))
        remove(sweep.search_problem)
        settle_intents(sweep)
        at_work = slots_at_work(sweep)
        if at_work is not None:
            return SubmittedSearch(plan=plan, job_id=at_work.job_id or "")
        if is_over(defined.search, _known(defined)):
            return SubmittedSearch(plan=plan, job_id="")
        array = submit_source(of_sample, plan.arrays[0], SOURCE)
        return SubmittedSearch(plan=plan, outcome=Outcome(arrays=(array,)), job_id=array.job_id)


def _wait(defined: Defined, job_id: str, *, as_json: bool) -> None:
    """Watch the search until its slots have ended; exit with 1 if it stopped before all trials were done."""
    from hpc_trainer.cli.common import print_json
    from hpc_trainer.cli.grid_verbs import stop_queues
    from hpc_trainer.cli.results_verbs import print_results
    from hpc_trainer.cli.run_verbs import status_json
    from hpc_trainer.launch.searches import await_slots
    from hpc_trainer.record.status import read_status

    try:
        await_slots(defined.sweep)
    except KeyboardInterrupt:
        if defined.grid.executor is not Executor.slurm:
            stop_queues([job_id])
        print("\nNo longer watching: the same command continues what is left.", file=sys.stderr)
        sys.exit(1)
    status = read_status(defined.sweep)
    print_json(status_json(status)) if as_json else print_results(status)
    view = view_of(status.sweep)
    if view is not None and not is_over(*view):
        reason = _why_stopped(status.sweep, *view)
        raise HpcTrainerError(reason or f"the search did not end. Read: hpc-trainer status {status.sweep.name}")


# What plan shows.


def full_runs(search: Search) -> float | None:
    """Return the training of all trials in units of whole runs, if one of `search.eta` is promoted at each rung.

    With `search.median` half of them continue at each rung. None if the last step of a program is not known.
    """
    if search.has_rungs and not search.num_steps:
        return None
    eta = 2 if search.settings.median else search.settings.eta
    ladders = brackets(search)
    counts = [0] * len(ladders)
    from hpc_trainer.search.next_run import bracket_of

    for number in range(search.settings.trials):
        counts[ladders.index(bracket_of(search, number))] += 1
    total = 0.0
    for rungs, count in zip(ladders, counts, strict=True):
        below, left = 0, float(count)
        for step in (*rungs, search.num_steps):
            total += left * (step - below) / max(1, search.num_steps)
            below, left = step, left / eta
    return total


def plan_lines(plan: SearchPlan, defined: Defined) -> list[str]:
    """Return the plan of a search as lines of text."""
    search, settings, slots = defined.search, defined.search.settings, plan.arrays[0]
    lines = [
        f"Search {defined.sweep.name} in {defined.sweep.folder} ({defined.grid.executor.value})",
        f"Sampler {plan.sampler}, seed {settings.seed}: {plan.trials} trials, {slots.slots * slots.per_node} at a "
        f"time; the {'largest' if plan.is_max else 'smallest'} {plan.metric} is best.",
        *(f"  {line}" for line in plan.space),
    ]
    if plan.rungs:
        steps = ", ".join(map(str, plan.rungs))
        rule = "the better half continues" if settings.median else f"one of {settings.eta} is promoted"
        lines.append(
            f"Rungs at steps {steps}: {rule}." if plan.whole_runs is None
            else f"Rungs at steps {steps} of {search.num_steps}: {rule}, about {plan.whole_runs:.1f} whole runs of "
            "training in all."
        )  # fmt: skip
    spec = search.bases[0].spec
    sharing = f" shared by {spec.per_gpu} trials" if spec.per_gpu > 1 else ""
    lines.append(
        f"Each trial: hardware={spec.hardware}, {spec.shape.num_nodes} node(s), {spec.shape.gpus_per_node} GPU(s) a "
        f"node{sharing}, {spec.shape.time_limit_min} min. At most {plan.gpu_hours_max:.1f} GPU-hours, all time limits "
        "together."
    )
    if plan.earlier:
        lines.append(f"The sampler knows {plan.earlier} trials of {settings.from_sweep}.")
    if plan.drawn:
        lines.append(f"Drawn so far: {plan.drawn} of {plan.trials}.")
    return lines


def plan_json(plan: SearchPlan, defined: Defined) -> dict[str, Any]:
    """Return the JSON of `plan` of a search (docs/json.md)."""
    from hpc_trainer.config.load import plain_value

    return {
        "sweep": defined.sweep.name,
        "search": plain_value(defined.search.settings),
        "space": list(plan.space),
        "drawn": plan.drawn,
        "earlier": plan.earlier,
        "whole_runs": plan.whole_runs,
        "gpu_hours_max": plan.gpu_hours_max,
        "problems": list(plan.problems),
        "notes": list(plan.notes),
    }


# What status and results show.


def view_of(sweep: SweepPaths) -> tuple[Search, list[Trial]] | None:
    """Return the search of a sweep and its trials; None if it has none, or they cannot be read."""
    try:
        search = read_search(sweep)
        return None if search is None else (search, Trials(sweep, search).read())
    except HpcTrainerError:
        return None


def best_trial(search: Search, trials: Sequence[Trial]) -> Trial | None:
    """Return the complete trial with the best value; of equal ones the earliest. None if no trial has a value."""
    complete = [trial for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    sign = -1.0 if search.is_max else 1.0
    return min(complete, key=lambda trial: (sign * (trial.value or 0.0), trial.number), default=None)


def best_paused(search: Search, trials: Sequence[Trial]) -> tuple[Trial, int] | None:
    """Return the best trial at the highest rung that any trial has reached, and the rung's step; None without one."""
    sign = -1.0 if search.is_max else 1.0
    reached = [
        (rung, trial) for trial in trials for rung, value in trial.at_rungs.items() if math.isfinite(value)
    ]  # fmt: skip
    if not reached:
        return None
    highest = max(rung for rung, _ in reached)
    there = [trial for rung, trial in reached if rung == highest]
    return min(there, key=lambda trial: (sign * trial.at_rungs[highest], trial.number)), highest


def best_of(paths: SweepPaths) -> BestRun:
    """Return the best complete trial of a sweep's search; if none is complete, the best one at the highest rung.

    Raises:
        RunStateError: there is no such sweep, it has no search, its files cannot be read, or no trial has a value yet.
    """
    search, trials = read_view(existing_sweep(paths.folder.parent, paths.name))
    found, value, rung = best_trial(search, trials), None, None
    if found is not None:
        value = found.value
    elif (paused := best_paused(search, trials)) is not None:
        found, rung = paused
        value = found.at_rungs[rung]
    if found is None or value is None:
        metric, not_finite = search.settings.metric, sum(trial.has_no_finite_value for trial in trials)
        told = f": {not_finite} have NaN or infinity" if not_finite else ""
        what = f"a finite {metric}" if not_finite else f"a value of {metric} yet"
        raise RunStateError(f"no trial of {paths.name} has {what}{told}. Read: hpc-trainer status {paths.name}")
    kept = [word for word in search.words if not word.startswith(("sweep_name=", "seed="))]
    if search.app:  # the app's own keys, as after `python train.py`
        of_app = [
            f"{key.removeprefix('params.')}={value if _is_plain(value) else override_of(value)}"
            for key, value in found.params.items()
        ]
        drawn, app = [], ["--app", *search.app, *of_app]
    else:
        drawn = [
            f"{key}={value if key in search.bases[0].choices else override_of(value)}"
            for key, value in found.params.items()
        ]
        app = []
    again = [*kept, *drawn, f"sweep_name={paths.name}_best", "seed=0,1,2", *app]
    return BestRun(
        sweep=paths.name, run_id=found.run_id, trial=found.number, metric=search.settings.metric, value=value,
        rung=rung, params=dict(found.params), again=again,
    )  # fmt: skip


def _is_plain(value: object) -> bool:
    """Return True for a name that Hydra reads unchanged, such as the name of a choice of a group."""
    is_name = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w/-]*", value) is not None
    return is_name and str(value).lower() not in ("true", "false", "null", "nan", "inf")


def status_lines(status: SweepStatus) -> list[str]:
    """Return lines on trials, rungs, the best run, and why the search stopped."""
    view = view_of(status.sweep)
    if view is None:
        return [f"Note: {status.sweep.search} or a trial's file cannot be read. The same submit writes it anew."]
    search, trials = view
    settings = search.settings
    lines = [f"Search {settings.sampler.value}: {len(trials)} of {settings.trials} trials drawn."]
    if settings.rungs:
        counts = [
            f"{count} of step {step}" if step else f"{count} complete"
            for step, count in _survival(search, trials).items()
        ]
        lines.append(f"Results at rungs: {', '.join(counts)}.")
        lines += _short_of_rungs(search, trials)
    best = best_trial(search, trials)
    if best is not None:
        lines.append(f"Best so far: {best.run_id} with {settings.metric} {best.value:.6g} (trial {best.number}).")
    reason = _why_stopped(status.sweep, search, trials)
    if reason is not None:
        lines.append(f"The search has stopped: {reason}")
    return lines


def _short_of_rungs(search: Search, trials: Sequence[Trial]) -> Iterator[str]:
    """Yield a note if a complete trial ended before a rung that no trial has reached: none will pause there."""
    complete = [trial for trial in trials if trial.state is RunState.COMPLETED]
    reached = {rung for trial in trials for rung in trial.at_rungs}
    beyond = [rung for rung in search.settings.rungs if rung not in reached and any(rung in t.rungs for t in complete)]
    if beyond:
        first = next(trial for trial in complete if beyond[0] in trial.rungs)
        yield (
            f"Note: trial {first.number} ({first.run_id}) is complete and has not reached the rung of step "
            f"{beyond[0]}: no trial pauses there. Choose search.rungs before the last step, and another sweep_name."
        )


def status_json_of_search(status: SweepStatus) -> dict[str, Any]:
    """Return the key `search`: its settings, numbers of trials and results, and the best run."""
    view = view_of(status.sweep)
    if view is None:
        return {}
    search, trials = view
    best = best_trial(search, trials)
    return {
        "search": {
            "sampler": search.settings.sampler.value, "metric": search.settings.metric,
            "trials": search.settings.trials, "drawn": len(trials),
            "rungs": {str(step or "end"): count for step, count in _survival(search, trials).items()},
            "best": None if best is None else {"run_id": best.run_id, "value": best.value, "trial": best.number},
            "stopped": _why_stopped(status.sweep, search, trials), "is_over": is_over(search, trials),
        }
    }  # fmt: skip


def _why_stopped(sweep: SweepPaths, search: Search, trials: Sequence[Trial]) -> str | None:
    problem = (read_json(sweep.search_problem, Faults()) or {}).get("problem")
    return stop_reason(search, trials, sweep.name) or (None if problem is None else f"a slot could not draw: {problem}")


def _survival(search: Search, trials: Sequence[Trial]) -> dict[int, int]:
    """Return the number of results at each rung and at the end, which is step 0 if the last step is not known."""
    counts = {rung: sum(rung in trial.at_rungs for trial in trials) for rung in search.settings.rungs}
    return {**counts, search.num_steps: sum(trial.state is RunState.COMPLETED for trial in trials)}


def read_view(sweep: SweepPaths) -> tuple[Search, list[Trial]]:
    """Return the search of a sweep and its trials.

    Raises:
        RunStateError: the sweep has no search, or its files cannot be read.
    """
    search = read_search(sweep)
    if search is None:
        raise RunStateError(f"{sweep.name} has no search. For the runs of a grid: hpc-trainer results {sweep.name}")
    return search, Trials(sweep, search).read()
