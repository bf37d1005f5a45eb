"""`hardware discover` and `hardware check`: they ask the cluster at hand, and print what it answers."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from hpc_trainer.cli.common import as_typed, ended_by_signals, print_json, print_next, print_table, say, short_number
from hpc_trainer.cli.grid_verbs import freeze_given
from hpc_trainer.cli.options import Given, tell_notes
from hpc_trainer.config.compose.overrides import override_value
from hpc_trainer.config.compose.own_files import config_dirs_of
from hpc_trainer.errors import ConfigError, ExitCode, RunStateError
from hpc_trainer.hardware.check import (
    OK,
    WRONG,
    Line,
    Measured,
    Shipped,
    check_lines,
    compose_profiles,
    find_shipped,
    measured_lines,
    read_ranks,
)
from hpc_trainer.hardware.discover import (
    Choice,
    Discovery,
    access_to,
    check_choice,
    discover,
    preemption_of,
    qos_choices,
    user_groups,
)
from hpc_trainer.hardware.rank_probe import clock_against_server, filesystem_of
from hpc_trainer.hardware.site_files import Proposal, Written, write_files
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.grids import submit_grid
from hpc_trainer.operate.control import cancel_runs
from hpc_trainer.record.measured import write_measured
from hpc_trainer.record.status import read_status
from hpc_trainer.slurm.inventory import read_inventory
from hpc_trainer.slurm.limits import Limits
from hpc_trainer.slurm.shape import shape_of

_USER_FILE = "~/.config/hpc_trainer/config.yaml"


def run_discover(
    output: Path, partitions: Sequence[str], account: str | None, qos: str | None, *, force: bool, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write the files of this cluster; exit with 1 if a file with other figures was left as it is."""
    limits = read_inventory()
    choice = Choice(partitions=tuple(partitions), account=account, qos=qos)
    check_choice(limits, choice)
    if sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
        choice = _ask(limits, choice)
    discovery = discover(
        limits, choice, day=time.strftime("%Y-%m-%d"), machine=platform.machine(), groups=user_groups()
    )  # fmt: skip
    shipped = find_shipped(limits, [file.values for file in discovery.hardware])
    files = write_files(output, discovery.files, force=force, dry_run=dry_run)
    if as_json:
        print_json({**_discovery_json(discovery, choice, files, dry_run=dry_run), "shipped": _shipped_json(shipped)})
    else:
        _print_discovery(discovery, choice, files, output, dry_run=dry_run)
        _print_shipped(shipped, limits)
        _print_outcome(discovery, files, output, dry_run=dry_run)
    if any(file.action == "differs" for file in files):
        sys.exit(ExitCode.FAILED)


def _ask(limits: Limits, choice: Choice) -> Choice:
    """Ask on the terminal for each choice that no flag makes and that has more than one legal answer."""
    groups = user_groups()
    names = [
        partition.name
        for partition in limits.partitions.values()
        if access_to(partition, limits, choice, groups).refusal is None
    ]
    partitions, account, qos = choice.partitions, choice.account, choice.qos
    if not partitions and len(names) > 1:
        partitions = _words(
            _answer(
                f"Partitions ({', '.join(names)})", "all", limits, lambda text: Choice(partitions=_words(text))
            )
        )  # fmt: skip
    accounts = list(dict.fromkeys(association.account for association in limits.associations))
    default = limits.account_of(None)
    if account is None and len(accounts) > 1:
        said = _answer(
            f"Account ({', '.join(accounts)}); it is written to no file", default or accounts[0], limits,
            lambda text: Choice(account=text),
        )  # fmt: skip
        account = None if said == default else said
    own = qos_choices(limits, account or default)
    if qos is None and len(own) > 1:
        said = _answer(
            f"QOS ({', '.join(own)})", "default", limits,
            lambda text: Choice(account=account, qos=None if text == "default" else text),
        )  # fmt: skip
        qos = None if said == "default" else said
    return Choice(partitions=partitions, account=account, qos=qos)


def _words(text: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(",") if word.strip())
    return () if names == ("all",) else names


def _answer(question: str, default: str, limits: Limits, as_choice: Callable[[str], Choice]) -> str:
    """Return an answer that the cluster allows; a wrong one is explained and asked again."""
    while True:
        said = str(typer.prompt(question, default=default)).strip()
        try:
            check_choice(limits, as_choice(said))
        except ConfigError as error:
            say(str(error))
        else:
            return said


