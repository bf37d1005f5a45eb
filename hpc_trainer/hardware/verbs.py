"""`hpc-trainer hardware`: its commands, their options and what they print. No slow imports."""

from __future__ import annotations

from typing import Annotated

import typer

from hpc_trainer.cli.options import ConfigDir, Json, Verb

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
