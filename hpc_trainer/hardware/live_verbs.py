"""`hardware discover` and `hardware check`: they ask the cluster at hand, and print what it answers."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from hpc_trainer.cli.common import print_json, print_next, print_table, say
from hpc_trainer.cli.options import tell_notes
from hpc_trainer.errors import ConfigError, ExitCode
from hpc_trainer.hardware.discover import (
    Choice,
    Discovery,
    Proposal,
    Written,
    access_to,
    check_choice,
    discover,
    preemption_of,
    qos_choices,
    user_groups,
    write_files,
)
from hpc_trainer.slurm.inventory import read_inventory
from hpc_trainer.slurm.limits import Limits

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
    found = discover(
        limits, choice, day=time.strftime("%Y-%m-%d"), machine=platform.machine(), groups=user_groups()
    )  # fmt: skip
    files = write_files(output, found.files, force=force, dry_run=dry_run)
    if as_json:
        print_json(_discovery_json(found, choice, files, dry_run=dry_run))
    else:
        _print_discovery(found, choice, files, output, dry_run=dry_run)
    if any(file.action == "differs" for file in files):
        sys.exit(ExitCode.FAILED)


def _ask(limits: Limits, choice: Choice) -> Choice:
    """Ask on the terminal what the flags leave open and where there is more than one answer."""
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
            f"Account ({', '.join(accounts)}); no file will hold it", default or accounts[0], limits,
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
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    return () if words == ("all",) else words


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
        ["hardware=", "nodes", "GPUs", "CPUs a rank", "GB", "minutes", "preempted by", "file"], rows,
        least=("preempted by", "minutes"),
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
    _print_outcome(found, files, output, dry_run=dry_run)


def _print_outcome(found: Discovery, files: Sequence[Written], output: Path, *, dry_run: bool) -> None:
    kept = [file for file in files if file.action == "differs"]
    written = [file for file in files if file.action in ("new", "overwritten")]
    same = len(files) - len(kept) - len(written)
    verb = "would be written" if dry_run else "written"
    print(f"\n{len(written)} files {verb} below {output}" + (f", {same} are the same already." if same else "."))
    if kept:
        print(f"{len(kept)} files have other figures and stay as they are. To replace them: --force")
        return
    words = f"cluster={found.cluster.name} hardware={found.hardware[0].name}"
    if not dry_run:
        print_next(f"plan --config-dir {output} {words} experiment=digits")


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