def _print_discovery(
    found: Discovery, choice: Choice, files: Sequence[Written], output: Path, *, dry_run: bool
) -> None:  # fmt: skip
    limits = found.limits
    print(f"Cluster {limits.cluster}, Slurm {limits.version or 'of an unknown release'}\n")
    actions = {file.path: file.action for file in files}
    rows = [_row(file, limits, actions[output / file.group / f"{file.name}.yaml"]) for file in found.hardware]
    print_table(
        ["HARDWARE", "NODES", "GPUS", "CPUS A RANK", "GB", "MINUTES", "PREEMPTION", "FILE"], rows,
        least=("PREEMPTION", "MINUTES"),
    )  # fmt: skip
    if found.skipped:
        print("\nLeft out: " + "; ".join(f"{name}: {reason}" for name, reason in found.skipped.items()) + ".")
    _print_accounts(limits, choice)
    tell_notes(found.notes)
    for file in files:
        if file.difference:
            print(f"\n{file.path} {'was replaced' if file.action == 'overwritten' else 'is there already'}:")
            print("\n".join(f"  {line}" for line in file.difference))
    if dry_run:
        for proposal in found.files:
            print(f"\n# {output / proposal.group / proposal.name}.yaml\n{proposal.text}", end="")


def _print_shipped(shipped: Sequence[Shipped], limits: Limits) -> None:
    if shipped and shipped[0].found_by == "name":
        print("\nShipped profiles of this cluster:")
    elif shipped:
        print(f"\nShipped profiles with these partitions and nodes (not confirmed: ClusterName {limits.cluster}):")
    for profile in shipped:
        say(f"  {profile.name}: {'fits' if profile.is_fit else 'does not fit'}")
        for text in (*(f"{line.verdict}: {line.fix}" for line in profile.lines), *profile.differences):
            say(f"    {text}")


def _shipped_json(shipped: Sequence[Shipped]) -> list[dict[str, Any]]:
    return [
        {
            "name": profile.name, "is_fit": profile.is_fit, "found_by": profile.found_by,
            "differences": list(profile.differences),
            "lines": [dataclasses.asdict(line) for line in profile.lines],
        }
        for profile in shipped
    ]  # fmt: skip


def _print_outcome(found: Discovery, files: Sequence[Written], output: Path, *, dry_run: bool) -> None:
    kept = [file for file in files if file.action == "differs"]
    written = [file for file in files if file.action in ("new", "overwritten")]
    same = len(files) - len(kept) - len(written)
    verb = "would be written" if dry_run else "written"
    print(f"\nFiles {verb} below {output}: {len(written)}" + (f"; the same already: {same}" if same else ""))
    if kept:
        print(f"Files with other figures, which stay as they are: {len(kept)}. To replace them: --force")
        return
    if not dry_run:
        print_next(f"plan --config-dir {output} hardware={found.hardware[0].name} experiment=digits")


def _row(file: Proposal, limits: Limits, action: str) -> list[str]:
    values = file.values
    partition = limits.partitions[values["partition"]]
    mode = preemption_of(partition, limits)
    gpus = values.get("gpus_per_node", 0)
    memory = values.get("mem_gb_per_gpu", values.get("mem_gb_per_node"))
    return [
        file.name,
        str(values["num_nodes"]),
        f"{gpus} {values.get('gpu_type', '')}".strip() if gpus else "-",
        str(values.get("cpus_per_gpu", values.get("cpus_per_task"))),
        "-" if memory is None else f"{memory:g} {'a GPU' if gpus else 'a node'}",
        str(values["time_limit_min"]),
        f"{mode}, {partition.grace_s} s" if mode else "-",
        action,
    ]


def _print_accounts(limits: Limits, choice: Choice) -> None:
    if not limits.associations:
        return
    default = limits.account_of(None)
    print("\nYour accounts:")
    for association in limits.associations:
        facts = [
            *(["your default"] if association.account == default else []),
            *([f"partition {association.partition}"] if association.partition else []),
            *([f"QOS {', '.join(association.qos)}"] if association.qos else []),
        ]
        print(f"  {association.account}" + (f" ({'; '.join(facts)})" if facts else ""))
    account = choice.account or default
    if default is None or choice.account not in (None, default):
        print(f"Put the account into {_USER_FILE}, not into a repository:\n  cluster.account: {account or 'ACCOUNT'}")


