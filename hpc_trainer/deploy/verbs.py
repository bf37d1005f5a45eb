"""The verbs `export`, `eval` and `predict`, and what they print.

Every command line imports this file at its start: functions import what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_trainer.cli.options import (
    Best,
    ConfigDir,
    DataOverrides,
    Json,
    ModelTarget,
    Raw,
    RunsDir,
    StepOption,
    SweepOption,
    Trust,
    Verb,
    complete_runs,
)

if TYPE_CHECKING:
    from hpc_trainer.deploy.evaluate import Target
    from hpc_trainer.deploy.export import AllExported, Exported, Form, Wanted
    from hpc_trainer.operate.show import Known

verbs = typer.Typer()


@verbs.command("export", cls=Verb)
def export_(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run id, or its beginning or end.", autocompletion=complete_runs)
    ],
    forms: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[sweep=NAME]", help="List of forms to export, as sweep=compress; the report charts them."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="safetensors, torch (only weights), torch_export, onnx (weights and computation).",
        ),
    ] = "safetensors",
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize", metavar="NAME", help="dynamic_int8, int8 or int4: smaller, and in ONNX mostly faster."
        ),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            "--prune",
            metavar="SHARE",
            help="0.5 zeroes half of the weights, channels:0.5 removes channels, 2:4 keeps 2 "
            "of 4; without further training.",
        ),
    ] = None,
    best: Best = False,
    step: StepOption = None,
    raw: Raw = False,
    name: Annotated[
        str, typer.Option("--object", metavar="NAME", help="Name of the model in run.save, for a loop of your own.")
    ] = "model",
    all_ways: Annotated[
        bool, typer.Option("--all", help="Write every format and quantization that the model supports, in one folder.")
    ] = False,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Do not measure latency and metrics, which needs the validation set.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="SHARE",
            help="Largest error of the outputs with --quantize, as a share of the largest output.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="Folder of the export; by default RUN-step-N in the current folder."
        ),
    ] = None,
    sweep: SweepOption = None,
    config_dir: ConfigDir = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write a run's model into one file that loads in ten lines, and its size, latency and metrics beside it."""
    from hpc_trainer.deploy.export import Wanted
    from hpc_trainer.deploy.request import Which

    wanted = Wanted(
        which=Which(best=best, step=step, raw=raw, name=name), to=to, quantize=quantize, prune=prune,
        measure=not no_measure, tolerance=tolerance, output=output,
    )  # fmt: skip
    _export(
        run, sweep, runs_dir, wanted, is_every_form=all_ways, overrides=forms or (), config_dirs=config_dir or (),
        as_json=as_json,
    )  # fmt: skip


def _export(
    name: str, sweep: str | None, runs_dir: Path | None, wanted: Wanted, *, is_every_form: bool,
    overrides: Sequence[str], config_dirs: Sequence[Path], as_json: bool,
) -> None:  # fmt: skip
    import dataclasses

    from hpc_trainer.cli.common import print_json
    from hpc_trainer.deploy import export
    from hpc_trainer.errors import ConfigError
    from hpc_trainer.operate.find import configured_runs_dir
    from hpc_trainer.operate.show import find_run

    if is_every_form and overrides:
        raise ConfigError(f"--all writes every form, and {' '.join(overrides)} lists some. Leave one of the two out.")
    forms = export.forms_of(overrides, config_dirs) if overrides else export.EVERY
    run = find_run(configured_runs_dir(runs_dir), name, sweep)
    if is_every_form or overrides:
        _export_all(run, wanted, forms, runs_dir, as_json=as_json)
        return
    done = export.export(run, wanted)
    if as_json:
        print_json(dataclasses.asdict(done))
    else:
        _print_export(done)


def _print_export(done: Exported) -> None:
    from hpc_trainer.cli.common import as_typed, short_number
    from hpc_trainer.deploy.exported import needed_package

    weights = "averaged weights" if done.weights == "average" else "weights"
    package = needed_package(done.card)  # Python looks for the package beside load.py, not in the current folder
    where = f", where {package} can be imported: PYTHONPATH=. " if package else ": "
    lines = [
        f"{done.run_id}: {weights} of step {done.step}, {done.num_tensors} tensors, "
        f"{short_number(done.num_elements)} elements, {short_number(done.num_bytes)}B. Folder: {done.folder}",
        *_measurements(done.card),
        *(f"Note: {note}" for note in done.notes),
        f"To load it{where}python {Path(done.folder) / 'load.py'}",
    ]
    for line in lines:
        print(as_typed(line))


def _measurements(card: dict[str, Any]) -> list[str]:
    """Return lines with the most important measurements; card.md has the others."""
    measured, same, lines = card["measured"], card["same"], []
    if measured is not None:
        original, exported = measured["original"], measured["exported"]
        lines += [
            f"  {name}: {original['metrics'][name]:.4f} -> {value:.4f}, on {measured['num_samples']} validation samples"
            for name, value in exported["metrics"].items()
        ]
        for batch, took in exported["latency"].items():
            before, after = (1e3 * side["median_s"] for side in (original["latency"][batch], took))
            lines.append(f"  latency of a batch of {batch}: {before:.3g} ms -> {after:.3g} ms (medians, n={took['n']})")
    if same is not None:
        lines.append(
            f"  outputs differ by at most {same['max_abs_difference']:.3g} on {same['num_samples']} validation samples "
            f"(allowed: {same['tolerance']:.3g})"
        )
    return lines


