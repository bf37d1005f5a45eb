"""The verbs that tidy sweeps: their options and what they print. No slow imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_trainer.cli.options import Json, Names, RunsDir, SweepOption, Verb, complete_sweeps

if TYPE_CHECKING:
    from hpc_trainer.operate.show import Labels
    from hpc_trainer.record.layout import SweepPaths
    from hpc_trainer.tidy.cleaning import Item

verbs = typer.Typer()

Sweep = Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep, by its name.", autocompletion=complete_sweeps)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete these files; without --yes they are only shown.")]
_ITEMS_SHOWN = 20


@verbs.command(cls=Verb)
def tag(
    name: Sweep,
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="[TAG...]", help="Tags to add; without any, the tags are shown.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="TAG", help="A tag to remove; may be repeated.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Add tags to a sweep, by which `sweeps --tag` finds it, or remove some."""
    from hpc_trainer.tidy.labels import change_tags, read_labels

    sweep = _sweep(runs_dir, name)
    labels = change_tags(sweep, tags or (), remove or ()) if tags or remove else read_labels(sweep)
    _tell_labels(sweep, labels, as_json=as_json)


@verbs.command(cls=Verb)
def note(
    name: Sweep,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="[TEXT]",
            help="The note; '' removes it; without a note, the present one is shown.",
            show_default=False,
        ),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write a note on a sweep, which `sweeps` shows."""
    from hpc_trainer.tidy.labels import change_note, read_labels

    sweep = _sweep(runs_dir, name)
    labels = read_labels(sweep) if text is None else change_note(sweep, text)
    _tell_labels(sweep, labels, as_json=as_json)


def _sweep(runs_dir: Path | None, name: str) -> SweepPaths:
    """Return the sweep of this name. Raises RunStateError, with the nearest names, if there is none."""
    from hpc_trainer.operate.find import configured_runs_dir, existing_sweep

    return existing_sweep(configured_runs_dir(runs_dir), name)


def _tell_labels(sweep: SweepPaths, labels: Labels, *, as_json: bool) -> None:
    from hpc_trainer.cli.common import print_json, say

    if as_json:
        print_json({"sweep": sweep.name, "tags": list(labels.tags), "note": labels.note})
        return
    say(f"{sweep.name}: tags {', '.join(labels.tags) or 'none'}")
    if labels.note:
        say(f"Note: {labels.note}")


@verbs.command(cls=Verb)
def rename(
    name: Sweep,
    new: Annotated[str, typer.Argument(metavar="NEW", help="New name of the sweep: letters, digits and ._- only.")],
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Give a sweep at rest another name; the old name stays valid."""
    from hpc_trainer.cli.common import print_json, print_next, say
    from hpc_trainer.cli.options import tell_notes
    from hpc_trainer.tidy.labels import rename_sweep

    sweep = _sweep(runs_dir, name)
    renamed, told = rename_sweep(sweep, new)
    tell_notes([] if told is None else [told])
    if as_json:
        print_json({"sweep": renamed.name, "before": sweep.name, "old_name_works": told is None})
        return
    rest = f" {sweep.name} stays valid." if told is None else ""
    say(f"{sweep.name} is {renamed.name} now.{rest}")
    print_next(f"status {renamed.name}")


