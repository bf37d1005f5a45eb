"""`hpc-trainer export`: export of a run's model to a folder."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import print_json, print_next, print_table, short_number
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.cli.verbs.report import run_report
from hpc_trainer.deploy.export import EVERY, Form, Wanted, export, export_all, forms_of
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.show import Known, find_run
from hpc_trainer.record.exported import needed_package


def run_export(
    name: str, sweep: str | None, runs_dir: Path | None, wanted: Wanted, *, all_ways: bool, words: Sequence[str] = (),
    config_dirs: Sequence[Path] = (), as_json: bool,
) -> None:  # fmt: skip
    """Write the folder and print its contents."""
    if all_ways and words:
        raise ConfigError(f"--all is every form, and {' '.join(words)} lists some. Leave one of the two out.")
    forms = forms_of(words, config_dirs) if words else EVERY
    run = find_run(resolve_runs_dir(runs_dir), name, sweep)
    if all_ways or words:
        _run_all(run, wanted, forms, runs_dir, as_json=as_json)
        return
    done = export(run, wanted)
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    what = "averaged weights" if done.weights == "average" else "weights"
    print(
        as_typed(
            f"{done.run_id}: {what} of step {done.step}, {done.num_tensors} tensors, "
            f"{short_number(done.num_elements)} numbers, {short_number(done.num_bytes)}B. Folder: {done.folder}"
        )
    )
    for line in _measured(done.card):
        print(as_typed(line))
    for note in done.notes:
        print(as_typed(f"Note: {note}"))
    package = needed_package(done.card)  # Python looks for the package beside load.py, not in the current folder
    where = f", where {package} can be imported: PYTHONPATH=. " if package else ": "
    print(as_typed(f"To load it{where}python {Path(done.folder) / 'load.py'}"))


def _run_all(run: Known, wanted: Wanted, forms: Sequence[Form], runs_dir: Path | None, *, as_json: bool) -> None:
    said = (wanted.quantize, wanted.prune, wanted.tolerance)
    if said != (None, None, None) or wanted.to != Wanted().to:
        raise ConfigError(
            "--all is every --to with every --quantize, and sweep=.. lists forms. Leave --to, --quantize, --prune and "
            "--tolerance out."
        )
    done = export_all(run, wanted, lambda each: print(f"{each} ..", file=sys.stderr), forms)
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    rows = []
    for one in done.exports:
        measured = one.card["measured"]
        side = {"metrics": {}, "latency": {}} if measured is None else measured["exported"]
        figures = [f"{value:.4f}" for value in side["metrics"].values()]
        figures += [f"{1e3 * timing['median_s']:.3g} ms" for timing in side["latency"].values()]
        rows.append([Path(one.folder).name, f"{short_number(one.num_bytes)}B", *figures])
    measured = done.exports[0].card["measured"] or {"exported": {"metrics": {}, "latency": {}}}
    named = [name.upper() for name in measured["exported"]["metrics"]]
    named += [f"BATCH OF {batch}" for batch in measured["exported"]["latency"]]
    print_table(["EXPORT", "SIZE", *named], rows)
    for name, why in done.refused.items():
        print(as_typed(f"Note: no {name}: {why}"))
    print(as_typed(f"Folder: {done.folder}"))
    if forms is EVERY or not wanted.measure:
        print_next(f"report {run.sweep.name} --exports {done.folder}")
        return
    run_report(run.sweep.name, runs_dir, output=None, warmup_steps=None, exports=[Path(done.folder)], as_json=False)


def _measured(card: dict[str, Any]) -> list[str]:
    """Return lines with the most important measurements; card.md has the others."""
    measured, same, lines = card["measured"], card["same"], []
    if measured is not None:
        was, now = measured["original"], measured["exported"]
        lines += [
            f"  {name}: {was['metrics'][name]:.4f} -> {value:.4f}, on {measured['num_samples']} validation samples"
            for name, value in now["metrics"].items()
        ]
        for batch, took in now["latency"].items():
            before, after = (1e3 * side["median_s"] for side in (was["latency"][batch], took))
            lines.append(f"  latency of a batch of {batch}: {before:.3g} ms -> {after:.3g} ms (medians, n={took['n']})")
    if same is not None:
        lines.append(
            f"  outputs differ by at most {same['max_abs_difference']:.3g} on {same['num_samples']} validation samples "
            f"(allowed: {same['tolerance']:.3g})"
        )
    return lines
