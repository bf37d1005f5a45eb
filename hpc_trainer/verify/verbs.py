"""The verbs `verify preempt`, `verify resume`, `verify reproduce` and `find-lr`: they start, follow and print."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import as_typed, ended_by_signals, print_json, print_next, print_table, say
from hpc_trainer.cli.grid_verbs import freeze_given, freeze_here
from hpc_trainer.cli.options import Given, at_defaults, only_point
from hpc_trainer.config.compose.overrides import override_value
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.optim import ScheduleConfig, lr_factor
from hpc_trainer.config.schema.output import TrackerConfig
from hpc_trainer.config.schema.train import LoopConfig
from hpc_trainer.config.table.choice import is_there
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.frozen_code.snapshot import Snapshot
from hpc_trainer.launch.grids import retry, submit_grid
from hpc_trainer.operate.find import configured_runs_dir, prepare_to_write, select
from hpc_trainer.operate.show import Known, find_run
from hpc_trainer.record.files import make_folder, set_umask, write_atomic
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.verify.compare_metrics import Deviation
from hpc_trainer.verify.find_lr import Curve, LrRange, find_lr
from hpc_trainer.verify.find_lr import draw as draw_curve
from hpc_trainer.verify.interruptions import Interruption, InterruptionKind, draw, environment
from hpc_trainer.verify.old_code import read_checkout, rebuild
from hpc_trainer.verify.preempt import PreemptReport, choose_run, interrupt_and_check
from hpc_trainer.verify.reproduce import (
    Original,
    Reproduced,
    check_record,
    copy_of,
    follow,
    original_of,
    place_of,
    start_copy,
    take_archive,
)
from hpc_trainer.verify.resume import ResumeReport, Trial, verify_resume

Say = Callable[[str], None]
# Enough steps to be interrupted at one and have some left (verify/interruptions.py); enough points for a slope.
_FEWEST_STEPS_OF_RESUME, _FEWEST_STEPS_OF_TEST = 5, 10
_MOST_DIFFERENCES, _ROWS = 10, 12


def _progress(as_json: bool) -> Say:
    """Return a function that prints a line of progress at once, or nothing before a JSON document."""
    return (lambda _: None) if as_json else partial(print, flush=True)


def _freeze_trial(given: Given, name: str, folder: Path, ranks_env: Mapping[str, str], *forced: str) -> Grid:
    """Freeze a training of a verb's own: in `folder`, without a tracker, with variables for its ranks."""
    return freeze_given(
        given, *forced, *at_defaults("tracker", TrackerConfig()), f"sweep_name={name}", f"paths.runs_dir='{folder}'",
        *(f"++cluster.env.{variable}='{value}'" for variable, value in ranks_env.items()),
    )  # fmt: skip


