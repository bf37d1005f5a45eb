"""train, plan, submit and retry: the commands that take a grid or its runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hpc_trainer.cli.common import as_typed, figure, print_json, print_next, say, state_markup, warn
from hpc_trainer.cli.live import watch
from hpc_trainer.cli.options import Chosen, Given, only_point, tell_notes
from hpc_trainer.cli.results_verbs import print_results
from hpc_trainer.cli.run_verbs import select_to_hold, status_json
from hpc_trainer.cli.show_plan import (
    expected_json,
    fit_json,
    memory_json,
    plan_json,
    print_chain,
    print_expected,
    print_fit,
    print_needs,
    print_next_of,
    print_plan,
    print_submitted,
    say_changed,
    say_twins,
    submit_json,
)
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.domains import contributions
from hpc_trainer.errors import ConfigError, ExitCode, HpcTrainerError, RunStateError, SlurmError
from hpc_trainer.launch.expected import find_expected
from hpc_trainer.launch.fit import find_fit
from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.grids import plan_grid, retry, submit_grid, top_up
from hpc_trainer.launch.hydra_app import freeze_app, read_app
from hpc_trainer.launch.known import known_of
from hpc_trainer.launch.memory import Need, find_needs
from hpc_trainer.launch.stages import Chain, freeze_chain, plan_chain, submit_chain
from hpc_trainer.launch.submit import Outcome, array_script_of
from hpc_trainer.operate.control import release_runs, runs_to_retry
from hpc_trainer.operate.find import configured_runs_dir, elsewhere_too, select
from hpc_trainer.operate.results import where_holds
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.processes import is_alive, pid_of
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import SweepStatus, read_status

# A top-up job's time limit is half an hour (launch/later_jobs.py).
_TOP_UP_S, _TOP_UP_PAUSE_S = 1200.0, 120.0


class GridKind(Protocol):
    """Kind of grid that a domain plans and submits (hook `grid_kinds`), because its runs follow from earlier ones."""

    def takes(self, overrides: Sequence[str]) -> bool:
        """Return True if the overrides ask for this kind."""

    def plan(self, given: Given, chosen: Chosen, *, as_json: bool) -> None:
        """Do and print what `run_plan` does."""

    def submit(self, given: Given, chosen: Chosen, *, wait: bool, as_json: bool) -> None:
        """Do and print what `run_submit` does."""


def _kind_of(given: Given) -> GridKind | None:
    kinds: Sequence[GridKind] = contributions("grid_kinds")
    return next((kind for kind in kinds if kind.takes(given.overrides or ())), None)


def freeze_given(given: Given, *forced: str) -> Grid:
    """Return the frozen grid of the given overrides and of overrides that a command forces."""
    overrides = [*(given.overrides or ()), *forced]
    if given.app is None:
        return freeze_grid(overrides, **given.places)
    return freeze_app(read_app(given.app), overrides, **given.places)


def freeze_here(given: Given) -> Grid:
    """Return the frozen grid for a command without a plan; print its notes on standard error."""
    grid = freeze_given(given)
    tell_notes(grid.notes)
    return grid


def run_plan(
    given: Given, chosen: Chosen, *, as_json: bool, script: bool = False, memory: bool = False, fit: bool = False
) -> None:
    """Show the plan; write nothing. Exit with 2 if the plan could not be submitted, with 1 if an estimate failed."""
    chain = _chain_of(given, chosen)
    if chain is not None:
        _plan_stages(chain, chosen, as_json=as_json, script=script, others=memory or fit)
        return
    if (kind := _kind_of(given)) is not None:
        kind.plan(given, chosen, as_json=as_json)
        return
    plan = plan_grid(
        chosen.of(freeze_given(given)),
        retry_failed=chosen.retry_failed,
        fresh=chosen.fresh,
    )
    needs: list[Need] = []
    fitting = find_fit(plan, plan.grid.sweep.folder.parent) if fit else None
    if as_json:
        needs = find_needs(plan.grid.specs, plan.grid.sweep) if memory else []
        told_fit = {} if fitting is None else {"fit": fit_json(fitting)}
        expected = {"expected": expected_json(find_expected(plan, needs))}
        print_json(plan_json(plan) | expected | ({"memory": memory_json(needs)} if memory else {}) | told_fit)
    else:
        print_plan(plan)
        if memory:
            needs = find_needs(plan.grid.specs, plan.grid.sweep)
            print_needs(needs)
        print_expected(find_expected(plan, needs))
        if fitting is not None:
            print_fit(fitting)
        for array in plan.arrays if script else ():
            print(f"\n# --- batch script of the array on {array.hardware} ---")
            print(array_script_of(plan, array) or "# the local executor needs none")
        print_next_of(plan)
    if plan.problems:
        sys.exit(ExitCode.USAGE)
    if any(need.problem is not None for need in needs):
        sys.exit(ExitCode.FAILED)


def run_submit(given: Given, chosen: Chosen, *, wait: bool, as_json: bool, canary: int | None = None) -> None:
    """Submit new and interrupted runs; with `wait`, show progress to the end."""
    chain = _chain_of(given, chosen)
    if chain is not None:
        _submit_stages(chain, chosen, wait=wait, as_json=as_json)
        return
    if (kind := _kind_of(given)) is not None:
        kind.submit(given, chosen, wait=wait, as_json=as_json)
        return
    grid = chosen.of(freeze_given(given))
    done = submit_grid(grid, retry_failed=chosen.retry_failed, fresh=chosen.fresh, command_line=sys.argv, canary=canary)
    if as_json and not wait:
        print_json(submit_json(done))
        return
    if not as_json:
        print_submitted(done, has_next=not wait)
    if wait:
        status = _wait(grid, [array.job_id for array in done.arrays], quiet=as_json)
        if as_json:
            print_json({**submit_json(done), "status": status_json(status)})
        else:
            print_results(status)
        _exit_by_outcome(grid, status, quiet=as_json)
        if not as_json:
            print_next(f"report {grid.sweep.name}")


def _chain_of(given: Given, chosen: Chosen) -> Chain | None:
    """Return the chain that the command line describes; None if it describes one grid."""
    chain = None if given.app is not None else freeze_chain(given.overrides or (), **given.places)
    if chain is not None and chosen.extend:
        raise ConfigError("--extend is for one grid, and this is a chain of stages. Leave --extend out.")
    return chain


def _plan_stages(chain: Chain, chosen: Chosen, *, as_json: bool, script: bool, others: bool) -> None:
    if others:
        raise ConfigError("--memory and --fit are for one grid. Give the overrides of one stage instead of the chain.")
    plans = plan_chain(chain, retry_failed=chosen.retry_failed, fresh=chosen.fresh)
    if as_json:
        print_json({"chain": chain.name, "stages": [plan_json(plan) for plan in plans]})
    else:
        print_chain(chain)
        for stage, plan in zip(chain.stages, plans, strict=True):
            say("", f"\n[bold]Stage {stage.name}[/]")
            print_plan(plan)
            for array in plan.arrays if script else ():
                print(f"\n# --- batch script of the array on {array.hardware} ---")
                print(array_script_of(plan, array) or "# the local executor needs none")
        if not any(plan.problems for plan in plans):
            print_next_of(next((plan for plan in plans if plan.num_to_submit), plans[-1]))
    if any(plan.problems for plan in plans):
        sys.exit(ExitCode.USAGE)


def _submit_stages(chain: Chain, chosen: Chosen, *, wait: bool, as_json: bool) -> None:
    done = submit_chain(chain, retry_failed=chosen.retry_failed, fresh=chosen.fresh, command_line=sys.argv)
    if not as_json:
        print_chain(chain)
        for submitted in done:
            print_submitted(submitted, has_next=False)
    elif not wait:
        print_json({"chain": chain.name, "stages": [submit_json(submitted) for submitted in done]})
    if not wait:
        if not as_json:
            print_next(f"status {chain.name}")
        return
    job_ids = [array.job_id for submitted in done for array in submitted.arrays]
    statuses = [_wait(stage.grid, job_ids, quiet=as_json) for stage in chain.stages]
    if as_json:
        answers = zip(done, statuses, strict=True)
        stages = [{**submit_json(submitted), "status": status_json(status)} for submitted, status in answers]
        print_json({"chain": chain.name, "stages": stages})
    for stage, status in zip(chain.stages, statuses, strict=True):
        if not as_json:
            print_results(status)
        _exit_by_outcome(stage.grid, status, quiet=as_json)


def run_retry(
    names: Sequence[str], sweep: str | None, runs_dir: Path | None, *, as_json: bool, where: str | None = None
) -> None:
    """Submit the failed and interrupted runs among those that `names` mean.

    A cancelled run is submitted if its own name is given, or if its sweep's name is given and cancelled it. A run whose
    folder was deleted is trained again if its own name is given.

    Arguments with `=` among `names` are changes of `cluster.*` and `hardware.*`.
    """
    changes = [word for word in names if "=" in word or word.startswith("~")]
    names = [word for word in names if word not in changes]
    status, chosen = select(configured_runs_dir(runs_dir), names, sweep)
    warn(status)
    tell_notes([note] if (note := elsewhere_too(status, chosen, names, sweep)) else ())
    chosen = where_holds(status, chosen, where)
    wanted = runs_to_retry(status, chosen, names, is_chosen=where is not None)
    done = retry(status.sweep, wanted.run_ids, take_back=wanted.takes_back, changes=changes)
    print_json(submit_json(done)) if as_json else print_submitted(done)


def run_release(names: Sequence[str], sweep: str | None, runs_dir: Path | None, *, as_json: bool) -> None:
    """Release the named runs or sweep; submit frozen runs again that left the queue because of their hold."""
    status, run_ids, is_whole = select_to_hold("release", names, sweep, runs_dir)
    done = release_runs(status, status.open_among(run_ids), is_whole=is_whole)
    again = retry(status.sweep, done.to_submit) if done.to_submit else None
    if as_json:
        submitted = None if again is None else submit_json(again)
        document = {"sweep": status.sweep.name, "released": list(done.released), "notes": list(done.notes)}
        print_json({**document, "submitted": submitted})
        return
    for note in done.notes:
        say(f"Note: {as_typed(note)}")
    name = status.sweep.name
    if done.released:
        say(f"Released {len(done.released)} run(s) of {name}.")
    elif is_whole and status.hold is not None:
        say(f"{name} is not held any more; none of its runs was waiting.")
    else:
        say(f"Nothing to release: no run of {name} is held.")
    if is_whole and status.hold is not None and status.ledger.is_search and not status.pools:
        say("No slot of the search is left: the same `hpc-trainer submit` starts new ones.")
    if again is not None:
        print_submitted(again)
    else:
        print_next(f"status {status.sweep.name}")


def run_top_up(folder: Path) -> None:
    """Submit the waiting runs that have room: the work of a top-up job. Retry for a while if Slurm does not answer."""
    sweep = SweepPaths(folder.absolute())
    deadline = time.monotonic() + _TOP_UP_S
    while True:
        try:
            done = top_up(sweep)
        except SlurmError as error:
            problem = str(error)
            if time.monotonic() > deadline:
                raise
        else:
            if done is None or not done.waiting or done.top_up is not None or time.monotonic() > deadline:
                print(_top_up_line(sweep, done))
                return
            problem = "; ".join(done.notes) or "no room"
        # No successor could be submitted: only this job can try again.
        print(f"{problem}. Trying again in {_TOP_UP_PAUSE_S:g} s.", flush=True)
        time.sleep(_TOP_UP_PAUSE_S)


def _top_up_line(sweep: SweepPaths, done: Outcome | None) -> str:
    if done is None:
        return f"Sweep {sweep.name}: no run is waiting."
    submitted = sum(len(array.run_ids) for array in done.arrays)
    after = f"; job {done.top_up} submits more later" if done.top_up else ""
    return "\n".join((f"Sweep {sweep.name}: {submitted} submitted, {len(done.waiting)} waiting{after}.", *done.notes))


def run_train(given: Given, *, fresh: bool, extend: bool, as_json: bool) -> None:
    """Train one run on this machine with the local executor, and show its progress."""
    grid = Chosen(retry_failed=True, fresh=fresh, extend=extend).of(freeze_here(given.here("train")))
    spec = only_point(grid, "train runs", "Use submit.")
    paths = grid.sweep.run(spec.run_id)
    state = known_of(grid.sweep).states.get(spec.run_id, RunState.NEW)
    if state is RunState.CANCELLED and not fresh:
        raise RunStateError(
            f"{spec.run_id} was cancelled and stays cancelled. `--fresh` starts it again in another folder."
        )
    done = submit_grid(grid, retry_failed=True, fresh=fresh, command_line=sys.argv)
    arrays = done.arrays
    if not as_json:
        text = f" is already {state.value}; this command shows its progress"
        if arrays:
            text = f": {spec.shape.world_size} rank(s)" + (f", {spec.num_steps} steps" if spec.num_steps else "")
        elif state is RunState.COMPLETED:
            text = ": all steps are done. `--fresh` starts it again"
        print(f"{spec.run_id}{text}. Run folder: {paths.folder}")
        say_changed(done.plan)
        say_twins(done.plan)
    status = _wait(grid, [array.job_id for array in arrays], quiet=as_json)
    run = status.run(spec.run_id)
    if as_json:
        print_json(
            {"run_id": run.run_id, "state": run.state.value, "step": run.step, "metrics": dict(run.metrics),
             "run_dir": str(paths.folder)}
        )  # fmt: skip
    else:
        metrics = "".join(f"  {key}={figure(value)}" for key, value in run.metrics.items())
        at = "" if run.progress == "-" else f" at step {run.progress}"
        say(f"{at}{metrics}", f"{run.run_id}: {state_markup(run.state)}")
        if run.warning is not None:
            print(as_typed(f"WARNING: {run.warning}. Read: hpc-trainer why {run.run_id}"))
    _exit_by_outcome(grid, status, quiet=as_json)


def _wait(grid: Grid, job_ids: list[str], *, quiet: bool) -> SweepStatus:
    """Watch the runs to their end. Ctrl-C stops local runs, each with a checkpoint; on Slurm it only stops watching."""
    wanted = {spec.run_id for spec in grid.specs}
    try:
        return watch(grid.sweep, wanted, quiet=quiet)
    except KeyboardInterrupt:
        if grid.executor is Executor.slurm or not job_ids:
            message = f"\nNo longer watching; the runs continue. See: hpc-trainer status {grid.sweep.name}"
            print(as_typed(message), file=sys.stderr)
            sys.exit(1)
        print("\nStopping: every run saves a checkpoint first ...", file=sys.stderr)
        stop_queues(job_ids)
        status = read_status(grid.sweep)
        stopped = [run for run in status.open_runs.values() if run.state is RunState.PREEMPTED]
        steps = ", ".join(f"{run.run_id} at step {run.step}" for run in stopped)
        print(f"Stopped{': ' + steps if steps else ''}. The same command continues from here.", file=sys.stderr)
        sys.exit(1)


def stop_queues(job_ids: Sequence[str]) -> None:
    for job_id in set(job_ids):
        if is_alive(job_id):
            os.kill(pid_of(job_id), signal.SIGTERM)
    while any(is_alive(job_id) for job_id in job_ids):
        time.sleep(0.1)


def _exit_by_outcome(grid: Grid, status: SweepStatus, *, quiet: bool) -> None:
    """Exit with an error if a run did not complete; `quiet` prints no message, because the JSON has it."""
    wanted = {spec.run_id for spec in grid.specs}
    # A run that ends during the look is still among the open runs.
    wanted_open = (run for run in status.open_runs.values() if run.run_id in wanted)
    bad = [run for run in wanted_open if run.state is not RunState.COMPLETED]
    if bad and quiet:
        sys.exit(1)
    if bad:
        causes = [f"{run.run_id}: {run.state.value}: {run.whole_reason or 'see its logs'}" for run in bad[:10]]
        lines = [f"{len(bad)} run(s) did not complete:", *causes, f"Read: hpc-trainer why {bad[0].run_id}"]
        raise HpcTrainerError("\n".join([*lines, *status.remarks]))
