"""Commands on a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_trainer.cli.complete import complete_runs
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
)

verbs = typer.Typer()


@verbs.command(cls=Verb)
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, or its beginning or end.", autocompletion=complete_runs)
    ],
    forms: Annotated[
        list[str] | None,
        typer.Argument(metavar="[sweep=NAME]", help="A list of forms, as sweep=compress; drawn into the report."),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="safetensors, torch (weights alone), torch_export, onnx (they run by themselves).",
        ),
    ] = "safetensors",
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", metavar="NAME", help="dynamic_int8, int8 or int4: smaller, in ONNX mostly faster."),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            "--prune", metavar="SHARE", help="0.5 of the weights zero, channels:0.5 taken out, or 2:4; not trained on."
        ),
    ] = None,
    best: Best = False,
    step: StepOption = None,
    raw: Raw = False,
    name: Annotated[
        str, typer.Option("--object", metavar="NAME", help="Of your own loop: what run.save calls the model.")
    ] = "model",
    all_ways: Annotated[
        bool, typer.Option("--all", help="Every format and quantization that the model can have, in one folder.")
    ] = False,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Without latency and metrics, which take the validation set.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="SHARE", help="How far outputs of --quantize may be off, as a share of the largest."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="The folder; else RUN-step-N here.")
    ] = None,
    sweep: SweepOption = None,
    config_dir: ConfigDir = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write a run's model into one file that loads in ten lines, and its size, latency and metrics beside it."""
    from hpc_trainer.cli.verbs.export import run_export
    from hpc_trainer.deploy.export import Wanted
    from hpc_trainer.deploy.request import Which

    wanted = Wanted(
        which=Which(best=best, step=step, raw=raw, name=name), to=to, quantize=quantize, prune=prune,
        measure=not no_measure, tolerance=tolerance, output=output,
    )  # fmt: skip
    run_export(
        run, sweep, runs_dir, wanted, all_ways=all_ways, words=forms or (), config_dirs=config_dir or (),
        as_json=as_json,
    )  # fmt: skip


@verbs.command(name="eval", cls=Verb)
def evaluate(
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
    """Print the metrics of a run's checkpoint, or of an export, on its validation set or on other data; here."""
    from hpc_trainer.cli.given import resolve_runs_dir
    from hpc_trainer.cli.verbs.eval import run_eval
    from hpc_trainer.deploy.evaluate import Target
    from hpc_trainer.deploy.request import Which

    which = Which(best=best, step=step, raw=raw)
    given = Target(
        name=target, runs_dir=resolve_runs_dir(runs_dir), sweep=sweep, which=which, overrides=overrides or (),
        config_dirs=config_dir or (), trust=trust or (),
    )  # fmt: skip
    run_eval(given, as_json=as_json)


@verbs.command(cls=Verb)
def predict(
    target: ModelTarget,
    overrides: DataOverrides = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="FILE.jsonl, a line a sample, or FILE.npz, arrays of numpy."
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
    """Write what a run's model, or an export, predicts for each sample of its validation set or of other data; here."""
    from hpc_trainer.cli.given import resolve_runs_dir
    from hpc_trainer.cli.verbs.eval import run_predict
    from hpc_trainer.deploy.evaluate import Target
    from hpc_trainer.deploy.request import Which

    which = Which(best=best, step=step, raw=raw)
    given = Target(
        name=target, runs_dir=resolve_runs_dir(runs_dir), sweep=sweep, which=which, overrides=overrides or (),
        config_dirs=config_dir or (), trust=trust or (),
    )  # fmt: skip
    run_predict(given, output, as_json=as_json)
