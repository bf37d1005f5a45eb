"""Files made of what recorded clusters answer: what is in them, what is left out, and that Slurm would accept them."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.schema.cluster import ClusterConfig, HardwareConfig
from hpc_trainer.errors import ConfigError, MissingCommandError, UnclearError
from hpc_trainer.hardware.check import find_shipped
from hpc_trainer.hardware.discover import Choice, Discovery, access_to, discover, smallest_here
from hpc_trainer.hardware.live_verbs import run_discover
from hpc_trainer.hardware.site_files import Proposal, write_files
from hpc_trainer.init_project.project import hardware_here
from hpc_trainer.slurm.inventory import check_whole, first_host, parse_groups, read_inventory
from hpc_trainer.slurm.shape import find_shape_problems, resources
from tests.unit.hardware.conftest import RECORDED, Recorded

Play = Callable[[str], Recorded]
NAMES = sorted(path.stem for path in RECORDED.glob("*.txt"))
DAY = "2026-11-26"


def _found(choice: Choice | None = None, *, machine: str = "x86_64") -> Discovery:
    return discover(read_inventory(), choice or Choice(), day=DAY, machine=machine, groups=frozenset({"users"}))


def _shape(file: Proposal) -> tuple[object, ...]:
    """Return type, number, CPUs and GB of the GPUs, QOS, minutes; of a CPU file ranks, CPUs of each, GB of a node."""
    get = file.values.get
    if "gpus_per_node" in file.values:
        return (
            get("gpu_type"),
            get("gpus_per_node"),
            get("cpus_per_gpu"),
            get("mem_gb_per_gpu"),
            get("qos"),
            get("time_limit_min"),
        )
    return "cpu", get("tasks_per_node"), get("cpus_per_task"), get("mem_gb_per_node"), get("qos"), get("time_limit_min")


H100 = "nvidia_h100_80gb_hbm3"
EXPECTED: dict[str, tuple[dict[str, tuple[object, ...]], dict[str, str]]] = {
    "debian_22_05": (
        {
            "bed2205/main_a100_x1": ("a100", 1, 2, 1.95, None, 1440),
            "bed2205/main_a100_x4": ("a100", 4, 2, 1.95, None, 1440),
            "bed2205/short_a100_x1": ("a100", 1, 2, 1.95, None, 10),
            "bed2205/short_a100_x4": ("a100", 4, 2, 1.95, None, 10),
            "bed2205/preempt_a100_x1": ("a100", 1, 2, 1.95, None, 1440),
            "bed2205/preempt_a100_x4": ("a100", 4, 2, 1.95, None, 1440),
        },
        {},
    ),
    # 104 of 112 cores are for jobs; the QOS of the partition `dev` allows 2 of its 4 hours.
    "digit_names": (
        {
            f"25a/{partition}_h100_x{count}": ("H100", count, 13, 231, None, minutes)
            for partition, minutes in (("dev", 120), ("8gpus", 1440), ("256gpus", 720))
            for count in (1, 8)
        },
        {},
    ),
    # Whole nodes by select/linear, memory unknown, GPUs without a type.
    "no_accounting": ({"lab/batch_gpu_x4": (None, 4, 8, None, None, 1440)}, {}),
    # 128 CPUs are 64 cores; 8 cores and 32 GB are the site's own. A whole-node partition has no file of one GPU.
    "whole_nodes": (
        {
            "boreal/standard-g_mi250_x8": ("mi250", 8, 14, 56, None, 1440),
            "boreal/small-g_mi250_x1": ("mi250", 1, 14, 56, None, 1440),
            "boreal/small-g_mi250_x8": ("mi250", 8, 14, 56, None, 1440),
        },
        {"hidden": "Unix groups staff", "maint": "only root"},
    ),
    # The nodes with slices share their CPUs among 16 GPUs; MaxMemPerCPU=4000 bounds the CPU files.
    "mig": (
        {
            "campus/cpu_x1": ("cpu", 1, 8, 31, None, 1440),
            "campus/cpu_x2": ("cpu", 2, 24, 187, None, 1440),
            "campus/gpu_1g_5gb_x1": ("1g.5gb", 1, 4, 31, None, 1440),
            "campus/gpu_a100_x1": ("a100", 1, 16, 125, None, 1440),
            "campus/gpu_a100_x2": ("a100", 2, 4, 31, None, 1440),
            "campus/gpu_a100_x4": ("a100", 4, 16, 125, None, 1440),
        },
        {},
    ),
    "qos_only": (
        {
            "cori2/gpu_regular_x4": (None, 4, 32, 56, "gpu_regular", 1440),
            "cori2/gpu_shared_x1": (None, 1, 32, 56, "gpu_shared", 1440),
            "cori2/gpu_shared_x4": (None, 4, 32, 56, "gpu_shared", 1440),
        },
        {"realtime": "only the QOS realtime", "staff": "none of your accounts"},
    ),
    # The one A100 node with 48 cores bounds the share of a GPU; FUTURE nodes are not there yet.
    "mixed_nodes": (
        {
            "zoo/main_a100_x1": ("A100", 1, 12, 125, None, 1440),
            "zoo/main_a100_x4": ("A100", 4, 12, 125, None, 1440),
            "zoo/main_a100_x8": ("A100", 8, 16, 125, None, 1440),
            "zoo/main_v100_x1": ("V100", 1, 10, 93, None, 1440),
            "zoo/main_v100_x4": ("V100", 4, 10, 93, None, 1440),
            "zoo/main_cpu_x1": ("cpu", 1, 8, 31, None, 1440),
            "zoo/preempt_a100_x1": ("A100", 1, 12, 125, None, 1440),
            "zoo/preempt_a100_x4": ("A100", 4, 12, 125, None, 1440),
            "zoo/preempt_a100_x8": ("A100", 8, 16, 125, None, 1440),
            "zoo/broken_a100_x1": ("A100", 1, 16, 125, None, 1440),
            "zoo/broken_a100_x4": ("A100", 4, 16, 125, None, 1440),
        },
        {"old": "its state is DOWN", "empty": "it has no nodes"},
    ),
    "one_gpu_nodes": (
        {
            "vista2/gh_cpu_x1": ("cpu", 1, 72, 211, None, 1440),
            "vista2/gh-dev_cpu_x1": ("cpu", 1, 72, 211, None, 120),
        },
        {},
    ),
    # MaxCPUsPerNode=96 and MaxMemPerNode=960000 of `h100`; `large` takes two nodes at least.
    "capped": (
        {
            "nova/h100_x1": (H100, 1, 12, 117, None, 720),
            "nova/h100_x8": (H100, 8, 12, 117, None, 720),
            "nova/large_h100_x2": (H100, 1, 14, 251, None, 1440),
            "nova/large_h100_x16": (H100, 8, 14, 251, None, 1440),
            "nova/preempt-h100_x1": (H100, 1, 14, 251, None, 1440),
            "nova/preempt-h100_x8": (H100, 8, 14, 251, None, 1440),
        },
        {"ours": "Unix groups nova_ours"},
    ),
}
EXPECTED["debian_24_11"] = (
    {name.replace("2205", "2411"): shape for name, shape in EXPECTED["debian_22_05"][0].items()},
    {},
)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_for_each_useful_shape(name: str, recorded: Play) -> None:
    recorded(name)
    found = _found()
    files, left_out = EXPECTED[name]
    assert {file.name: _shape(file) for file in found.hardware} == files
    assert found.skipped.keys() == left_out.keys()
    for partition, words in left_out.items():
        assert words in found.skipped[partition]


SMALLEST = {
    "capped": "nova/h100_x1", "debian_22_05": "bed2205/main_a100_x1", "debian_24_11": "bed2411/main_a100_x1",
    "digit_names": "25a/dev_h100_x1",
    "mig": "campus/gpu_a100_x1", "mixed_nodes": "zoo/main_a100_x1", "no_accounting": "lab/batch_gpu_x4",
    "one_gpu_nodes": "vista2/gh_cpu_x1", "qos_only": "cori2/gpu_regular_x4",
    "whole_nodes": "boreal/standard-g_mi250_x8",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_init_takes_the_smallest_run_of_the_same_files(name: str, recorded: Play) -> None:
    recorded(name)
    values, source = hardware_here()
    (file,) = [file for file in _found().hardware if file.name == SMALLEST[name]]
    days = ("source", "checked")
    assert {**values, **dict.fromkeys(days)} == {**file.values, "name": "here", **dict.fromkeys(days)}
    assert f"partition {values['partition']} of cluster" in source


def test_init_describes_the_machine_where_slurm_does_not_answer(recorded: Play) -> None:
    cluster = recorded("qos_only")
    cluster.answer("scontrol", "slurm_load_partitions: Unable to contact slurm controller\n")
    assert smallest_here() is None
    assert "partition" not in hardware_here()[0]


@pytest.mark.parametrize("name", NAMES)
def test_four_calls_at_most(name: str, recorded: Play) -> None:
    cluster = recorded(name)
    read_inventory()
    assert cluster.calls.count("scontrol") == cluster.calls.count("sinfo") == cluster.calls.count("nodes") == 1
    assert len(cluster.calls) <= 4


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back_and_accepted_and_one_cpu_more_is_not(name: str, recorded: Play) -> None:
    recorded(name)
    limits, found = read_inventory(), _found()
    for file in found.hardware:
        values = yaml.safe_load(file.text)
        assert values.pop("defaults") == [{"override /cluster@_global_.cluster": found.cluster.name}]
        assert values == dict(file.values)
        account = access_to(limits.partitions[values["partition"]], limits, Choice(), frozenset()).account
        cluster = ClusterConfig(account=account)
        assert find_shape_problems(resources(HardwareConfig(**values), cluster, is_one_a_node=False), "x", limits) == []
        if values.get("gpus_per_node", 1) == 1 or len(found.hardware) > 10:
            continue  # the share of one GPU leaves room for the others; nodes of other sizes have room
        group = next(group for group in limits.nodes if group.partition == values["partition"] and group.gpus)
        step = group.threads_per_core
        more = HardwareConfig(**{**values, "cpus_per_gpu": values["cpus_per_gpu"] + step})
        problems = find_shape_problems(resources(more, cluster, is_one_a_node=False), "x", limits)
        if not any(len(other.gpus) > 1 for other in limits.nodes):
            assert any("CPUs a node" in problem for problem in problems), file.name


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_an_account_or_a_user(name: str, recorded: Play) -> None:
    recorded(name)
    limits, found = read_inventory(), _found()
    for file in found.files:
        for account in {each.account for each in limits.associations}:
            assert not re.search(rf"(?<![\w-]){re.escape(account)}(?![\w-])", file.text), file.name


def test_the_composed_configuration_has_the_figures(recorded: Play, tmp_path: Path) -> None:
    recorded("whole_nodes")
    found = _found()
    write_files(tmp_path / "site", found.files, force=False, dry_run=False)
    with Composer([tmp_path / "site"]) as composer:
        config = composer.compose(["hardware=boreal/standard-g_mi250_x8"])
    assert (config.cluster.name, config.cluster.site.arch, config.cluster.site.whole_nodes) == (
        "boreal",
        "x86_64",
        None,
    )
    assert config.hardware == HardwareConfig(**dict(found.hardware[0].values))


def test_facts_without_a_key_are_comments(recorded: Play) -> None:
    recorded("whole_nodes")
    found = _found()
    assert "# At most 210 jobs may be submitted at once.\n" in found.cluster.text
    assert "# An array may have 2001 elements.\n" in found.cluster.text
    text = found.hardware[0].text
    for words in (
        "1000 nodes with mi250:8, 112 CPUs, 448 GB",
        "2 share a core",
        "Every job gets whole nodes",
        "time_limit_min: 2880 is allowed (the MaxTime of partition standard-g)",
        "Charged by CPU=0.0089,GRES/gpu=0.5,Mem=0.0089G",
        "AMD_EPYC, x1203",
        f"\nsource: discovered from Slurm boreal on {DAY}\n",
    ):
        assert words in text


def test_preemption_is_that_of_the_partition_or_of_the_qos(recorded: Play) -> None:
    recorded("mixed_nodes")
    found = _found(Choice(partitions=("main", "preempt")))
    assert found.cluster.values["site"]["preemption"] == "in partitions preempt (CANCEL after 300 s)"
    preempted = [file.values["partition"] for file in found.hardware if "CANCEL after 300 s" in file.text]
    assert set(preempted) == {"preempt"}
    recorded("mig")
    assert _found().cluster.values["site"]["preemption"] == "by QOS, PreemptMode=CANCEL"


def test_nodes_of_another_architecture_are_noted(recorded: Play) -> None:
    recorded("one_gpu_nodes")
    (note,) = _found(machine="x86_64").notes
    assert "aarch64" in note
    assert "cluster.python" in note
    assert _found(machine="aarch64").notes == ()
    assert "Slurm counts no GPUs" in _found().hardware[0].text


def test_nodes_out_of_service_and_nodes_that_sinfo_hides_are_noted(recorded: Play) -> None:
    cluster = recorded("mixed_nodes")
    assert _found().notes == ("all 2 nodes of partition broken are drained or down now",)
    kept = [line for line in cluster.parts["sinfo"].splitlines(keepends=True) if not line.startswith("main|3|128")]
    cluster.answer("sinfo", "".join(kept))
    assert "sinfo shows 10 of the 13 nodes of partition main" in _found().notes


# --- choices ---


@pytest.mark.parametrize(
    ("name", "choice", "words"),
    [
        ("mig", Choice(partitions=("gpus",)), ["--partition gpus", "Did you mean gpu?", "There are: cpu, gpu."]),
        ("mixed_nodes", Choice(partitions=("empty",)), ["no partition can be described", "empty: it has no nodes"]),
        ("mixed_nodes", Choice(account="bioo"), ["--account bioo", "no such account", "Did you mean bio?"]),
        ("mig", Choice(qos="lnog"), ["--qos lnog", "not among your QOS", "Did you mean long?"]),
        ("qos_only", Choice(account="m99_g", qos="gpu_regular"), ["--qos gpu_regular", "There are: gpu_shared"]),
        ("capped", Choice(partitions=("preempt-h100",), account="teach"), ["this account may not use it"]),
    ],
)  # fmt: skip
def test_a_choice_that_the_cluster_does_not_allow(name: str, choice: Choice, words: list[str], recorded: Play) -> None:
    recorded(name)
    with pytest.raises(ConfigError) as caught:
        _found(choice)
    for word in words:
        assert word in str(caught.value)


def test_a_chosen_qos_is_in_the_files_with_its_limit(recorded: Play) -> None:
    recorded("mig")
    (file, *_) = _found(Choice(partitions=("gpu",), qos="long")).hardware
    assert file.values["qos"] == "long"
    assert "time_limit_min: 20160 is allowed (the MaxWall of QOS long)" in file.text  # it may exceed the partition's


# --- answers that are cut off ---


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_cut_off_is_an_error(name: str, recorded: Play) -> None:
    cluster = recorded(name)
    whole = cluster.parts
    check_whole(whole["scontrol"], whole["sacctmgr"], whole["sinfo"])
    draw = random.Random(name)
    for command in ("scontrol", "sacctmgr"):
        for _ in range(40 if whole[command] else 0):
            cut = {**whole, command: whole[command][: draw.randrange(1, len(whole[command].rstrip()) - 1)]}
            with pytest.raises(UnclearError, match="cut off"):
                check_whole(cut["scontrol"], cut["sacctmgr"], cut["sinfo"])
    for line in whole["sinfo"].splitlines(keepends=True):
        with pytest.raises(UnclearError, match="sinfo ends within"):
            check_whole(whole["scontrol"], whole["sacctmgr"], line[: draw.randrange(1, len(line))])


def test_a_cut_off_answer_writes_nothing(recorded: Play, tmp_path: Path) -> None:
    cluster = recorded("mig")
    cluster.answer("scontrol", cluster.parts["scontrol"][:900])
    with pytest.raises(UnclearError, match="Run the same command again"):
        run_discover(tmp_path / "site", [], None, None, force=False, dry_run=False, as_json=True)
    assert not (tmp_path / "site").exists()


@pytest.mark.usefixtures("no_slurm")
def test_no_slurm_at_all(tmp_path: Path) -> None:
    with pytest.raises(MissingCommandError, match=r"scontrol is not on PATH.*login node"):
        run_discover(tmp_path / "site", [], None, None, force=False, dry_run=False, as_json=False)


def test_host_lists_and_groups() -> None:
    assert [first_host(names) for names in ("n1", "n[1-4]", "gpu[007-009,12],n1", "r[1-2]n[01-10]", "a-1,b")] == [
        "n1", "n1", "gpu007", "r1n01", "a-1",
    ]  # fmt: skip
    (group,) = parse_groups("p|2|128+|1000|gpu:a:4|(null)|2:32:2|idle~|n[1-2]\n")
    assert (group.cpus, group.sockets, group.threads_per_core, group.state) == (128, 2, 2, "idle")


# --- files ---


def test_files_of_other_figures_stay_without_force(recorded: Play, tmp_path: Path) -> None:
    recorded("mig")
    files = _found().files
    assert {file.action for file in write_files(tmp_path, files, force=False, dry_run=True)} == {"new"}
    assert not list(tmp_path.rglob("*.yaml"))
    assert {file.action for file in write_files(tmp_path, files, force=False, dry_run=False)} == {"new"}
    first, second = (tmp_path / "hardware" / f"{file.name}.yaml" for file in files[1:3])
    commented = "# mine\n" + first.read_text().replace(DAY, "2020-01-01")
    first.write_text(commented)
    second.write_text(second.read_text().replace("tasks_per_node: 2", "tasks_per_node: 4"))

    done = {file.path: file for file in write_files(tmp_path, files, force=False, dry_run=False)}
    assert [done[path].action for path in (first, second)] == ["same", "differs"]
    assert done[second].difference == ("-tasks_per_node: 4", "+tasks_per_node: 2")
    assert first.read_text() == commented
    assert "tasks_per_node: 4" in second.read_text()

    forced = {file.path: file.action for file in write_files(tmp_path, files, force=True, dry_run=False)}
    assert [forced[path] for path in (first, second)] == ["same", "overwritten"]
    assert "tasks_per_node: 2" in second.read_text()


def test_strange_names_of_partitions_are_quoted_and_find_a_file_name(recorded: Play, tmp_path: Path) -> None:
    cluster = recorded("no_accounting")
    for odd in ("1e3", "on", "gpu:long", "0x10"):
        for command in ("scontrol", "sinfo"):
            text = cluster.parts[command].replace("PartitionName=batch ", f"PartitionName={odd} ")
            cluster.answer(command, re.sub(r"^batch\|", f"{odd}|", text, flags=re.MULTILINE))
        found = _found()
        write_files(tmp_path / odd, found.files, force=False, dry_run=False)
        with Composer([tmp_path / odd]) as composer:
            config = composer.compose([f"hardware={found.hardware[0].name}"])
        assert config.hardware.partition == odd
        assert re.fullmatch(r"lab/[\w-]+", found.hardware[0].name)
        for command in ("scontrol", "sinfo"):
            text = cluster.parts[command].replace(f"PartitionName={odd} ", "PartitionName=batch ")
            cluster.answer(command, re.sub(rf"^{re.escape(odd)}\|", "batch|", text, flags=re.MULTILINE))


def test_the_screen_and_the_json(recorded: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded("qos_only")
    run_discover(tmp_path / "site", [], None, None, force=False, dry_run=False, as_json=False)
    said = capsys.readouterr().out
    for words in (
        "Cluster cori2, Slurm 24.05.4",
        "Left out: realtime: it takes only the QOS realtime; staff: none of your accounts may use it.",
        "m1234_g (QOS gpu_premium, gpu_regular, gpu_shared)",
        "Put the account into ~/.config/hpc_trainer/config.yaml, not into a repository:\n  cluster.account: ACCOUNT",
        f"Files written below {tmp_path / 'site'}: 4\n",
        f"plan --config-dir {tmp_path / 'site'} hardware=cori2/gpu_regular_x4",
    ):
        assert words in said
    run_discover(tmp_path / "other", ["gpu_shared"], "m99_g", None, force=False, dry_run=True, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] == {"partitions": ["gpu_shared"], "account": "m99_g", "qos": None}
    assert [file["action"] for file in told["files"]] == ["new"] * 3
    assert [row["account"] for row in told["accounts"]] == ["m1234_g", "m99_g"]


def test_a_shipped_profile_of_the_cluster_is_compared(
    recorded: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded cluster has the name of a shipped one, and another QOS than its profile."""
    cluster = recorded("qos_only")
    cluster.answer("scontrol", cluster.parts["scontrol"].replace("cori2", "perlmutter"))
    run_discover(tmp_path, [], None, None, force=False, dry_run=True, as_json=True)
    shipped = {profile["name"]: profile for profile in json.loads(capsys.readouterr().out)["shipped"]}
    assert {name.partition("/")[0] for name in shipped} == {"nersc"}
    profile = shipped["nersc/perlmutter_x4"]
    assert not profile["is_fit"]
    assert "partition" in [line["key"] for line in profile["lines"] if line["verdict"] == "wrong"]
    run_discover(tmp_path, [], None, None, force=False, dry_run=True, as_json=False)
    said = capsys.readouterr().out.partition("Shipped profiles of this cluster:\n")[2]
    assert "  nersc/perlmutter_x4: does not fit\n    wrong: " in said