@verbs.command(cls=Verb)
def clean(
    names: Annotated[
        list[str], typer.Argument(metavar="SWEEP...", help="Sweeps, by their names.", autocompletion=complete_sweeps)
    ],
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Old checkpoints, beyond the newest and the best.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="All checkpoints of failed runs.")] = False,
    code: Annotated[
        bool, typer.Option("--code", help="Frozen code and compile caches of sweeps that have ended.")
    ] = False,
    yes: Yes = False,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Show which files of sweeps can be deleted, or delete them with --yes; files that a run or --extend needs stay."""
    from hpc_trainer.operate.find import configured_runs_dir
    from hpc_trainer.tidy.cleaning import Needs, checked_rules

    rules = checked_rules({"checkpoints": checkpoints, "failed": failed, "code": code}, is_done=yes)
    sweeps = [_sweep(runs_dir, name) for name in dict.fromkeys(names)]
    needs = Needs(configured_runs_dir(runs_dir).absolute())
    documents = [_clean(sweep, rules, needs, yes=yes, as_json=as_json) for sweep in sweeps]
    if as_json:
        from hpc_trainer.cli.common import print_json

        print_json(documents)


def _clean(sweep: SweepPaths, rules: Sequence[str], needs: Any, *, yes: bool, as_json: bool) -> dict[str, Any]:
    from hpc_trainer.operate.find import prepare_to_write
    from hpc_trainer.record.processes import submit_lock
    from hpc_trainer.record.status import read_status
    from hpc_trainer.record.trust import check_place
    from hpc_trainer.tidy.cleaning import delete_items, drop_unused_code, find_items, totals

    reasons: list[str] = []
    if yes:
        check_place(sweep.folder)
        prepare_to_write(sweep)
        with submit_lock(sweep):
            items, notes = find_items(read_status(sweep), rules, needs)
            items = delete_items(items, reasons.append)
            drop_unused_code(sweep.folder.parent)
            sweep.walk.unlink(missing_ok=True)
    else:
        items, notes = find_items(read_status(sweep, is_look=True), rules, needs)
    if not as_json:
        _tell_items(sweep, items, [*notes, *reasons], rules, yes=yes)
    return {
        "sweep": sweep.name, "deleted": yes, "rules": {rule: totals(items)[rule] for rule in rules},
        "paths": [str(item.path) for item in items], "notes": [*notes, *reasons],
    }  # fmt: skip


def _tell_items(
    sweep: SweepPaths, items: Sequence[Item], notes: Sequence[str], rules: Sequence[str], *, yes: bool
) -> None:
    from hpc_trainer.cli.common import print_next, print_table, say
    from hpc_trainer.tidy.cleaning import RULES, totals
    from hpc_trainer.tidy.walk import size_words

    sums = totals(items)
    say(f"Sweep {sweep.name}: {'deleted' if yes else 'what can be deleted'}")
    print_table(
        ["RULE", "NUMBER", "SIZE", "FILES", "WHAT"],
        [
            [f"--{rule}", str(sums[rule]["items"]), size_words(sums[rule]["bytes"]), str(sums[rule]["files"]),
             RULES[rule]]
            for rule in rules
        ],
    )  # fmt: skip
    for item in items[:_ITEMS_SHOWN] if not yes else ():
        say(f"  {item.path.relative_to(sweep.folder)}  {size_words(item.size.num_bytes)}")
    if len(items) > _ITEMS_SHOWN and not yes:
        say(f"  and {len(items) - _ITEMS_SHOWN} more: --json lists all.")
    for line in notes:
        say(f"Note: {line}")
    useful = [rule for rule in rules if sums[rule]["items"]]
    if useful and not yes:
        print_next(f"clean {sweep.name} {' '.join(f'--{rule}' for rule in useful)} --yes")


@verbs.command(cls=Verb)
def rm(
    names: Names = None,
    yes: Yes = False,
    sweep: SweepOption = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Remove a sweep or runs at rest, with all their files; what is removed is never called FAILED."""
    from hpc_trainer.cli.common import print_json, print_next, say, warn
    from hpc_trainer.errors import ConfigError
    from hpc_trainer.operate.find import check_one_each, configured_runs_dir, names_runs, select
    from hpc_trainer.tidy.cleaning import Needs, check_not_needed, check_ours, remove_runs, remove_sweep
    from hpc_trainer.tidy.labels import at_rest, check_rests
    from hpc_trainer.tidy.walk import Size, size_of, size_words

    if not names and sweep is None:
        raise ConfigError("rm needs the name of a sweep or of a run: `hpc-trainer sweeps` and `status` list them.")
    status, run_ids = select(configured_runs_dir(runs_dir), names or [], sweep)
    check_one_each(status, names or [], sweep)
    warn(status)
    paths = status.sweep
    is_whole = len(run_ids) == len(status.specs) and not names_runs(status.sweep, names or [])
    folders = [paths.folder] if is_whole else [paths.run(run_id).folder for run_id in run_ids]
    chosen = None if is_whole else run_ids
    if is_whole:
        check_ours(status)
    check_rests(status, "rm", chosen)
    check_not_needed(folders, paths, Needs(paths.folder.parent), run_ids)
    size = sum(map(size_of, folders), Size())
    what = (
        f"the sweep {paths.name} with {len(run_ids)} run(s)" if is_whole else f"{len(run_ids)} run(s) of {paths.name}"
    )
    if yes:
        with at_rest(paths, "rm", chosen) as now:
            check_not_needed(folders, paths, Needs(paths.folder.parent), run_ids)
            remove_sweep(paths) if is_whole else remove_runs(now, run_ids)
    if as_json:
        print_json({
            "sweep": paths.name, "whole": is_whole, "runs": run_ids, "bytes": size.num_bytes, "files": size.inodes,
            "removed": yes,
        })  # fmt: skip
        return
    for run_id in run_ids[:_ITEMS_SHOWN] if not is_whole else ():
        say(f"  {run_id} ({status.states[run_id].value})")
    taken = f"{size_words(size.num_bytes)} in {size.inodes:,} files and folders"
    if yes:
        say(f"Removed {what}: {taken}.")
        return
    say(f"This would remove {what}: {taken}. It cannot be undone; `hpc-trainer archive` keeps a copy.")
    print_next(f"rm {' '.join(names or [])}{'' if sweep is None else f' --sweep {sweep}'} --yes")


