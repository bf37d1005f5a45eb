"""Options and arguments that several verbs share: their completion in a shell, and the conversion of their values.

No slow imports: every command line imports this file at its start.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hpc_trainer.cli.common import as_typed
from hpc_trainer.errors import ConfigError, HpcTrainerError

if TYPE_CHECKING:
    from hpc_trainer.launch.freeze import Grid
    from hpc_trainer.record.spec import RunSpec


# --- completion of words ---


_INSTRUCTION = "_HPC_TRAINER_COMPLETE"


def complete_overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the groups, choices, keys and values that begin with the typed text."""
    from hpc_trainer.config.compose.completion import overrides_like

    said, key = _of_bash(_texts(ctx, "overrides"), incomplete)
    word = incomplete if key is None else f"{key}={incomplete}"
    if word.startswith("grid="):  # another name of the group (`in_full` in compose/overrides.py, which imports Hydra)
        files = _or_nothing(lambda: overrides_like(word.replace("grid", "sweep", 1), said, _config_dirs(ctx)))
        overrides = [f"grid={override.removeprefix('sweep=')}" for override in files]
    else:
        overrides = _or_nothing(lambda: overrides_like(word, said, _config_dirs(ctx)))
    return overrides if key is None else [override.removeprefix(f"{key}=") for override in overrides]


def complete_sweeps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the sweeps that begin with the typed text."""
    from hpc_trainer.operate.find import sweep_names

    return _or_nothing(lambda: [name for name in sweep_names(_runs_dir(ctx)) if name.startswith(incomplete)])


def complete_runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the runs that begin with the typed text, of --sweep or else of all sweeps."""
    from hpc_trainer.operate.find import run_names

    return _or_nothing(lambda: run_names(_runs_dir(ctx), ctx.params.get("sweep"), incomplete))


def complete_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return sweeps and runs; before any text is typed, return only sweeps, which are fewer."""
    if ctx.params.get("sweep") is not None:
        return complete_runs(ctx, incomplete)
    return [*complete_sweeps(ctx, incomplete), *(complete_runs(ctx, incomplete) if incomplete else ())]


def _or_nothing(find: Callable[[], list[str]]) -> list[str]:
    """Return the completions that `find` returns, or none after an error: the command itself will report the error."""
    try:
        return find()
    except (HpcTrainerError, OSError):
        return []


def _texts(ctx: typer.Context, name: str) -> list[str]:
    return [str(value) for value in ctx.params.get(name) or ()]


def _runs_dir(ctx: typer.Context) -> Path:
    from hpc_trainer.operate.find import configured_runs_dir

    given = ctx.params.get("runs_dir")
    return configured_runs_dir() if given is None else Path(given)


def _config_dirs(ctx: typer.Context) -> list[Path]:
    from hpc_trainer.config.compose.own_files import config_dirs_of

    return config_dirs_of(map(Path, _texts(ctx, "config_dir")))


def _of_bash(said: Sequence[str], incomplete: str) -> tuple[list[str], str | None]:
    """Join words that bash cut at `=` (COMP_WORDBREAKS): `model=cnn` comes as three words, and bash replaces the last.

    Returns:
        The overrides as they were typed, and the key of a value that is being typed, else None.
    """
    parts = list(said)
    if os.environ.get(_INSTRUCTION) == "complete_bash":
        words = os.environ.get("COMP_WORDS", "").split("\n")
        here = int(os.environ.get("COMP_CWORD") or 0)
        if not incomplete and here < len(words) and words[here] == "=":  # typer drops this word
            parts.append("=")
    joined: list[str] = []
    is_open = False  # a key and its `=`, without a value yet
    for part in parts:
        begins = part == "=" and bool(joined) and not is_open
        if begins or is_open:
            joined[-1] += part
        else:
            joined.append(part)
        is_open = begins
    return (joined[:-1], joined[-1][:-1]) if is_open else (joined, None)


# --- options and arguments ---


def _verb(context: Any) -> str:
    """Return the command without the program's name, such as `verify resume`."""
    group = context.parent
    return str(context.info_name) if group is None or group.parent is None else f"{_verb(group)} {context.info_name}"


def _no_names(context: typer.Context, words: list[str] | None) -> list[str] | None:
    """Refuse names of sweeps and runs among overrides; Hydra would only report a grammar error.

    Raises:
        ConfigError: an override is the name of a sweep or a run.
    """
    if context.resilient_parsing:  # shell completion of an unfinished line
        return words
    bare = [word for word in words or () if "=" not in word and not word.startswith("~")]
    if bare:
        from hpc_trainer.cli.common import refuse_names

        refuse_names(_verb(context), bare)
    return words


