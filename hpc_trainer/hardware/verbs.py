"""`hpc-trainer hardware`: its commands, their options and what they print. No slow imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_trainer.cli.options import ConfigDir, Given, Json, Overrides, Verb, complete_overrides, tell_notes

if TYPE_CHECKING:
    from hpc_trainer.hardware.profiles import Profile

verbs = typer.Typer()
hardware = typer.Typer(
    name="hardware", help="Hardware profiles: list, show and check them, or write those of this cluster.",
    no_args_is_help=True, rich_markup_mode=None,
)  # fmt: skip
verbs.add_typer(hardware)


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the profiles that begin with the typed text."""
    return [word.removeprefix("hardware=") for word in complete_overrides(ctx, f"hardware={incomplete}")]


@hardware.command("list", cls=Verb)
def list_profiles(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD...]", help="Show only profiles that match all of these words.")
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """List the hardware profiles; hardware=NAME chooses one."""
    from hpc_trainer.cli.common import print_json, print_next, print_table, say
    from hpc_trainer.config.compose.own_files import config_dirs_of
    from hpc_trainer.hardware.profiles import read_profiles

    wanted = [word.lower() for word in words or []]
    unread: list[str] = []
    profiles = [
        profile
        for profile in read_profiles(config_dirs_of(config_dir or ()), unread)
        if all(word in f"{profile.name} {profile.about} {profile['partition']}".lower() for word in wanted)
    ]
    if as_json:
        print_json({"profiles": [_as_json(profile) for profile in profiles], "notes": unread})
        return
    tell_notes(unread)
    if not profiles:
        print(f"No profile has {' and '.join(words or [])}.")
        print_next("hardware list")
        return
    columns = ("NAME", "NODES", "GPUS A NODE", "CORES", "MEMORY", "PARTITION", "LIMIT", "CHECKED", "WHAT")
    print_table(columns, [_row(profile) for profile in profiles], least=("WHAT", "CHECKED", "CORES", "NODES"))
    for profile in profiles:
        if profile["name"] != profile.name:
            say(f"Note: {profile.path} has name: {profile['name']}. Write name: {profile.name}.")
    print_next(f"hardware show {profiles[0].name}")


@hardware.command("show", cls=Verb)
def show_profile(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of a profile, as `hardware list` shows it.", autocompletion=_complete
        ),
    ],
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Show one profile: figures, rules of the site, sources, and what the batch script gets from it."""
    from hpc_trainer.cli.common import print_json, print_next, say
    from hpc_trainer.config.compose.own_files import config_dirs_of
    from hpc_trainer.hardware.profiles import read_cluster, read_profile, site_of

    folders = config_dirs_of(config_dir or ())
    profile = read_profile(name, folders)
    cluster = read_cluster(profile.cluster, folders) if profile.cluster is not None else None
    lines = _script_lines(profile, folders)
    if as_json:
        site = None if cluster is None else {**cluster.values, "site": site_of(cluster), "file": str(cluster.path)}
        print_json({**_as_json(profile), "site": site, "script": lines})
        return
    say(f"hardware={profile.name}: {profile.about}")
    for key, value in _told(profile.values):
        say(f"  {key:<16}{value}")
    if profile["name"] != profile.name:
        say(f"  {'name':<16}{profile['name']} (in the file; write name: {profile.name})")
    for text in profile.sources:
        say(f"  {'source':<16}{text}")
    if cluster is not None:
        say(f"cluster={cluster.name}: {cluster.about}")
        for line in _of_cluster(cluster):
            say(f"  {line}")
    say("batch script:")
    for line in lines:
        say(f"  {line}")
    print_next(f"plan experiment=digits hardware={profile.name} --script")


@hardware.command(cls=Verb)
def discover(
    output: Annotated[
        Path,
        typer.Option("--output", metavar="FOLDER", help="Folder to write the files to, for use with --config-dir."),
    ] = Path("site"),
    partition: Annotated[
        list[str] | None,
        typer.Option("--partition", metavar="NAME", help="Describe only this partition; may be repeated."),
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", metavar="NAME", help="Account to submit with; it is written to no file.")
    ] = None,
    qos: Annotated[str | None, typer.Option("--qos", metavar="NAME", help="QOS for the hardware files.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that have other figures.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write a cluster file and hardware files for the cluster that answers here, from Slurm's answers."""
    from hpc_trainer.hardware.live_verbs import run_discover

    run_discover(output, partition or [], account, qos, force=force, dry_run=dry_run, as_json=as_json)