def run_preempt(
    kind: InterruptionKind,
    names: list[str],
    sweep: str | None,
    runs_dir: Path | None,
    *,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Interrupt a run; exit with 1 if it did not restart, or resumed at another step than the saved one."""
    status, chosen = select(configured_runs_dir(runs_dir), names, sweep)
    if len(chosen) > 1 and names != [status.sweep.name]:
        listed = ", ".join(chosen[:5])
        raise RunStateError(f"verify preempt takes one run, and {len(chosen)} match: {listed}. Name one, or its sweep.")
    report = interrupt_and_check(
        kind, status.sweep, choose_run(status, chosen),
        bring_back=lambda run_id: retry(status.sweep, [run_id], take_back=kind is InterruptionKind.cancel),
        timeout_s=timeout_s, say=_progress(as_json),
    )  # fmt: skip
    if as_json:
        values = dataclasses.asdict(report)
        del values["kind"]
        print_json({"run_id": report.run_id, "drill": report.kind.value, **values})
    else:
        print(as_typed(_verdict(report, status.sweep.name)))
    if report.problems:
        sys.exit(1)


def _verdict(report: PreemptReport, sweep: str) -> str:
    check = f"verify preempt --kind {report.kind.value}"
    if report.problems:
        return f"{check}: FAILED: {'; '.join(report.problems)}. Read: hpc-trainer logs {report.run_id}"
    return f"{check}: passed: nothing was lost but the time. Next: hpc-trainer status --watch {sweep}"


def run_resume(
    given: Given, *, steps: int, interruptions: int, seed: int | None, timeout_s: float, keep: bool, as_json: bool
) -> None:
    """Compare an interrupted run with two undisturbed ones.

    Exits with 0 if all are identical, with 1 if not or if one failed, with 2 if the configuration is wrong.
    """
    if steps < _FEWEST_STEPS_OF_RESUME or interruptions < 1:
        raise ConfigError(
            f"--steps={steps} must be at least {_FEWEST_STEPS_OF_RESUME}, and --interruptions={interruptions} at least "
            "1: there must be a step to be interrupted at. Use --steps 40 --interruptions 4."
        )
    chosen = seed if seed is not None else random.SystemRandom().randrange(10_000)
    tell = _progress(as_json)
    folder = Path(tempfile.mkdtemp(prefix="hpc-trainer-verify-"))
    report = None
    try:
        trials, plan = _trials(given, steps, interruptions, chosen, folder)
        spec = trials[0].spec
        tell(
            f"{spec.run_id}: {spec.num_steps} steps on {spec.shape.world_size} rank(s), seed of the interruptions "
            f"{chosen} (--seed {chosen} draws them again)."
        )
        with ended_by_signals():
            report = verify_resume(trials[:2], trials[2], plan, seed=chosen, timeout_s=timeout_s, say=tell)
    finally:
        kept = keep or (report is not None and not report.is_identical)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_json({**_resume_json(report), "runs_dir": str(folder) if kept else None})
    else:
        print("\n".join(_resume_lines(report)))
        if kept:
            print(as_typed(f"The runs are kept in {folder}: hpc-trainer logs --runs-dir {folder}"))
    if not report.is_identical:
        sys.exit(1)


def _trials(
    given: Given, steps: int, interruptions: int, seed: int, folder: Path
) -> tuple[list[Trial], list[Interruption]]:
    here = given.here("verify resume", without=("sweep_name=",))
    point = only_point(freeze_here(here), "verify resume takes", "Choose one point.")
    if point.is_program:
        named = [word.partition("=")[2] for word in given.overrides or () if word.startswith("sweep_name=")]
        sweep = named[-1] if named else point.config["experiment_name"]
        raise ConfigError(
            "verify resume looks at the tensors of a training, and train.command is a program of its own. Submit it to "
            f"Slurm, then interrupt it there: hpc-trainer verify preempt {sweep}"
        )
    num_steps = max(_FEWEST_STEPS_OF_RESUME, min(steps, point.num_steps))
    every_steps = max(1, num_steps // 8)
    short = [f"train.num_steps={num_steps}", f"checkpoint.every_steps={every_steps}"]
    schedule = point.config["schedule"]
    if int(schedule["warmup_steps"] or 0) >= num_steps:
        short.append(f"schedule.warmup_steps={num_steps // 4}")
    if int(schedule["decay_steps"] or 0) > num_steps // 2:
        short.append("schedule.decay_steps=null")  # a fifth of the steps
    plan = draw(
        seed, num_steps=num_steps, every_steps=every_steps, count=interruptions, world_size=point.shape.world_size
    )
    trials = []
    for name, own in (("undisturbed-1", []), ("undisturbed-2", []), ("interrupted", plan)):
        grid = _freeze_trial(
            here, name, folder, environment(own),
            *short, "checkpoint.every=steps", "checkpoint.asynchronous=false", "monitor.log_every_steps=1",
        )  # fmt: skip
        start = partial(submit_grid, grid, command_line=sys.argv)
        bring_back = partial(retry, grid.sweep, [grid.specs[0].run_id], take_back=False)
        trials.append(Trial(sweep=grid.sweep, spec=grid.specs[0], start=start, bring_back=bring_back))
    return trials, plan


def _resume_json(report: ResumeReport) -> dict[str, Any]:
    first = report.first
    return {
        **dataclasses.asdict(report),
        "first": None if first is None else {"step": first.step, "rank": first.rank, "names": list(first.names)},
        "is_identical": report.is_identical,
    }


def _resume_lines(report: ResumeReport) -> list[str]:
    if report.failed is not None:
        return [f"NOT VERIFIED: {report.failed}"]
    if report.is_identical:
        resumed = ", ".join(map(str, report.resumed_steps)) or "none"
        return [
            f"IDENTICAL: {len(report.resumed_steps)} interruptions (resumed at steps {resumed}) changed no bit of "
            f"{report.num_steps} steps.",
            f"Compared after every step: {report.num_compared} tensors and numbers (weights, optimizer, scaler, "
            "random states, inputs).",
            f"Also compared: the metrics {', '.join(report.metrics)}; the last checkpoint byte for byte "
            f"({', '.join(report.files)}).",
        ]
    lines = []
    first = report.first
    if first is not None:
        shown = (*first.state, *(name for name in first.names if name not in first.state))
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        lines.append(
            f"NOT IDENTICAL: {report.between} differ first at step {first.step}, rank {first.rank}: "
            f"{', '.join(shown[:3])}{more}."
        )
    elif report.also:
        lines.append(f"NOT IDENTICAL: all states are identical, but not {report.also[0]}.")
    if report.resumed_steps:
        lines.append(f"Resumed at steps {', '.join(map(str, report.resumed_steps))}.")
    if report.reason is not None:
        lines += [f"Likely reason ({report.reason.kind}): {report.reason.text}", report.reason.advice]
    return lines


def run_reproduce(
    arguments: Sequence[str], sweep: str | None, runs_dir: Path | None, *, steps: int, may_differ: bool,
    timeout_s: float, keep: bool, rebuilds: bool, as_json: bool,
) -> None:  # fmt: skip
    """Repeat a run; exit with 0 if its metrics are identical, 1 if not or if the copy failed, 2 for a wrong command."""
    changes = [word for word in arguments if "=" in word]
    names = [word for word in arguments if word not in changes]
    if rebuilds and any(word.startswith("cluster.python=") for word in changes):
        raise ConfigError(
            "--rebuild sets cluster.python to the environment that it makes, so cluster.python cannot be given too. "
            "Keep one of the two."
        )
    if steps < 1:
        raise ConfigError(f"--steps={steps} must be at least 1. Use 1.")
    if len(names) != 1:
        raise ConfigError(
            "verify reproduce takes one run, and overrides of cluster.* and hardware.*; it got "
            f"{' '.join(names) or 'no run'}. "
            + (f"Use: hpc-trainer verify reproduce {names[0]}" if names else "hpc-trainer status lists the runs.")
        )
    tell = _progress(as_json)
    run = find_run(configured_runs_dir(runs_dir), names[0], sweep)
    original = original_of(run.sweep.run(run.spec.run_id), steps, is_program=run.spec.is_program)
    check_record(original)
    place = place_of(run.sweep, run.spec.run_id)
    spec = copy_of(run.spec, place, changes, may_differ=may_differ)
    is_local = spec.config["cluster"]["executor"] == Executor.local.value
    reproduced = None
    try:
        digest, code, packages = _code_of(run, spec, original, place)
        if rebuilds:
            spec = copy_of(spec, place, [*changes, _rebuilt(original, place, packages, tell)], may_differ=may_differ)
        tell(f"{spec.run_id}: {original.last} steps once more, {_from_what(digest, code)} ..")
        with ended_by_signals():
            start = partial(start_copy, spec, place, digest=digest, code=code, command_line=sys.argv)
            reproduced = follow(original, place, start, is_local=is_local, timeout_s=timeout_s, say=tell)
    finally:
        # A cancelled job may still be saving, so its folder must stay.
        kept = keep or not is_local or reproduced is None or not reproduced.comparison.is_identical
        if not kept:
            shutil.rmtree(place.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # other copies are in this folder
                place.folder.parent.rmdir()
    folder = place.folder if kept and place.exists else None
    if as_json:
        print_json({**_reproduced_json(reproduced, original), "folder": None if folder is None else str(folder)})
    else:
        print("\n".join(_reproduced_lines(reproduced, original)))
        if folder is not None:
            print(as_typed(f"The copy is kept in {folder}: hpc-trainer logs --runs-dir {folder.parent}"))
    if not reproduced.comparison.is_identical:
        sys.exit(1)


def _code_of(
    run: Known, spec: RunSpec, original: Original, place: SweepPaths
) -> tuple[str | None, Snapshot | None, Collection[str]]:
    """Return the digest of the copy's code, the code itself if it must be written first, and its packages.

    Raises:
        RunStateError: the code cannot be restored.
    """
    environment = original.environment
    frozen = run.code if environment is None else environment["code"].get("frozen")
    if frozen:
        digest, packages = take_archive(frozen, run.sweep, place)
        return digest, None, packages
    if environment is None:
        raise RunStateError(
            f"{spec.run_id} has no frozen code (snapshot=off), and no record of its environment: its code is unknown."
        )
    code = read_checkout(spec, environment["code"], place.folder.parent)
    if code is None:
        return None, None, ()
    return code.digest, code, [name for root in code.roots for name in root.packages]


def _rebuilt(original: Original, place: SweepPaths, packages: Collection[str], tell: Say) -> str:
    """Build the run's recorded environment, and return the override that names its Python.

    Raises:
        RunStateError: no environment was recorded, or it cannot be built.
    """
    if original.environment is None:
        raise RunStateError("there is no record of the run's environment: --rebuild does not know what to install.")
    made = rebuild(original.environment, place.folder.parent, frozen=packages, say=tell)
    for package in made.left_out:
        tell(f"not installed: {package}, and its old content is unknown")
    return f"cluster.python={override_value(shlex.quote(made.python))}"


def _from_what(digest: str | None, code: Snapshot | None) -> str:
    if code is not None:
        return "from the revision and the difference that were recorded"
    return f"from frozen code {digest[:12]}" if digest else "from installed code"


def _reproduced_json(reproduced: Reproduced, original: Original) -> dict[str, Any]:
    comparison = reproduced.comparison
    return {
        "run_id": reproduced.run_id,
        "is_identical": comparison.is_identical,
        "last_step": original.last,
        "steps": list(comparison.steps),
        "missing_steps": list(comparison.missing),
        "metrics": list(comparison.names),
        "deviations": [
            {**dataclasses.asdict(deviation), "relative": deviation.relative} for deviation in comparison.deviations
        ],
        "is_recorded": reproduced.is_recorded,
        "differences": [dataclasses.asdict(difference) for difference in reproduced.differences],
        "gpus": {"was": reproduced.gpus[0], "now": reproduced.gpus[1]},
    }


def _reproduced_lines(reproduced: Reproduced, original: Original) -> list[str]:
    comparison = reproduced.comparison
    first = next(iter(comparison.deviations), None)
    if comparison.is_identical:
        lines = [
            f"IDENTICAL: the first {original.last} steps. Compared bit for bit: {', '.join(comparison.names)}, at "
            f"{len(comparison.steps)} logged step(s)."
        ]
    elif first is not None:
        lines = [f"NOT IDENTICAL: {_deviation(first)}", *_others(comparison.deviations)]
    else:
        steps = ", ".join(map(str, comparison.missing[:5])) or "any step"
        lines = [f"NOT IDENTICAL: the copy did not log {steps}, which the run did."]
    if not reproduced.is_recorded:
        return [*lines, "There is no record of the run's environment: the differences are unknown."]
    unlike = [str(difference) for difference in reproduced.differences]
    if unlike:
        lines.append("These differ:" if first is not None else "These differ, and changed nothing here:")
        lines += [f"  {line}" for line in unlike[:_MOST_DIFFERENCES]]
        lines += (
            [f"  and {len(unlike) - _MOST_DIFFERENCES} more: --json has all"] if len(unlike) > _MOST_DIFFERENCES else []
        )
    else:
        lines.append("Nothing that is recorded differs: code, data, packages, libraries, devices, variables.")
    if reproduced.gpus[0] != reproduced.gpus[1]:
        lines.append(
            f"GPUs: {', '.join(reproduced.gpus[1]) or 'none'}; the run had {', '.join(reproduced.gpus[0]) or 'none'}."
        )
    return lines


def _deviation(deviation: Deviation) -> str:
    how = "" if deviation.relative is None else f" (relative {deviation.relative:.1g})"
    return f"step {deviation.step}: {deviation.name} {deviation.now!r} against {deviation.was!r}{how}."


def _others(deviations: Sequence[Deviation]) -> list[str]:
    steps = sorted({deviation.step for deviation in deviations})
    largest = max((deviation.relative for deviation in deviations if deviation.relative is not None), default=None)
    if len(deviations) < 2:
        return []
    largest_of_all = "" if largest is None else f"; the largest relative difference is {largest:.1g}"
    return [f"{len(deviations)} values differ at {len(steps)} of the compared steps{largest_of_all}."]


_FORCED = ("sweep_name=", "paths.runs_dir=")


def run_find_lr(given: Given, *, steps: int, first: float, last: float, timeout_s: float, as_json: bool) -> None:
    """Run the test; exit with 0 for a suggestion, 1 if the loss fell nowhere, 2 if the configuration is wrong."""
    if steps < _FEWEST_STEPS_OF_TEST or not 0 < first < last < float("inf"):
        raise ConfigError(
            f"--steps={steps} must be at least {_FEWEST_STEPS_OF_TEST}, and --from={first:g} greater than 0 and less "
            f"than --to={last:g}. Use --steps 100 --from 1e-7 --to 10."
        )
    grid = freeze_here(given.here("find-lr"))
    spec = only_point(grid, "find-lr takes", "Choose one point.")
    if spec.is_own_loop:
        raise ConfigError("find-lr takes steps of the shared loop, which train.main or train.command replaces.")
    if grid.sweep.folder.exists():
        prepare_to_write(grid.sweep, [spec.run_id])
    if not as_json:
        print(f"{spec.run_id}: {steps} steps on {spec.shape.world_size} rank(s), lr from {first:g} to {last:g} ..")
    plan = LrRange(first=first, last=last, num_steps=steps)
    with ended_by_signals():
        curve = _test_rates(given.here("find-lr", without=(*_FORCED, "schedule")), plan, timeout_s)
    set_umask(grid.group_readable)
    plot = grid.sweep.run(spec.run_id).lr_range
    make_folder(plot.parent)
    write_atomic(plot, draw_curve(curve, f"{spec.run_id}: loss over learning rate"))
    value = _optim_lr(curve, spec)
    if as_json:
        print_json(_curve_json(curve, spec, value, plot))
    else:
        _print_curve(curve, value, plot, given.overrides or ())
    if value is None:
        sys.exit(1)


def _test_rates(here: Given, plan: LrRange, timeout_s: float) -> Curve:
    """Run the test in a temporary folder and return its curve."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-trainer-find-lr-"))
    try:
        grid = _freeze_trial(
            here, "find-lr", folder, plan.environment,
            f"train.num_steps={plan.num_steps}", "train.eval_every_steps=0",
            "schedule=constant", *at_defaults("schedule", ScheduleConfig()),
            *(at_defaults("train.early_stop", LoopConfig().early_stop) if is_there("train.early_stop") else ()),
            "checkpoint.resume_from=null",
            "checkpoint.keep_best=null", "checkpoint.best_mode=auto",
        )  # fmt: skip
        start = partial(submit_grid, grid, command_line=sys.argv)
        return find_lr(grid.sweep, grid.specs[0].run_id, start, timeout_s=timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _optim_lr(curve: Curve, spec: RunSpec) -> float | None:
    """Return the `optim.lr` that gives the suggested rate if a rule scales it to this batch; None without a rate."""
    config = spec.typed()
    factor = lr_factor(config.optim.lr_scaling, config.optim.lr_base_batch, config.train.global_batch_size)
    return None if curve.suggested_lr is None else float(f"{curve.suggested_lr / factor:.2g}")


def _curve_json(curve: Curve, spec: RunSpec, value: float | None, plot: Path) -> dict[str, Any]:
    rates = ("steepest_lr", "divergence_lr", "tenth_lr", "suggested_lr")
    return {
        "run_id": spec.run_id,
        "points": [dataclasses.asdict(point) for point in curve.points],
        **{name: getattr(curve, name) for name in rates},
        "optim_lr": value,
        "plot": str(plot),
    }


def _print_curve(curve: Curve, value: float | None, plot: Path, given: Sequence[str]) -> None:
    points = curve.points
    shown = sorted({round(index * (len(points) - 1) / (_ROWS - 1)) for index in range(_ROWS)})
    rows = [points[index] for index in shown]
    print_table(
        ["STEP", "LR", "LOSS", "SMOOTHED"],
        [[str(row.step), f"{row.lr:.2g}", f"{row.loss:.4g}", f"{row.smoothed:.4g}"] for row in rows],
    )
    if curve.divergence_lr is None:
        print(f"The loss did not diverge up to lr={points[-1].lr:.2g}; --to takes a larger one.")
    else:
        print(f"The loss diverged at lr={curve.divergence_lr:.2g}; a tenth of it is {curve.tenth_lr:.2g}.")
    if value is None:
        print("The loss never fell: no rate is suggested.")
    else:
        print(f"It fell the fastest at lr={curve.steepest_lr:.2g}. Suggested: optim.lr={value:g}")
    say(f"Plot: {plot}")
    if value is not None:
        overrides = [word for word in given if not word.startswith("optim.lr=")]
        print_next(f"train {shlex.join([*overrides, f'optim.lr={value:g}'])}")
