"""`hpc-trainer verify resume`: proof, for any configuration, that an interrupted run ends with the same bits."""

from __future__ import annotations

import dataclasses
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import ended_by_signals, print_json
from hpc_trainer.cli.given import Given, at_defaults, only_point
from hpc_trainer.cli.grid_verbs import freeze_given, freeze_here
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.config.schema.output import TrackerConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.grids import retry, submit_grid
from hpc_trainer.runtime.rank_env import PROBE_VARIABLE
from hpc_trainer.verify.interruptions import PROBE, VARIABLE, Interruption, draw, to_text
from hpc_trainer.verify.resume import Certificate, Trial, certify

# Enough steps to stop at one and have some left (verify/interruptions.py).
_FEWEST_STEPS = 5


def run_resume(
    given: Given, *, steps: int, interruptions: int, seed: int | None, timeout_s: float, keep: bool, as_json: bool
) -> None:
    """Certify; exit with 0 if the runs are identical, 1 if not or if one failed, 2 if the configuration is wrong."""
    if steps < _FEWEST_STEPS or interruptions < 1:
        raise ConfigError(
            f"--steps={steps} must be at least {_FEWEST_STEPS}, and --interruptions={interruptions} at least 1: "
            "there must be a step to be interrupted at. Use --steps 40 --interruptions 4."
        )
    chosen = seed if seed is not None else random.SystemRandom().randrange(10_000)
    tell: Callable[[str], None] = (lambda _: None) if as_json else partial(print, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="hpc-trainer-verify-"))
    certificate = None
    try:
        trials, plan = _trials(given, steps, interruptions, chosen, folder)
        spec = trials[0].spec
        tell(
            f"{spec.run_id}: {spec.num_steps} steps on {spec.shape.world_size} rank(s), seed of the interruptions "
            f"{chosen} (--seed {chosen} draws them again)."
        )
        with ended_by_signals():
            certificate = certify(trials[:2], trials[2], plan, seed=chosen, timeout_s=timeout_s, say=tell)
    finally:
        kept = keep or (certificate is not None and not certificate.is_identical)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_json({**_json(certificate), "runs_dir": str(folder) if kept else None})
    else:
        print("\n".join(_words(certificate)))
        if kept:
            print(as_typed(f"The runs are kept in {folder}: hpc-trainer logs --runs-dir {folder}"))
    if not certificate.is_identical:
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
    num_steps = max(_FEWEST_STEPS, min(steps, point.num_steps))
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
        grid = freeze_given(
            here,
            *short, "checkpoint.every=steps", "checkpoint.asynchronous=false",
            "monitor.log_every_steps=1", *at_defaults("tracker", TrackerConfig()),
            f"sweep_name={name}", f"paths.runs_dir='{folder}'",
            f"++cluster.env.{PROBE_VARIABLE}={PROBE}", f"++cluster.env.{VARIABLE}='{to_text(own)}'",
        )  # fmt: skip
        start = partial(submit_grid, grid, command_line=sys.argv)
        bring_back = partial(retry, grid.sweep, [grid.specs[0].run_id], take_back=False)
        trials.append(Trial(sweep=grid.sweep, spec=grid.specs[0], start=start, bring_back=bring_back))
    return trials, plan


def _json(certificate: Certificate) -> dict[str, Any]:
    first = certificate.first
    return {
        **dataclasses.asdict(certificate),
        "first": None if first is None else {"step": first.step, "rank": first.rank, "names": list(first.names)},
        "is_identical": certificate.is_identical,
    }


def _words(certificate: Certificate) -> list[str]:
    if certificate.failed is not None:
        return [f"NOT CERTIFIED: {certificate.failed}"]
    if certificate.is_identical:
        resumed = ", ".join(map(str, certificate.resumed_steps)) or "none"
        return [
            f"IDENTICAL: {len(certificate.resumed_steps)} interruptions (resumed at steps {resumed}) changed no bit of "
            f"{certificate.num_steps} steps.",
            f"Compared after every step: {certificate.num_compared} tensors and numbers (weights, optimizer, scaler, "
            "random states, inputs).",
            f"Compared besides: the metrics {', '.join(certificate.metrics)}; the last checkpoint byte for byte "
            f"({', '.join(certificate.files)}).",
        ]
    lines = []
    first = certificate.first
    if first is not None:
        shown = (*first.state, *(name for name in first.names if name not in first.state))
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        lines.append(
            f"NOT IDENTICAL: {certificate.between} differ first at step {first.step}, rank {first.rank}: "
            f"{', '.join(shown[:3])}{more}."
        )
    elif certificate.also:
        lines.append(f"NOT IDENTICAL: all states are, but not {certificate.also[0]}.")
    if certificate.resumed_steps:
        lines.append(f"Resumed at steps {', '.join(map(str, certificate.resumed_steps))}.")
    if certificate.reason is not None:
        lines += [f"Likely reason ({certificate.reason.kind}): {certificate.reason.text}", certificate.reason.advice]
    return lines