@hardware.command(cls=Verb)
def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of a profile, as `hardware list` shows it.", autocompletion=_complete
        ),
    ],
    overrides: Overrides = None,
    run: Annotated[
        bool, typer.Option("--run", help="Submit a short job that measures binding, links and files.")
    ] = False,
    internet: Annotated[
        bool, typer.Option("--internet/--no-internet", help="Let a rank of each node try to reach the package index.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Seconds that the job may wait in the queue and run.")
    ] = 3600.0,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Compare a profile with the cluster that answers here, line by line, with a fix for each problem."""
    from hpc_trainer.hardware.live_verbs import run_check

    given = Given(overrides, config_dir, None)
    run_check(name, given, runs=run, internet=internet, timeout_s=timeout, as_json=as_json)


@verbs.command(cls=Verb)
def pack(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A venv, a project of uv, or a conda environment.")],
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="The archive; default: FOLDER.tar.")] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Also import this module in the copy; may be repeated."),
    ] = None,
    with_python: Annotated[
        bool, typer.Option("--with-python", help="Also pack the Python of a venv, so that nodes need none.")
    ] = False,
    tries: Annotated[
        bool, typer.Option("--try/--no-try", help="Unpack the archive elsewhere once, and run its Python.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing archive.")] = False,
    as_json: Json = False,
) -> None:
    """Pack a Python environment into one file, which cluster.environment.stage unpacks on each node's disk."""
    from hpc_trainer.cli.common import print_json, print_next, say, short_number
    from hpc_trainer.hardware.pack import is_shared, pack_environment

    done = pack_environment(folder, to, modules=modules or (), with_python=with_python, force=force, tries=tries)
    if as_json:
        outside = [{"folder": place, "filesystem": kind, "modules": count} for place, kind, count in done.outside]
        print_json({**dataclasses.asdict(done), "archive": str(done.archive), "source": str(done.source),
                    "outside": outside})  # fmt: skip
        return
    print(f"{done.archive}: {short_number(done.num_bytes)}B, {done.num_files} files, sha256 {done.sha256[:16]}")
    if done.python is not None:
        print(f"A copy in another folder runs Python {done.python}" + (f" and {', '.join(modules)}" if modules else ""))
    for place, kind, count in done.outside:
        where = (
            f"{kind}, which the nodes share: --with-python packs it"
            if is_shared(kind)
            else f"{kind}: it must be on each node"
        )
        print(f"  {count} modules come from outside the copy: {place} ({where})")
    for note in done.notes:
        say(f"Note: {note}.")
    print("\nIn the cluster file:")
    print(f"  environment:\n    stage: {done.archive}")
    if done.kind == "venv":
        print(f"    venv: {done.source}    # used where no disk of a node takes the copy")
    print_next(f"plan experiment=digits cluster.environment.stage={done.archive} --script")


def _as_json(profile: Profile) -> dict[str, Any]:
    from hpc_trainer.config.schema.cluster import HardwareConfig

    figures = {field.name: profile[field.name] for field in dataclasses.fields(HardwareConfig)}
    plain = {key: getattr(value, "value", value) for key, value in figures.items()}
    return {
        **plain, "name": profile.name, "about": profile.about, "cluster": profile.cluster, "file": str(profile.path),
        "source": profile.sources,
    }  # fmt: skip


def _row(profile: Profile) -> list[str]:
    gpus, kind = profile["gpus_per_node"], profile["gpu_type"]
    cores = profile["cpus_per_gpu"] or profile["cpus_per_task"] or 1
    queue = " ".join(str(profile[key]) for key in ("partition", "qos", "constraint") if profile[key])
    return [
        profile.name, str(profile["num_nodes"]), f"{gpus}{f' {kind}' if kind and gpus else ''}" if gpus else "-",
        f"{cores} a rank", _memory(profile), queue or "-", f"{profile['time_limit_min']} min",
        profile["checked"] or "-", profile.about or "-",
    ]  # fmt: skip


def _memory(profile: Profile) -> str:
    for unit in ("node", "gpu", "cpu"):
        if profile[f"mem_gb_per_{unit}"] is not None:
            return f"{profile[f'mem_gb_per_{unit}']:g} GB a {unit}"
    return "-"


def _told(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key not in ("name", "source"):
            yield key, value


def _of_cluster(cluster: Profile) -> Iterator[str]:
    """Yield the lines about a cluster: its settings in scripts, with the reasons, and known facts about the site."""
    from hpc_trainer.hardware.profiles import site_of, split_sources

    site = site_of(cluster)
    reasons = site["reasons"]
    for line in cluster.values.get("setup") or ():
        yield f"{'setup':<16}{line}"
    options = {argument.partition("=")[0]: argument for argument in cluster.values.get("srun_args") or ()}
    given = {
        "env": {name: f"{name}={value}" for name, value in (cluster.values.get("env") or {}).items()},
        "srun": options,
        "sbatch": {name: f"--{name}={value}" for name, value in (cluster.values.get("sbatch") or {}).items()},
    }
    for kind, entries in given.items():
        for name, text in entries.items():
            yield f"{kind:<16}{text}" + (f"  ({reasons[name]})" if name in reasons else "")
    yes_no = {True: "yes", False: "no", None: "not known"}
    for key in ("slurm_cluster", "login_hosts", "arch", "preemption"):
        if site[key]:
            yield f"{key:<16}{site[key]}"
    yield f"{'internet':<16}{yes_no[site['internet']]}"
    yield f"{'whole_nodes':<16}{yes_no[site['whole_nodes']]}"
    for limit in site["time_limits"]:
        yield f"{'time limit':<16}{', '.join(f'{key} {value}' for key, value in limit.items())}"
    for note in site["notes"]:
        yield f"{'note':<16}{note}"
    for text in split_sources(site["source"]):
        yield f"{'source':<16}{text}"
    yield f"{'checked':<16}{site['checked']}"
    if site["unverified"]:
        yield f"{'unverified':<16}{', '.join(site['unverified'])}"


_OF_EACH_RUN = ("array", "comment", "job-name", "open-mode", "output", "requeue", "signal")
"""Options of sbatch that no profile decides."""


def _script_lines(profile: Profile, config_dirs: Sequence[Path]) -> list[str]:
    """Return the lines of a batch script that the profile and its cluster decide, with this user's own defaults."""
    from hpc_trainer.launch.freeze import freeze_grid
    from hpc_trainer.launch.plan import build_plan
    from hpc_trainer.launch.submit import array_script_of

    overrides = [f"hardware={profile.name}", "sweep_name=shown", "train.command='true'", "snapshot=off"]
    overrides += ["cluster=slurm"] if profile.cluster is None else []
    plan = build_plan(freeze_grid(overrides, config_dirs=config_dirs))
    (array,) = plan.arrays
    script = array_script_of(plan, array).splitlines()
    options = [line for line in script if line.startswith("#SBATCH --")]
    return [line for line in options if line.split("--")[1].partition("=")[0].strip() not in _OF_EACH_RUN]