def _discovery_json(found: Discovery, choice: Choice, files: Sequence[Written], *, dry_run: bool) -> dict[str, Any]:
    limits = found.limits
    return {
        "cluster": limits.cluster,
        "slurm": limits.version,
        "accounts": [
            {
                "account": association.account, "partition": association.partition or None,
                "qos": list(association.qos), "default_qos": association.default_qos or None,
                "is_default": association.account == limits.account_of(None),
            }
            for association in limits.associations
        ],
        "chosen": {"partitions": list(choice.partitions), "account": choice.account, "qos": choice.qos},
        "is_dry_run": dry_run,
        "files": [
            {
                "group": proposal.group, "name": proposal.name, "path": str(file.path), "action": file.action,
                "values": dict(proposal.values), "comments": list(proposal.comments),
                "difference": list(file.difference),
            }
            for proposal, file in zip(found.files, files, strict=True)
        ],
        "left_out": dict(found.skipped),
        "notes": list(found.notes),
    }  # fmt: skip


# --- check ---

_SWEEP = "hardware_check"
_LIMIT_MIN = 10
# squeue once a while: the job waits for minutes or hours, and measures for less than one.
_POLL_S, _SLOWEST_POLL_S = 5.0, 30.0
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")


def run_check(
    name: str, given: Given, *, runs: bool, internet: bool, timeout_s: float, as_json: bool
) -> None:  # fmt: skip
    """Compare a profile with the cluster, and measure with a short job if `runs`; exit with 1 if a line is wrong."""
    folders = config_dirs_of(given.config_dirs or ())
    overrides = given.overrides or []
    (config,) = compose_profiles([name], overrides, folders)
    limits = read_inventory()
    shape = shape_of(config)
    has_name = any(override.startswith("hardware.name=") for override in overrides)
    lines = check_lines(config, limits, None if has_name else name)
    is_fit = all(line.verdict != WRONG for line in lines)
    if not as_json:
        print(as_typed(f"{name} on {limits.cluster}, Slurm {limits.version or 'of an unknown release'}"))
        _print_lines(lines)
        tell_notes(limits.notes)
    figures = None
    measured: list[Line] = []
    if runs and is_fit:
        grid = _probe_grid([f"hardware={name}", *overrides], given, config.hardware.device_type, internet=internet)
        found = _run_probe(grid, timeout_s, say=(lambda _: None) if as_json else lambda text: print(text, flush=True))
        measured = list(measured_lines(found, shape, is_gpu=config.hardware.device_type == "cuda"))
        day = time.strftime("%Y-%m-%d")
        problems = {line.key: f"{line.cluster}. {line.fix}".rstrip(".") for line in measured if line.verdict != OK}
        own = config.hardware.name  # plan and advise look for this name, whatever the file is called
        figures = {"cluster": limits.cluster, "hardware": own, "day": day, **found.to_json(), "problems": problems}
        kept = write_measured(str(limits.cluster), own, figures)
        if not as_json:
            _print_measured(figures, measured, kept)
    all_lines = [*lines, *measured]
    if as_json:
        print_json(
            {
                "cluster": limits.cluster, "hardware": name, "lines": [dataclasses.asdict(line) for line in lines],
                "measured_lines": [dataclasses.asdict(line) for line in measured], "measured": figures,
                "notes": list(limits.notes),
            }
        )  # fmt: skip
    elif runs and not is_fit:
        print("No job was submitted: correct what is wrong first.")
    if any(line.verdict == WRONG for line in all_lines):
        sys.exit(ExitCode.FAILED)
    if not as_json and not runs:
        dirs = "".join(f" --config-dir {folder}" for folder in given.config_dirs or ())
        print_next(f"hardware check {' '.join([name, *(given.overrides or [])])}{dirs} --run")


def _print_lines(lines: Sequence[Line]) -> None:
    rows = [[line.key, line.asked or "-", line.cluster or "-", line.verdict] for line in lines]
    print_table(["KEY", "PROFILE", "CLUSTER", "VERDICT"], rows, least=(("CLUSTER", 20),))
    for line in lines:
        if line.fix:
            say(f"{line.verdict}: {line.fix}")