def _export_all(run: Known, wanted: Wanted, forms: Sequence[Form], runs_dir: Path | None, *, as_json: bool) -> None:
    import dataclasses
    import sys

    from hpc_trainer.cli.common import print_json, print_next
    from hpc_trainer.cli.report_verbs import run_report
    from hpc_trainer.deploy.export import EVERY, Wanted, export_all
    from hpc_trainer.errors import ConfigError
    from hpc_trainer.operate.report.write import PageOptions

    options = (wanted.quantize, wanted.prune, wanted.tolerance)
    if options != (None, None, None) or wanted.to != Wanted().to:
        raise ConfigError(
            "--all is every --to with every --quantize, and sweep=.. lists forms. Leave --to, --quantize, --prune and "
            "--tolerance out."
        )
    done = export_all(run, wanted, lambda form: print(f"{form} ..", file=sys.stderr), forms)
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    _print_exports(done)
    if forms is EVERY or not wanted.measure:
        print_next(f"report {run.sweep.name} --exports {done.folder}")
        return
    run_report([run.sweep.name], runs_dir, PageOptions(exports=[Path(done.folder)]), as_json=False)


def _print_exports(done: AllExported) -> None:
    from hpc_trainer.cli.common import as_typed, print_table, short_number

    rows = []
    for export in done.exports:
        measured = export.card["measured"]
        side = {"metrics": {}, "latency": {}} if measured is None else measured["exported"]
        figures = [f"{value:.4f}" for value in side["metrics"].values()]
        figures += [f"{1e3 * timing['median_s']:.3g} ms" for timing in side["latency"].values()]
        rows.append([Path(export.folder).name, f"{short_number(export.num_bytes)}B", *figures])
    measured = done.exports[0].card["measured"] or {"exported": {"metrics": {}, "latency": {}}}
    columns = [name.upper() for name in measured["exported"]["metrics"]]
    columns += [f"BATCH OF {batch}" for batch in measured["exported"]["latency"]]
    print_table(["EXPORT", "SIZE", *columns], rows)
    for name, reason in done.refused.items():
        print(as_typed(f"Note: no {name}: {reason}"))
    print(as_typed(f"Folder: {done.folder}"))


@verbs.command(name="eval", cls=Verb)
def evaluate_(
    target: ModelTarget,
    overrides: DataOverrides = None,
    best: Best = False,
    step: StepOption = None,
    raw: Raw = False,
    sweep: SweepOption = None,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Print the metrics of a run's checkpoint, or of an export, on its validation set or on other data."""
    from hpc_trainer.cli.common import as_typed, print_json
    from hpc_trainer.deploy.evaluate import evaluate

    result = evaluate(_target(target, overrides, best, step, raw, sweep, config_dir, trust, runs_dir))
    if as_json:
        print_json(result)
        return
    lines = [f"{_subject(result)}, on {result['num_samples']} samples of data={result['data']} ({result['device']}):"]
    lines += [f"  {name}={value:.6g}" for name, value in result["metrics"].items()]
    for line in [*lines, *(f"Note: {note}" for note in result["notes"])]:
        print(as_typed(line))


@verbs.command("predict", cls=Verb)
def predict_(
    target: ModelTarget,
    overrides: DataOverrides = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="FILE.jsonl, one line per sample, or FILE.npz, NumPy arrays."
        ),
    ] = Path("predictions.jsonl"),
    best: Best = False,
    step: StepOption = None,
    raw: Raw = False,
    sweep: SweepOption = None,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write the predictions of a run's model, or of an export, on its validation set or on other data."""
    from hpc_trainer.cli.common import as_typed, print_json
    from hpc_trainer.deploy.evaluate import predict

    result = predict(_target(target, overrides, best, step, raw, sweep, config_dir, trust, runs_dir), output)
    if as_json:
        print_json(result)
        return
    lines = [
        f"{_subject(result)}: {result['num_samples']} predictions on data={result['data']} ({result['device']}).",
        f"  {result['output']}: {', '.join(result['keys'])}",
        *(f"Note: {note}" for note in result["notes"]),
    ]
    for line in lines:
        print(as_typed(line))


def _target(
    name: str, overrides: list[str] | None, best: bool, step: int | None, raw: bool, sweep: str | None,
    config_dirs: list[Path] | None, trust: list[str] | None, runs_dir: Path | None,
) -> Target:  # fmt: skip
    from hpc_trainer.deploy.evaluate import Target
    from hpc_trainer.deploy.request import Which
    from hpc_trainer.operate.find import configured_runs_dir

    which = Which(best=best, step=step, raw=raw)
    return Target(
        name=name, runs_dir=configured_runs_dir(runs_dir), sweep=sweep, which=which, overrides=overrides or (),
        config_dirs=config_dirs or (), trust=trust or (),
    )  # fmt: skip


def _subject(result: dict[str, Any]) -> str:
    export = "" if result["folder"] is None else f", exported to {result['folder']}"
    averaged = ", averaged weights" if result["weights"] == "average" else ""
    return f"{result['run_id']}, step {result['step']}{averaged}{export}"