class _Conversion:
    """Conversion of a parameter's words as typer does it, which loads pydantic only if the words need it.

    Since version 0.29 typer converts each value by pydantic, also a text to a text and a missing value to None, and
    loading pydantic takes long (docs/benchmarks/login_node_and_loop.md).
    """

    def __init__(self, param: Any) -> None:
        self._kind, self._is_list = param.type_descriptor.annotation, param.multiple or param.nargs == -1
        self._of_typer = param.get_runtime_param

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value as the type of the annotation; typer's method has the same name and arguments."""
        if value is None:
            return () if self._is_list else None
        if self._kind is str and isinstance(value, str):
            return value
        if self._kind is Path and isinstance(value, str) and (not os.path.lexists(value) or os.access(value, os.R_OK)):
            return Path(value)
        if self._kind == list[str] and not isinstance(value, str):
            return list(value)
        return self._of_typer().coerce(value, param=param, ctx=ctx)


class _Quick:
    """Part of a command's class that gives `_Conversion` to all of its parameters, also to typer's own, such as --help.

    Earlier versions of typer, which do not load pydantic, keep their conversion.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's parameters."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if hasattr(param, "type_descriptor") and "get_runtime_param" not in vars(param):
                vars(param).update(get_runtime_param=lambda conversion=_Conversion(param): conversion)
        return params


# Verbs of other programs, and what they mean here.
_OTHER_VERBS = {
    "submit": "resume continue restart run start launch queue sbatch", "retry": "rerun requeue resubmit",
    "cancel": "stop kill abort scancel", "sweeps": "ls list", "rm": "delete remove del", "hold": "pause suspend",
    "release": "unhold unpause", "status": "ps squeue state jobs stat info", "logs": "tail cat output stdout",
    "top": "monitor watch dashboard", "show": "describe config inspect", "diff": "compare",
    "report": "plot graph html", "results": "metrics table", "sync": "upload push",
}  # fmt: skip
_VERBS_MEANT = {word: verb for verb, words in _OTHER_VERBS.items() for word in words.split()}


class Program(_Quick, TyperGroup):
    """Group of all verbs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that is meant; a verb of another program is refused with the one that does the same here."""
        meant = _VERBS_MEANT.get(args[0]) if args and args[0] not in self.commands else None
        if meant is not None:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)


class Verb(_Quick, TyperCommand):
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
        new: the new command, with parameters of the old one in braces, such as `verify preempt --kind {what.value}`.
    """

    class Renamed(Verb):
        def invoke(self, ctx: Any) -> Any:
            now = new.format(**ctx.params)
            note = f"Note: `{ctx.info_name}` is an old name that ends with the next version: use hpc-trainer {now}"
            print(as_typed(note), file=sys.stderr)
            return super().invoke(ctx)

    return Renamed