def _probe_grid(overrides: Sequence[str], given: Given, device: str, *, internet: bool) -> Grid:
    """Return the one run that measures: the profile's shape, its cluster's set-up, and our script as the program."""
    script = Path(__file__).with_name("rank_probe.py")
    arguments = [
        "python",
        shlex.quote(str(script)),
        "--folder",
        "{run.dir}",
        "--device",
        "cuda" if device == "cuda" else "cpu",
    ]
    if internet:
        arguments += ["--internet", package_index()]
    forced = [
        f"train.command={override_value(' '.join(arguments))}", "train.command_env=torchrun",
        f"hardware.time_limit_min={_LIMIT_MIN}", "hardware.launcher=srun", f"sweep_name={_SWEEP}",
    ]  # fmt: skip
    kept = [word for word in overrides if not word.startswith(("hardware.time_limit_min=", "sweep_name="))]
    return freeze_given(Given(kept, given.config_dirs, given.trust), *forced)


def package_index() -> str:
    """Return HOST:PORT of the configured package index, else of a site that always answers."""
    url = next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), "https://example.com")
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (80 if parts.scheme == 'http' else 443)}"


def _run_probe(grid: Grid, timeout_s: float, say: Callable[[str], None]) -> Measured:
    """Submit the job, wait for its end, and return what its ranks wrote; a job that still exists is cancelled.

    Raises:
        RunStateError: the job did not end in time, or no rank wrote anything.
    """
    (spec,) = grid.specs
    with ended_by_signals():
        done = submit_grid(grid, fresh=True, command_line=sys.argv)
        job_ids = ", ".join(array.job_id for array in done.arrays)
        say(f"\nJob {job_ids} measures on {spec.shape.num_nodes} node(s); waiting for it ..")
        deadline, pause = time.monotonic() + timeout_s, _POLL_S
        try:
            while (run := read_status(grid.sweep).run(spec.run_id)).state.is_active:
                if time.monotonic() > deadline:
                    raise RunStateError(
                        f"job {job_ids} has not ended after {timeout_s:g} s, and is {run.state.value}. It was "
                        "cancelled. Use a longer --timeout."
                    )
                time.sleep(pause)
                pause = min(_SLOWEST_POLL_S, pause * 1.2)
        except BaseException:
            status = read_status(grid.sweep)
            cancel_runs(status, [run for run in status.open_runs.values() if run.state.is_active])
            raise
    folder = grid.sweep.run(spec.run_id).output
    ranks = read_ranks(folder, spec.shape.world_size)
    if not ranks:
        raise RunStateError(
            f"job {job_ids} is {run.state.value} and no rank measured anything: {run.reason or 'no reason is known'}. "
            f"Read: hpc-trainer logs {spec.run_id}"
        )
    return Measured(
        ranks=ranks, world_size=spec.shape.world_size, filesystem=filesystem_of(folder),
        login_clock_s=clock_against_server(folder / ".clock-login"),
    )  # fmt: skip


def _print_measured(figures: dict[str, Any], lines: Sequence[Line], kept: Path) -> None:
    rows = [
        [
            str(rank["rank"]), rank["node"], rank["gpu_uuid"] or rank["gpu"] or "-", _ranges(rank["cpus"]),
            ",".join(map(str, rank["numa"])) or "-",
        ]
        for rank in figures["ranks"]
    ]  # fmt: skip
    print()
    print_table(["RANK", "NODE", "GPU", "CPUS", "NUMA"], rows)
    where = {"node": "within a node", "across": "one rank of each node", "all": "all ranks"}
    rows = [
        [
            where[scope], str(figures_of_scope["ranks"]), f"{figures_of_scope['latency_s'] * 1e6:.0f} µs",
            f"{short_number(figures_of_scope['bus_bytes_per_s'])}B/s",
        ]
        for scope, figures_of_scope in figures["all_reduce"].items()
    ]  # fmt: skip
    if rows:
        print()
        print_table(["ALL-REDUCE", "RANKS", "LATENCY", "BUS BANDWIDTH"], rows)
    print()
    if (writes := figures["write_bytes_per_s"]) is not None:
        total = f", {short_number(writes['sum'])}B/s in all" if len(figures["clock_offset_s"]) > 1 else ""
        kind = figures["filesystem"] or "a file system of unknown type"
        print(f"Writing into the folder of runs ({kind}): {short_number(writes['slowest_node'])}B/s a node{total}")
    _print_lines(lines)
    print(as_typed(f"Kept in {kept}"))


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: `0-3,8`."""
    ranges, start = list[str](), None
    for index, number in enumerate(numbers):
        start = number if start is None else start
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            ranges.append(str(start) if start == number else f"{start}-{number}")
            start = None
    return ",".join(ranges) or "-"
