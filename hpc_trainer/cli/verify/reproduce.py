"""`hpc-trainer verify reproduce`: repetition of a run's first steps with its original code, and their comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import ended_by_signals, print_json
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.config.compose.overrides import override_value
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.frozen_code.snapshot import Snapshot
from hpc_trainer.operate.show import Known, find_run
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import RunSpec
from hpc_trainer.verify.old_code import copy_of, place_of, read_checkout, rebuild, start_copy, take_archive
from hpc_trainer.verify.reproduce import Deviation, Original, Reproduced, check_record, follow, original_of

_MOST = 10


def run_reproduce(
    words: Sequence[str], sweep: str | None, runs_dir: Path | None, *, steps: int, may_differ: bool, timeout_s: float,
    keep: bool, rebuilds: bool, as_json: bool,
) -> None:  # fmt: skip
    """Repeat a run; exit with 0 if its metrics are identical, 1 if not or if the copy failed, 2 for a wrong command."""
    changes = [word for word in words if "=" in word]
    names = [word for word in words if word not in changes]
    if rebuilds and any(word.startswith("cluster.python=") for word in changes):
        raise ConfigError("--rebuild makes the Python that cluster.python names. Keep one of the two.")
    if steps < 1:
        raise ConfigError(f"--steps={steps} must be at least 1. Use 1.")
    if len(names) != 1:
        raise ConfigError(
            f"verify reproduce takes one run, and KEY=VALUE words of cluster.* and hardware.*; it got "
            f"{' '.join(names) or 'no run'}. "
            + (f"Use: hpc-trainer verify reproduce {names[0]}" if names else "hpc-trainer status lists the runs.")
        )
    tell: Callable[[str], None] = (lambda _: None) if as_json else partial(print, flush=True)
    run = find_run(resolve_runs_dir(runs_dir), names[0], sweep)
    original = original_of(run.sweep.run(run.spec.run_id), steps, is_program=run.spec.is_program)
    check_record(original)
    place = place_of(run.sweep, run.spec.run_id)
    spec = copy_of(run.spec, place, changes, may_differ=may_differ)
    is_local = spec.config["cluster"]["executor"] == Executor.local.value
    found = None
    try:
        digest, code, packages = _code_of(run, spec, original, place)
        if rebuilds:
            spec = copy_of(spec, place, [*changes, _rebuilt(original, place, packages, tell)], may_differ=may_differ)
        tell(f"{spec.run_id}: {original.last} steps once more, {_from_what(digest, code)} ..")
        with ended_by_signals():
            start = partial(start_copy, spec, place, digest=digest, code=code, command_line=sys.argv)
            found = follow(original, place, start, is_local=is_local, timeout_s=timeout_s, say=tell)
    finally:
        # A cancelled job may still be saving, so its folder must stay.
        kept = keep or not is_local or found is None or not found.comparison.is_identical
        if not kept:
            shutil.rmtree(place.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # other copies are in this folder
                place.folder.parent.rmdir()
    folder = place.folder if kept and place.exists else None
    if as_json:
        print_json({**_json(found, original), "folder": None if folder is None else str(folder)})
    else:
        print("\n".join(_words(found, original)))
        if folder is not None:
            print(as_typed(f"The copy is kept in {folder}: hpc-trainer logs --runs-dir {folder.parent}"))
    if not found.comparison.is_identical:
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
            f"{spec.run_id} has no frozen code (snapshot=off), and no record of what it ran with: nobody knows its "
            "code."
        )
    code = read_checkout(spec, environment["code"], place.folder.parent)
    if code is None:
        return None, None, ()
    return code.digest, code, [name for root in code.roots for name in root.packages]


def _rebuilt(original: Original, place: SweepPaths, packages: Collection[str], tell: Callable[[str], None]) -> str:
    """Build the run's recorded environment, and return the override that names its Python.

    Raises:
        RunStateError: no environment was recorded, or it cannot be built.
    """
    if original.environment is None:
        raise RunStateError("there is no record of what the run ran with: nothing tells --rebuild what to install.")
    made = rebuild(original.environment, place.folder.parent, frozen=packages, say=tell)
    for package in made.left_out:
        tell(f"not installed: {package}, and what stood there then is not known")
    return f"cluster.python={override_value(shlex.quote(made.python))}"


def _from_what(digest: str | None, code: Snapshot | None) -> str:
    if code is not None:
        return "from the revision and the difference that were recorded"
    return f"from frozen code {digest[:12]}" if digest else "from installed code"


def _json(found: Reproduced, original: Original) -> dict[str, Any]:
    comparison = found.comparison
    return {
        "run_id": found.run_id,
        "is_identical": comparison.is_identical,
        "last_step": original.last,
        "steps": list(comparison.steps),
        "missing_steps": list(comparison.missing),
        "metrics": list(comparison.names),
        "deviations": [{**dataclasses.asdict(each), "relative": each.relative} for each in comparison.deviations],
        "is_recorded": found.is_recorded,
        "differences": [dataclasses.asdict(difference) for difference in found.differences],
        "gpus": {"was": found.gpus[0], "now": found.gpus[1]},
    }


def _words(found: Reproduced, original: Original) -> list[str]:
    comparison = found.comparison
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
    if not found.is_recorded:
        return [*lines, "There is no record of what the run ran with: nobody can say what differs."]
    unlike = [str(difference) for difference in found.differences]
    if unlike:
        lines.append("These differ:" if first is not None else "These differ, and changed nothing here:")
        lines += [f"  {line}" for line in unlike[:_MOST]]
        lines += [f"  and {len(unlike) - _MOST} more: --json has all"] if len(unlike) > _MOST else []
    else:
        lines.append("Nothing that is recorded differs: code, data, packages, libraries, devices, variables.")
    if found.gpus[0] != found.gpus[1]:
        lines.append(f"GPUs: {', '.join(found.gpus[1]) or 'none'}; the run had {', '.join(found.gpus[0]) or 'none'}.")
    return lines


def _deviation(each: Deviation) -> str:
    how = "" if each.relative is None else f" (relative {each.relative:.1g})"
    return f"step {each.step}: {each.name} {each.now!r} against {each.was!r}{how}."


def _others(deviations: Sequence[Deviation]) -> list[str]:
    steps = sorted({deviation.step for deviation in deviations})
    largest = max((deviation.relative for deviation in deviations if deviation.relative is not None), default=None)
    if len(deviations) < 2:
        return []
    told = "" if largest is None else f"; the largest relative difference is {largest:.1g}"
    return [f"{len(deviations)} values differ at {len(steps)} of the compared steps{told}."]
