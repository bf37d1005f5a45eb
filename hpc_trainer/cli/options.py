"""Options and arguments that several commands share. No slow imports."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hpc_trainer.cli.complete import complete_names, complete_overrides, complete_runs, complete_sweeps
from hpc_trainer.cli.terminal import as_typed


def _verb(context: Any) -> str:
    """Return the command without the program's name, as `verify resume`."""
    group = context.parent
    return str(context.info_name) if group is None or group.parent is None else f"{_verb(group)} {context.info_name}"


def _no_names(context: typer.Context, words: list[str] | None) -> list[str] | None:
    """Refuse names of sweeps and runs among overrides; Hydra would only report a grammar error.

    Raises:
        ConfigError: a word is the name of a sweep or a run.
    """
    if context.resilient_parsing:  # shell completion of an unfinished line
        return words
    bare = [word for word in words or () if "=" not in word and not word.startswith("~")]
    if bare:
        from hpc_trainer.cli.common import refuse_names

        refuse_names(_verb(context), bare)
    return words


class Verb(TyperCommand):
    """Command whose help shows only an argument's metavar; typer would add brackets and `<list[str]>`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for param in self.params:
            if param.param_type_name == "argument":
                shown = [param.metavar or str(param.name)]
                vars(param).update(get_usage_pieces=lambda ctx, shown=shown: shown, display_type_rich=lambda ctx: None)


def renamed(new: str) -> type[Verb]:
    """Return the class of a command's old name: it names the new command on standard error, then works as before.

    Args:
        new: the new command, with parameters of the old one in braces, as `verify preempt --kind {what.value}`.
    """

    class Renamed(Verb):
        def invoke(self, ctx: Any) -> Any:
            now = new.format(**ctx.params)
            told = f"Note: `{ctx.info_name}` is an old name that ends with the next version: use hpc-trainer {now}"
            print(as_typed(told), file=sys.stderr)
            return super().invoke(ctx)

    return Renamed


class WithApp(Verb):
    """Command that passes all words after `--app` to the app: they become the option's value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as click does, with all words from `--app` on as one value."""
        for place, word in enumerate(args):
            option, *value = word.split("=", 1)
            words = [*value, *args[place + 1 :]]
            if option == "--app" and words:
                return super().parse_args(ctx, [*args[:place], "--app", shlex.join(words)])
        return super().parse_args(ctx, args)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE...]",
        help="Hydra overrides; a=1,2 is an axis of the grid.",
        show_default=False,
        callback=_no_names,
        autocompletion=complete_overrides,
    ),
]
DataOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[data=CHOICE|data.KEY=VALUE]...",
        help="Other data than the run's.",
        show_default=False,
        autocompletion=complete_overrides,
    ),
]
ModelTarget = Annotated[
    str,
    typer.Argument(
        metavar="RUN|EXPORT",
        help="A run's id, its beginning or end; or the folder of an export.",
        autocompletion=complete_runs,
    ),
]
Best = Annotated[bool, typer.Option("--best", help="The checkpoint that checkpoint.keep_best keeps.")]
StepOption = Annotated[int | None, typer.Option("--step", metavar="N", help="A checkpoint's step; else the newest.")]
Raw = Annotated[bool, typer.Option("--raw", help="With train.ema_decay: not the averaged weights.")]
EveryRun = Annotated[bool, typer.Option("--all", "-a", help="A line for each run, also of more than 200.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md).")]
ConfigDir = Annotated[
    list[Path] | None,
    typer.Option("--config-dir", metavar="FOLDER", help="A folder of your own conf/ files; may be repeated."),
]
Command = Annotated[
    str | None,
    typer.Option(
        "--command", metavar="COMMAND", help="Your own program: 'python train.py --lr {params.lr} --out {run.dir}'."
    ),
]
App = Annotated[
    str | None,
    typer.Option("--app", metavar="APP [WORD]...", help="A Hydra app of yours; all that follows is its own."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew; the old run folders are set aside.")]
Extend = Annotated[bool, typer.Option("--extend", help="Begin where runs of fewer train.num_steps have ended.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust", metavar="PACKAGE", help="A package that _target_ and train.main may name; may be repeated."
    ),
]
RunsDir = Annotated[
    Path | None,
    typer.Option(
        "--runs-dir", metavar="FOLDER", help="Folder of sweeps; else $HPC_TRAINER_RUNS, the project file's, ./runs."
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SWEEP|RUN...]", help="A sweep, runs by their ids, or both.", autocompletion=complete_names
    ),
]
SweepArgument = Annotated[
    str | None,
    typer.Argument(metavar="[SWEEP]", help="A sweep; else the newest one.", autocompletion=complete_sweeps),
]
SweepOption = Annotated[
    str | None,
    typer.Option(
        "--sweep", metavar="SWEEP", help="A sweep, by its name; else the newest one.", autocompletion=complete_sweeps
    ),
]