@verbs.command(cls=Verb)
def archive(
    name: Sweep,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file: .tar, .tar.gz, .tgz, .tar.xz or .txz.")],
    every_checkpoint: Annotated[
        bool,
        typer.Option(
            "--all-checkpoints", help="Include all checkpoints; by default the newest and the best of each run."
        ),
    ] = False,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Write a sweep at rest into one tar file with checksums; `unarchive` brings it back."""
    from hpc_trainer.cli.common import print_json, print_next, say
    from hpc_trainer.tidy.archive import pack
    from hpc_trainer.tidy.labels import at_rest
    from hpc_trainer.tidy.walk import size_words

    sweep = _sweep(runs_dir, name)
    with at_rest(sweep, "archive") as status:
        done = pack(status, file, every_checkpoint=every_checkpoint)
    size = done.place.stat().st_size
    if as_json:
        print_json({
            "sweep": done.sweep, "file": str(done.place), "files": done.num_files, "bytes": done.num_bytes,
            "archive_bytes": size, "left_out": list(done.left_out),
        })  # fmt: skip
        return
    if done.left_out:
        say(f"Note: {len(done.left_out)} link(s) are left out, such as {done.left_out[0]}.")
    say(f"{done.place}: {done.num_files:,} files of {done.sweep}, {size_words(done.num_bytes)} as {size_words(size)}.")
    print_next(f"rm {done.sweep}")


@verbs.command(cls=Verb)
def unarchive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `hpc-trainer archive` wrote.")],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="SWEEP", help="Name of the sweep; by default the name in the archive."),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Unpack an archived sweep into the folder of sweeps, after every checksum has fitted."""
    from hpc_trainer.cli.common import print_json, print_next, say
    from hpc_trainer.errors import ConfigError
    from hpc_trainer.operate.find import configured_runs_dir
    from hpc_trainer.tidy.archive import unpack
    from hpc_trainer.tidy.walk import size_words

    if not file.is_file():
        raise ConfigError(f"{file} is not a file. Name a file that `hpc-trainer archive` wrote.")
    done = unpack(file, configured_runs_dir(runs_dir).absolute(), name)
    if as_json:
        print_json({"sweep": done.sweep, "folder": str(done.place), "files": done.num_files, "bytes": done.num_bytes})
        return
    say(f"{done.sweep}: {done.num_files:,} files, {size_words(done.num_bytes)}, in {done.place}.")
    print_next(f"status {done.sweep}")
