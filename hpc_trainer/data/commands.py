"""`hpc-trainer data`: its commands and their options. No slow imports."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from hpc_trainer.cli.options import ConfigDir, Given, Json, Overrides, Trust, Verb

verbs = typer.Typer(
    name="data", help="Prepare, check and measure data.", no_args_is_help=True, rich_markup_mode=None,
)  # fmt: skip
prepare = typer.Typer(
    name="prepare", help="Convert raw files to a form that trains fast; the same command again continues.",
    no_args_is_help=True, rich_markup_mode=None,
)  # fmt: skip
verbs.add_typer(prepare, name="prepare")


class OnBroken(str, enum.Enum):
    """Policy for unreadable files."""

    refuse = "refuse"
    skip = "skip"


To = Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Folder for the result.")]
EvalFraction = Annotated[
    float,
    typer.Option("--eval-fraction", metavar="SHARE", help="Share to hold out for evaluation, by a hash of names."),
]
Broken = Annotated[
    OnBroken,
    typer.Option("--on-broken", metavar="refuse|skip", help="Policy for unreadable files: stop, or leave them out."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", help="Number of processes; by default one for each core that this process may use."
    ),
]
Part = Annotated[
    str | None, typer.Option("--part", metavar="I/N", help="Make only every N-th piece, from the I-th on: 1/8 to 8/8.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete what is there, and make everything anew.")]
OnSlurm = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        metavar="KEY=VALUE",
        help="Run as an array of Slurm jobs with this override, such as hardware=NAME; may be repeated.",
    ),
]
Parts = Annotated[int, typer.Option("--parts", metavar="N", help="Number of jobs in that array.")]


@prepare.command("images", cls=Verb)
def prepare_images(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Folder with a folder of images for each class.")],
    to: To,
    size: Annotated[
        int,
        typer.Option("--size", metavar="PIXELS", help="Pixels of the shorter side; smaller images are not enlarged."),
    ] = 256,
    picture_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="Format of the result: jpg, png or webp.")
    ] = "jpg",
    quality: Annotated[
        int | None, typer.Option("--quality", metavar="N", help="Quality of jpg and webp, 1 to 100; by default 90.")
    ] = None,
    eval_fraction: EvalFraction = 0.1,
    shard_mib: Annotated[
        int, typer.Option("--shard-mib", metavar="MIB", help="Approximate size of a shard in MiB.")
    ] = 128,
    on_broken: Broken = OnBroken.refuse,
    workers: Workers = None,
    part: Part = None,
    slurm: OnSlurm = None,
    parts: Parts = 8,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Resize images, which are in a folder for each class, and write tar shards with an index."""
    from hpc_trainer.data.prepare.images import ImageOptions
    from hpc_trainer.data.verbs import How, run_prepare_images

    options = ImageOptions(
        size=size, format=picture_format, quality=quality, eval_fraction=eval_fraction, shard_mib=shard_mib
    )
    how = How(
        workers=workers, part=part, slurm=slurm, parts=parts, fresh=fresh, skip_broken=on_broken is OnBroken.skip,
        as_json=as_json,
    )  # fmt: skip
    run_prepare_images(source, to, options, how)


@prepare.command("tokens", cls=Verb)
def prepare_tokens(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files, folders or 'patterns/**/*.txt'.")],
    to: To,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="TOKENIZER", help="`bytes`, or a tokenizer.json.")
    ] = "bytes",
    document: Annotated[
        str, typer.Option("--document", metavar="file|line", help="Unit that is a document: a file or a line.")
    ] = "file",
    end_token: Annotated[
        str | None,
        typer.Option("--end-token", metavar="TOKEN", help="Token after each document; by default the tokenizer's own."),
    ] = None,
    eval_fraction: EvalFraction = 0.1,
    on_broken: Broken = OnBroken.refuse,
    workers: Workers = None,
    part: Part = None,
    slurm: OnSlurm = None,
    parts: Parts = 8,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Convert texts to tokens, one document after the other."""
    from hpc_trainer.data.prepare.tokens import TokenOptions
    from hpc_trainer.data.verbs import How, run_prepare_tokens

    options = TokenOptions(tokenizer=tokenizer, document=document, end_token=end_token, eval_fraction=eval_fraction)
    how = How(
        workers=workers, part=part, slurm=slurm, parts=parts, fresh=fresh, skip_broken=on_broken is OnBroken.skip,
        as_json=as_json,
    )  # fmt: skip
    run_prepare_tokens(sources, to, options, how)


@verbs.command("check", cls=Verb)
def check(
    overrides: Overrides = None,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample", metavar="N", help="Read only N samples of each split, drawn at random, and check no checksums."
        ),
    ] = None,
    workers: Workers = None,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Read all data as training would, and list their problems; exit with 1 if there are any."""
    from hpc_trainer.data.verbs import run_check

    run_check(Given(overrides, config_dir, trust), sample=sample, workers=workers, as_json=as_json)


@verbs.command("bench", cls=Verb)
def bench(
    overrides: Overrides = None,
    workers: Annotated[
        str, typer.Option("--workers", metavar="N,N..", help="Numbers of loader processes to try.")
    ] = "0,2,4",
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", help="Seconds to measure each number.")
    ] = 3.0,
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms",
            metavar="MS",
            help="Milliseconds of a training step; prints the number of processes that suffices for it.",
        ),
    ] = None,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Measure how fast batches are loaded, by number of loader processes (data.num_workers)."""
    from hpc_trainer.data.verbs import run_bench

    given = Given(overrides, config_dir, trust)
    run_bench(given, workers=workers, seconds=seconds, step_ms=step_ms, as_json=as_json)


@verbs.command("index", cls=Verb)
def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of tar shards in WebDataset's layout.")],
    as_json: Json = False,
) -> None:
    """Write the index of existing tar shards, which training on them needs."""
    from hpc_trainer.data.verbs import run_index

    run_index(folder, as_json=as_json)