class WithApp(Verb):
    """Command that passes all arguments after `--app` to the app: they become the option's value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as click does, with all arguments after `--app` as one value."""
        for place, word in enumerate(args):
            option, *value = word.split("=", 1)
            app_arguments = [*value, *args[place + 1 :]]
            if option == "--app" and app_arguments:
                return super().parse_args(ctx, [*args[:place], "--app", shlex.join(app_arguments)])
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
        help="Data to use instead of the run's.",
        show_default=False,
        autocompletion=complete_overrides,
    ),
]
ModelTarget = Annotated[
    str,
    typer.Argument(
        metavar="RUN|EXPORT",
        help="Run id, or its beginning or end; or the folder of an export.",
        autocompletion=complete_runs,
    ),
]
Best = Annotated[bool, typer.Option("--best", help="Use the checkpoint that checkpoint.keep_best keeps.")]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", help="Step of the checkpoint; by default the newest.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Use the weights without the averaging of train.ema_decay.")]
EveryRun = Annotated[
    bool, typer.Option("--all", "-a", help="Show a line for every run, even if there are more than 200.")
]
WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Select runs that meet this condition, such as 'optim.lr>1e-3 and state==\"COMPLETED\"'.",
    ),
]
ColumnsOption = Annotated[
    list[str] | None,
    typer.Option("--columns", metavar="NAME,..", help="Columns to show, in this order; all: every column."),
]
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
    typer.Option("--app", metavar="APP [WORD]...", help="A Hydra app of yours; all arguments after it go to the app."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start again from step 0; the old run folders are set aside.")]
Extend = Annotated[bool, typer.Option("--extend", help="Start where the same runs with fewer train.num_steps ended.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust", metavar="PACKAGE", help="A package that _target_ and train.main may name; may be repeated."
    ),
]
RunsDir = Annotated[
    Path | None,
    typer.Option(
        "--runs-dir",
        metavar="FOLDER",
        help="Folder of sweeps; by default $HPC_TRAINER_RUNS, the project file's, or ./runs.",
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
    typer.Argument(metavar="[SWEEP]", help="A sweep; by default the newest one.", autocompletion=complete_sweeps),
]
SweepOption = Annotated[
    str | None,
    typer.Option(
        "--sweep", metavar="SWEEP", help="Name of a sweep; by default the newest one.", autocompletion=complete_sweeps
    ),
]


# --- values that were given ---


@dataclass(frozen=True, slots=True)
class Given:
    """Overrides and folders of the command line; None if they were not given."""

    overrides: list[str] | None
    config_dirs: list[Path] | None
    trust: list[str] | None
    app: str | None = None
    """Hydra app and its arguments as a shell command (`--app`)."""

    @classmethod
    def of_grid(
        cls, overrides: list[str] | None, command: str | None, app: str | None, config_dirs: list[Path] | None,
        trust: list[str] | None,
    ) -> Given:  # fmt: skip
        """Return the input of a grid; `--command` or `--app` name the user's own program instead of a training."""
        if command is None:
            return cls(overrides, config_dirs, trust, app)
        if app is not None:
            raise ConfigError("--command and --app are two programs for one run. Keep one.")
        from hpc_trainer.config.compose.overrides import override_value

        # ${NAME} belongs to the program; OmegaConf must not resolve it.
        kept = override_value(command.replace("${", "\\${"))
        return cls([*(overrides or ()), f"train.command={kept}"], config_dirs, trust)

    @property
    def places(self) -> dict[str, Any]:
        """Allowed sources of configuration and code: the arguments of `freeze_grid` besides overrides."""
        return {"config_dirs": self.config_dirs or [], "trust": self.trust or []}

    def here(self, verb: str, without: tuple[str, ...] = ()) -> Given:
        """Return the input for this machine, without the overrides that begin with one of `without`."""
        from hpc_trainer.config.compose.overrides import overrides_for_here

        local = overrides_for_here(self.overrides or (), verb)
        return dataclasses.replace(self, overrides=[override for override in local if not override.startswith(without)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Choice of the grid's runs to submit, and of their starting points."""

    retry_failed: bool
    fresh: bool
    extend: bool

    def of(self, grid: Grid) -> Grid:
        """Return the grid; with `extend`, its runs start from the ends of shorter runs."""
        if not self.extend:
            return grid
        from hpc_trainer.launch.extend import extend_grid

        return extend_grid(grid)


def one_sweep(positional: str | None, option: str | None) -> str | None:
    """Return the sweep of a command that takes its name as an argument or as --sweep; None if neither is given.

    Raises:
        ConfigError: both are given, and differ.
    """
    if positional is not None and option is not None and positional != option:
        raise ConfigError(
            f"{positional} and --sweep {option} are two sweeps, but this command takes one. Leave one of them out."
        )
    return positional if option is None else option


def words_of(options: Sequence[str] | None) -> list[str]:
    """Return the names of an option that may be repeated, or given once with commas between the names."""
    return [word.strip() for option in options or () for word in option.split(",") if word.strip()]


def tell_notes(notes: Sequence[str]) -> None:
    """Print notes on standard error."""
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)


def only_point(grid: Grid, takes: str, use: str) -> RunSpec:
    """Return the single point of a grid.

    Args:
        grid: the grid.
        takes: the start of the message, such as `train runs`.
        use: the message's last sentence: what to use instead.

    Raises:
        ConfigError: the grid has another number of points than one.
    """
    if len(grid.specs) != 1:
        raise ConfigError(f"{takes} one configuration, and this is a grid of {len(grid.specs)}. {use}")
    return grid.specs[0]


def at_defaults(section: str, fresh: Any) -> Iterator[str]:
    """Yield overrides that reset a section that a command does not use: choices there would be refused as useless.

    Args:
        section: the section.
        fresh: the section's dataclass with its defaults.
    """
    from hpc_trainer.config.compose.overrides import override_value

    for field in dataclasses.fields(fresh):
        value = getattr(fresh, field.name)
        yield f"{section}.{field.name}={override_value(value.name if isinstance(value, enum.Enum) else value)}"
