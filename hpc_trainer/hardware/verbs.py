"""`hpc-trainer hardware`: its commands, their options and what they print. No slow imports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_trainer.cli.options import ConfigDir, Given, Json, Overrides, Verb

verbs = typer.Typer()
hardware = typer.Typer(
    name="hardware", help="Hardware profiles: which there are, and what is known of each.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip
verbs.add_typer(hardware)


@hardware.command("list", cls=Verb)
def list_profiles(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD...]", help="Only profiles that have all of these words.")
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """List the hardware profiles, of which `hardware=NAME` chooses one."""
    from hpc_trainer.cli.common import print_json, print_table
    from hpc_trainer.hardware.profiles import profile_names

    names = [name for name in profile_names(config_dir or []) if all(word in name for word in words or [])]
    if as_json:
        print_json({"profiles": names})
    else:
        print_table(["name"], [[name] for name in names])


@hardware.command(cls=Verb)
def discover(
    output: Annotated[
        Path, typer.Option("--output", metavar="FOLDER", help="Folder of the files, for --config-dir.")
    ] = Path("site"),
    partition: Annotated[
        list[str] | None, typer.Option("--partition", metavar="NAME", help="Only this partition; may be repeated.")
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", metavar="NAME", help="Account that you submit with; no file holds it.")
    ] = None,
    qos: Annotated[str | None, typer.Option("--qos", metavar="NAME", help="QOS for the hardware files.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that have other figures.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write a cluster file and hardware files of the cluster that answers here, made of what its Slurm says."""
    from hpc_trainer.hardware.live_verbs import run_discover

    run_discover(output, partition or [], account, qos, force=force, dry_run=dry_run, as_json=as_json)


@hardware.command(cls=Verb)
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A profile, as hardware=NAME takes it.")],
    overrides: Overrides = None,
    run: Annotated[
        bool, typer.Option("--run", help="Submit a short job that measures binding, links and files.")
    ] = False,
    internet: Annotated[
        bool, typer.Option("--internet/--no-internet", help="Let a rank of each node try to reach the package index.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds that the job may wait and work.")
    ] = 3600.0,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Compare a profile with the cluster that answers here, line by line, with the fix of what is wrong."""
    from hpc_trainer.hardware.live_verbs import run_check

    given = Given(overrides, config_dir, None)
    run_check(name, given, runs=run, internet=internet, timeout_s=timeout, as_json=as_json)
