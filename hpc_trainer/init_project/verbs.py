"""The verb `init`, and what it prints. Every command line imports this file: functions import what they need."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_trainer.cli.options import Json, Verb

if TYPE_CHECKING:
    from hpc_trainer.init_project.project import NewProject
    from hpc_trainer.init_project.script import Reading
    from hpc_trainer.init_project.submitit import Translation

verbs = typer.Typer()


@verbs.command(cls=Verb)
def init(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Folder and name of the new project; . is the current folder."),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="A training script: list in five steps what to change in it."),
    ] = None,
    submitit: Annotated[
        Path | None,
        typer.Option("--from-submitit", metavar="FILE", help="A script with submitit's executor, to be translated."),
    ] = None,
    launcher: Annotated[
        Path | None,
        typer.Option(
            "--from-hydra-submitit", metavar="FILE", help="YAML of hydra-submitit-launcher, to be translated."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a project that trains, tests its resume and submits; or say what an existing script has to change."""
    from hpc_trainer.errors import ConfigError
    from hpc_trainer.init_project.script import read_training
    from hpc_trainer.init_project.submitit import translate
    from hpc_trainer.init_project.submitit_files import read_launcher, read_script

    if submitit is not None and launcher is not None:
        raise ConfigError("--from-submitit and --from-hydra-submitit both say what a run asks for. Keep one of them.")
    reading = read_training(script) if script is not None else None
    translation, origin = None, submitit or launcher
    if submitit is not None:
        translation = translate(*read_script(submitit))
    elif launcher is not None:
        translation = translate(read_launcher(launcher))
    project = None
    if name is not None or (reading is None and translation is None):
        more = _files_of(translation, origin) if translation is not None and origin is not None else {}
        project = _write(name or ".", more)
    if as_json:
        from hpc_trainer.cli.common import print_json

        print_json(_as_json(project, reading, translation, origin))
        return
    if reading is not None:
        _print_reading(reading)
    if translation is not None and origin is not None:
        _print_translation(translation, origin, is_written=project is not None)
    if project is not None:
        _print_project(project)


def _write(name: str, more: dict[str, str]) -> NewProject:
    from hpc_trainer.init_project.project import write_project

    folder = Path(name)
    return write_project(folder, folder.absolute().name if folder.name in ("", "..") else folder.name, more)


def _profile(origin: Path) -> str:
    """Return the name of the hardware profile and the cluster that are translated from a file."""
    import re

    return re.sub(r"\W", "_", origin.stem).strip("_") or "translated"


def _files_of(translation: Translation, origin: Path) -> dict[str, str]:
    from hpc_trainer.init_project.project import as_yaml

    name = _profile(origin)
    return {
        f"conf/hardware/{name}.yaml": as_yaml(
            {"name": name, **translation.hardware}, f"What a run asks for, translated from {origin.name} of submitit."
        ),
        f"conf/cluster/{name}.yaml": as_yaml(
            {"name": name, "executor": "slurm", **translation.cluster}, f"The site, translated from {origin.name}."
        ),
    }


def _as_json(
    project: NewProject | None, reading: Reading | None, translation: Translation | None, origin: Path | None
) -> dict[str, Any]:
    import dataclasses

    translated = None
    if translation is not None and origin is not None:
        translated = {
            "files": _files_of(translation, origin), "account": translation.account,
            "rows": [dataclasses.asdict(row) for row in translation.rows],
        }  # fmt: skip
    return {
        "project": None if project is None else {**dataclasses.asdict(project), "folder": str(project.folder)},
        "steps": None if reading is None else [dataclasses.asdict(step) for step in reading.steps],
        "as_it_is": (reading.as_it_is or None) if reading is not None else None,
        "note": (reading.note or None) if reading is not None else None,
        "translation": translated,
    }


def _print_project(project: NewProject) -> None:
    from hpc_trainer.cli.common import as_typed, say

    say(f"Wrote {len(project.files)} files to {project.folder}: {', '.join(project.files)}")
    say(f"conf/hardware/here.yaml: {project.hardware[0].lower()}{project.hardware[1:]}. Check the figures.")
    enter = "" if project.folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(project.folder))} && "
    say(as_typed(f"Next: {enter}hpc-trainer train experiment={project.package}"))
    say("Then: pytest, which interrupts the trainings and compares every bit")


def _print_reading(reading: Reading) -> None:
    from hpc_trainer.cli.common import as_typed, say

    if reading.as_it_is:
        unchanged = f"{reading.path} runs unchanged, and starts from the beginning after each stop:"
        say(as_typed(f"{unchanged}\n    {reading.as_it_is}"))
    if reading.note:
        say(reading.note)
    say("To make it continue after a stop, with the same bits (hpc-trainer's docs/own_loop.md):")
    for number, step in enumerate(reading.steps, start=1):
        say(f"\n{number}. {step.title}")
        width = max((len(place.text) for place in step.places), default=0)
        for place in step.places:
            say(f"   line {place.line:>4}  {place.text:<{width}}  {place.change}")
        if step.num_more:
            say(f"   and {step.num_more} more")
        if not step.places:
            say("   no such line was found")
        say(f"   {step.advice}")
    module = _profile(reading.path)
    say(as_typed(f"\nThen: hpc-trainer train --trust {module} train.main={module}.main train.num_steps=100"))
    say(as_typed(f"Then: hpc-trainer verify resume --trust {module} train.main={module}.main --steps 12"))


def _print_translation(translation: Translation, origin: Path, *, is_written: bool) -> None:
    from hpc_trainer.cli.common import as_typed, print_table, say

    print_table(
        ("LINE", "THERE", "HERE", "NOTE"),
        [(str(row.line or "-"), row.theirs, row.ours or "-", row.note or "-") for row in translation.rows],
    )
    if not is_written:
        for place, text in _files_of(translation, origin).items():
            say(f"\n{place}")
            say("\n".join(f"    {line}" for line in text.splitlines()))
    if translation.account is not None:
        say("\nInto ~/.config/hpc_trainer/config.yaml, outside of any repository:")
        say(f"    cluster.account: {translation.account}")
    name = _profile(origin)
    command = f"hpc-trainer plan --config-dir conf hardware={name} cluster={name} experiment=digits --script"
    say(as_typed(f"\nThe batch script, once the files are there: {command}"))
