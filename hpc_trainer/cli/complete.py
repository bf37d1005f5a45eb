"""Shell completion: typer calls these functions for the words that a user may type next. No slow imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from hpc_trainer.errors import HpcTrainerError

_INSTRUCTION = "_HPC_TRAINER_COMPLETE"


def complete_overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the groups, choices, keys and values that begin with the typed text."""
    from hpc_trainer.config.compose.completion import overrides_like
    from hpc_trainer.config.compose.overrides import in_full

    said, key = _of_bash(_texts(ctx, "overrides"), incomplete)
    word = incomplete if key is None else f"{key}={incomplete}"
    if word.startswith("grid="):  # another name of the group (config/compose/overrides.py, `in_full`)
        files = _or_nothing(lambda: overrides_like(in_full(word), said, _config_dirs(ctx)))
        overrides = [f"grid={override.removeprefix('sweep=')}" for override in files]
    else:
        overrides = _or_nothing(lambda: overrides_like(word, said, _config_dirs(ctx)))
    return overrides if key is None else [override.removeprefix(f"{key}=") for override in overrides]


def complete_sweeps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the sweeps that begin with the typed text."""
    from hpc_trainer.operate.names import sweep_names

    return _or_nothing(lambda: [name for name in sweep_names(_runs_dir(ctx)) if name.startswith(incomplete)])


def complete_runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the runs that begin with the typed text, of --sweep or else of all sweeps."""
    from hpc_trainer.operate.names import run_names

    return _or_nothing(lambda: run_names(_runs_dir(ctx), ctx.params.get("sweep"), incomplete))


def complete_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return sweeps and runs; before any text is typed, return only sweeps, which are fewer."""
    if ctx.params.get("sweep") is not None:
        return complete_runs(ctx, incomplete)
    return [*complete_sweeps(ctx, incomplete), *(complete_runs(ctx, incomplete) if incomplete else ())]


def _or_nothing(find: Callable[[], list[str]]) -> list[str]:
    """Return the words of `find`, or none after an error: the command itself will report the error."""
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
    from hpc_trainer.config.compose.own_files import read_project

    return [*map(Path, _texts(ctx, "config_dir")), *read_project().config_dirs]


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