def test_a_cluster_name_in_other_letters_is_recognised(recorded: Play) -> None:
    cluster = recorded("qos_only")
    cluster.answer("scontrol", cluster.parts["scontrol"].replace("cori2", "Delta"))
    assert {profile.name.partition("/")[0] for profile in find_shipped(read_inventory(), [])} == {"ncsa"}


def test_a_site_without_a_confirmed_name_is_recognised_by_its_partitions_and_nodes(
    recorded: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded cluster has Vista's partitions and nodes, and a name that no profile has."""
    recorded("one_gpu_nodes")
    run_discover(tmp_path, [], None, None, force=False, dry_run=True, as_json=True)
    (profile,) = json.loads(capsys.readouterr().out)["shipped"]
    assert (profile["name"], profile["is_fit"], profile["found_by"]) == ("tacc/vista_x1", True, "nodes")
    run_discover(tmp_path, [], None, None, force=False, dry_run=True, as_json=False)
    said = capsys.readouterr().out
    assert (
        "Shipped profiles with these partitions and nodes (not confirmed: ClusterName vista2):\n  tacc/vista_x1: fits"
        in said
    )


@pytest.mark.parametrize(("old", "new"), [("gh-dev", "gh-test"), ("72", "36")])
def test_a_site_of_which_something_is_missing_is_not_recognised(old: str, new: str, recorded: Play) -> None:
    cluster = recorded("one_gpu_nodes")
    for part, answer in list(cluster.parts.items()):
        cluster.answer(part, answer.replace(old, new))
    assert find_shipped(read_inventory(), []) == []


def test_a_site_without_a_confirmed_name_is_recognised_by_its_login_node(
    recorded: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leonardo's files name one partition, which any cluster may have."""
    cluster = recorded("mixed_nodes")
    for part in ("scontrol", "sinfo"):
        cluster.answer(
            part, re.sub(r"^((?:PartitionName=)?)main\b", r"\1boost_usr_prod", cluster.parts[part], flags=re.MULTILINE)
        )
    assert find_shipped(read_inventory(), []) == []
    monkeypatch.setattr("socket.gethostname", lambda: "login05.leonardo.local")
    assert [profile.name for profile in find_shipped(read_inventory(), [])] == ["cineca/leonardo_x4"]


@pytest.mark.long
def test_questions_on_a_terminal(recorded: Play, tmp_path: Path) -> None:
    """A wrong answer is explained and asked again."""
    recorded("mixed_nodes")
    site = tmp_path / "site"
    words = [sys.executable, "-m", "hpc_trainer", "hardware", "discover", "--output", str(site)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="dumb", NO_COLOR="1")
        os.execv(sys.executable, words)
    said = ""
    answers = iter([("Partitions (", "mainn"), ("Did you mean main?", "main,preempt"), ("Account (", "chem")])
    wanted, answer = next(answers)
    try:
        while True:
            said += os.read(terminal, 4096).decode()
            if wanted in said and re.search(r"\]: $", said):
                os.write(terminal, f"{answer}\n".encode())
                said, (wanted, answer) = "", next(answers, ("no more", ""))
    except OSError:  # how Linux says that the other end is closed
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)
    assert "cluster.account: chem" in said
    assert {path.name.split("_")[0] for path in (site / "hardware" / "zoo").iterdir()} == {"main", "preempt"}


def test_a_limit_that_no_shape_fits_leaves_the_partition_out(recorded: Play) -> None:
    recorded("mixed_nodes")
    limits = read_inventory()
    small = dataclasses.replace(limits.partitions["main"], max_mem_per_node_mb=1)
    changed = dataclasses.replace(limits, partitions={**limits.partitions, "main": small})
    found = discover(changed, Choice(), day=DAY, machine="x86_64", groups=frozenset())
    assert found.skipped["main"] == "no shape of its nodes fits the limits of the partition"
