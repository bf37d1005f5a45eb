"""`hpc-trainer data`: its commands and their options. No slow imports."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from hpc_trainer.cli.options import ConfigDir, Given, Json, Overrides, Trust, Verb

data = typer.Typer(
    name="data", help="Prepare, check and measure data.", no_args_is_help=True, rich_markup_mode=None,
)  # fmt: skip
prepare = typer.Typer(
    name="prepare", help="Make of raw files what trains fast; started again, it goes on.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip
data.add_typer(prepare, name="prepare")


class OnBroken(str, enum.Enum):
    """Policy for unreadable files."""

    refuse = "refuse"
    skip = "skip"


To = Annotated[Path, typer.Option("--to", metavar="FOLDER", help="The prepared folder.")]
EvalFraction = Annotated[
    float,
    typer.Option("--eval-fraction", metavar="SHARE", help="Share that is held out for evaluation, by a hash of names."),
]
Broken = Annotated[
    OnBroken,
    typer.Option("--on-broken", metavar="refuse|skip", help="Of files that cannot be read: refuse all, or skip these."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", help="Processes; else one for each core that this process may use."),
]
Part = Annotated[
    str | None, typer.Option("--part", metavar="I/N", help="Only each N-th piece from the I-th on: 1/8 .. 8/8.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Make all of it anew; what is there is deleted.")]
OnSlurm = Annotated[
    list[str] | None,
    typer.Option("--slurm", metavar="KEY=VALUE", help="As an array of Slurm jobs, with hardware=.. ; may be repeated."),
]
Parts = Annotated[int, typer.Option("--parts", metavar="N", help="Jobs of that array.")]


@prepare.command("images", cls=Verb)
def prepare_images(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder with a folder of pictures for each class.")
    ],
    to: To,
    size: Annotated[
        int, typer.Option("--size", metavar="PIXELS", help="Pixels of the shorter side; smaller ones stay.")
    ] = 256,
    picture_format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="jpg, png or webp.")] = "jpg",
    quality: Annotated[
        int | None, typer.Option("--quality", metavar="N", help="Of jpg and webp, 1 to 100; else 90.")
    ] = None,
    eval_fraction: EvalFraction = 0.1,
    shard_mib: Annotated[int, typer.Option("--shard-mib", metavar="MIB", help="MiB of a shard, about.")] = 128,
    on_broken: Broken = OnBroken.refuse,
    workers: Workers = None,
    part: Part = None,
    slurm: OnSlurm = None,
    parts: Parts = 8,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Pictures, a folder for each class: resized, in tar shards with an index."""
    from hpc_trainer.cli.data.verbs import How, run_prepare_images
    from hpc_trainer.operate.prepare.images import ImageOptions

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
        str, typer.Option("--document", metavar="file|line", help="What a document is: a file or a line.")
    ] = "file",
    end_token: Annotated[
        str | None,
        typer.Option(
            "--end-token", metavar="TOKEN", help="The token after each document; else the tokenizer's usual one."
        ),
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
    """Texts: as tokens, one document after the other."""
    from hpc_trainer.cli.data.verbs import How, run_prepare_tokens
    from hpc_trainer.operate.prepare.tokens import TokenOptions

    options = TokenOptions(tokenizer=tokenizer, document=document, end_token=end_token, eval_fraction=eval_fraction)
    how = How(
        workers=workers, part=part, slurm=slurm, parts=parts, fresh=fresh, skip_broken=on_broken is OnBroken.skip,
        as_json=as_json,
    )  # fmt: skip
    run_prepare_tokens(sources, to, options, how)


@data.command("check", cls=Verb)
def check(
    overrides: Overrides = None,
    sample: Annotated[
        int | None,
        typer.Option("--sample", metavar="N", help="Only so many samples of each split, at random, and no checksums."),
    ] = None,
    workers: Workers = None,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Read all data as training would, and say what is wrong with them; exit code 1 if anything is."""
    from hpc_trainer.cli.data.verbs import run_check

    run_check(Given(overrides, config_dir, trust), sample=sample, workers=workers, as_json=as_json)


@data.command("bench", cls=Verb)
def bench(
    overrides: Overrides = None,
    workers: Annotated[
        str, typer.Option("--workers", metavar="N,N..", help="Numbers of loader processes to try.")
    ] = "0,2,4",
    seconds: Annotated[float, typer.Option("--seconds", metavar="SECONDS", help="Of each of these.")] = 3.0,
    step_ms: Annotated[
        float | None,
        typer.Option("--step-ms", metavar="MS", help="Milliseconds of a training step; says what suffices for it."),
    ] = None,
    config_dir: ConfigDir = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Measure how fast batches come, by number of loader processes (data.num_workers)."""
    from hpc_trainer.cli.data.verbs import run_bench

    given = Given(overrides, config_dir, trust)
    run_bench(given, workers=workers, seconds=seconds, step_ms=step_ms, as_json=as_json)


@data.command("index", cls=Verb)
def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of tar shards in WebDataset's layout.")],
    as_json: Json = False,
) -> None:
    """Write the index of tar shards that are there already, so that they can be trained on."""
    from hpc_trainer.cli.data.verbs import run_index

    run_index(folder, as_json=as_json)
