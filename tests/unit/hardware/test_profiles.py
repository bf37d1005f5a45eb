"""Profiles as their files have them: the same figures as composing gives, and the page of all of them.

HPC_TRAINER_UPDATE_GOLDEN=1 writes docs/reference/hardware_profiles.md anew: read the difference before keeping it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hpc_trainer.cli.main import app
from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.load import plain_value
from hpc_trainer.config.schema.cluster import HardwareConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.hardware.profiles import Profile, read_cluster, read_profile, read_profiles, site_of, split_sources
from hpc_trainer.launch.freeze import freeze_grid
from hpc_trainer.launch.plan import build_plan

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "hardware_profiles.md"
PROFILES = read_profiles()


@pytest.mark.long
def test_figures_are_those_of_composing() -> None:
    """Hydra and our own reader agree on each file, with the base files that it names and its cluster."""
    with GridComposer() as composer:
        for profile in PROFILES[:: 1 if os.environ.get("CI") else 7]:
            config = composer.compose_point([f"hardware={profile.name}"]).config
            told = {field.name: profile[field.name] for field in dataclasses.fields(HardwareConfig)}
            assert plain_value(config.hardware) == plain_value(told), profile.name
            cluster = read_cluster(profile.cluster or "local").values
            assert (config.cluster.name, config.cluster.env) == (cluster["name"], cluster.get("env") or {})


def test_all_profiles_are_read_in_a_moment() -> None:
    begin = time.process_time()
    assert len(read_profiles()) > 80
    assert time.process_time() - begin < 1.0, "the files are read without Hydra, which takes 0.1 s for each"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nersc/perlmuter_x4", "Did you mean nersc/perlmutter_x4? "),
        ("frontier", "Alike: olcf/frontier_x8."),
        ("h100", "Alike: alliance/killarney_h100_x8, "),
        ("x", "hardware=x: no such profile. `hpc-trainer hardware list`"),
    ],
)
def test_an_unknown_name_gives_the_nearest(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_profile(name)
    assert told in str(caught.value)


def test_files_of_ones_own_folder_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "hardware" / "lab").mkdir(parents=True)
    mine = tmp_path / "hardware" / "lab" / "big.yaml"
    mine.write_text("# Ours.\ndefaults:\n  - node/h100_x8@_here_\n  - _self_\nname: lab/big\nnum_nodes: 3\n")
    profile = read_profile("lab/big", [tmp_path])
    assert (profile["num_nodes"], profile["gpus_per_node"], profile.about, profile.cluster) == (3, 8, "Ours.", None)
    mine.write_text("defaults: [lab/big@_here_]\n")
    with pytest.raises(ConfigError, match="leads back to itself"):
        read_profile("lab/big", [tmp_path])
    for text, message in (("a: [", "cannot be read"), ("- a\n", "must map keys")):
        mine.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_profile("lab/big", [tmp_path])


def test_a_file_that_names_itself_otherwise_is_noted(tmp_path: Path) -> None:
    """A copy that kept the name of its original would be a second profile of that name in plans and results."""
    (tmp_path / "hardware" / "lab").mkdir(parents=True)
    base = "defaults: [gpu_x1@_here_, _self_]\n"
    for name, text in {"copy": "", "right": "name: lab/right\n"}.items():
        (tmp_path / "hardware" / "lab" / f"{name}.yaml").write_text(f"# Ours.\n{base}{text}")
    (tmp_path / "hardware" / "lab" / "bare.yaml").write_text("gpus_per_node: 2\n")
    said = _run("list", "lab/", "--config-dir", str(tmp_path))
    assert re.findall(r"has name: (\S+)\. Write name: (\S+)\.", " ".join(said.split())) == [
        ("unnamed", "lab/bare"), ("gpu_x1", "lab/copy"),
    ]  # fmt: skip
    assert "gpu_x1 (in the file; write name: lab/copy)" in _run("show", "lab/copy", "--config-dir", str(tmp_path))

    words = ["experiment=digits", "cluster=local", f"paths.runs_dir={tmp_path}", "sweep_name=x", "snapshot=off"]

    def noted(*more: str) -> list[str]:
        plan = build_plan(freeze_grid([*words, *more], config_dirs=[tmp_path]))
        return [note for note in plan.notes if note.startswith("hardware=")]

    (copy, bare) = noted("hardware=lab/copy,lab/right,lab/bare,gpu_x1")
    assert copy.startswith("hardware=lab/copy: its file has name: gpu_x1, by which plans")
    assert bare.startswith("hardware=lab/bare: its file has no name")
    assert noted("hardware=lab/copy", "hardware.name=mine") == noted("hardware=lab/right") == noted() == []
    (listed,) = noted("cluster=slurm", "hardware=first:lab/right,lab/copy", "parallel.elastic=true")
    assert listed == copy


# --- the commands ---


def _run(*words: str) -> Any:
    done = CliRunner().invoke(app, ["hardware", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_list_filters_by_words_of_name_and_description() -> None:
    assert "olcf/frontier_x8" in _run("list", "mi250x")
    names = [profile["name"] for profile in json.loads(_run("list", "h100", "killarney", "--json"))["profiles"]]
    assert names == ["alliance/killarney_h100_x8"]
    assert "No profile has cray-1." in _run("list", "cray-1")


def test_show_tells_figures_reasons_sources_and_the_script() -> None:
    text = _run("show", "olcf/frontier_x8")
    for words in (
        "gpus_per_node   8", "NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3  (OLCF", "internet        no",
        "partition batch, min_nodes 1, max_nodes 91, max_time_min 120", "slurm_cluster   frontier",
        "https://docs.olcf.ornl.gov/systems/frontier_user_guide.html, version of 2026-07-22 (all figures)",
        "#SBATCH --network=disable_rdzv_get", "#SBATCH --gpus-per-node=8",
    ):  # fmt: skip
        assert words in text, text
    assert "--array" not in text
    assert "unverified      slurm_cluster" in _run("show", "alliance/fir_x4")
    told = json.loads(_run("show", "tacc/vista_x1", "--json"))
    assert (told["cluster"], told["site"]["site"]["arch"]) == ("tacc/vista", "aarch64")
    assert not any("gpu" in line or "gres" in line for line in told["script"]), "this site refuses such an option"
    plain = json.loads(_run("show", "cpu_x1", "--json"))
    assert (plain["site"], "#SBATCH --nodes=1" in plain["script"]) == (None, True)


# --- the page ---


def test_the_page_has_every_profile_and_its_sources() -> None:
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN") == "1":
        PAGE.write_text(_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == _page(), "HPC_TRAINER_UPDATE_GOLDEN=1 writes it anew: read what changed"


def _page() -> str:
    folders: dict[str, list[Profile]] = {}
    for profile in PROFILES:
        folders.setdefault(profile.name.rpartition("/")[0], []).append(profile)
    own, nodes = folders.pop(""), folders.pop("node")
    lines = [
        "# All hardware profiles",
        "",
        "This page lists all hardware profiles that ship with hpc_trainer. A test generates it from the files in",
        "`conf/hardware/` and `conf/cluster/`; `HPC_TRAINER_UPDATE_GOLDEN=1 make unit` writes it again.",
        "[hardware.md](../hardware.md) shows how to choose a profile, and [add_a_cluster.md](../add_a_cluster.md) how",
        "to add one.",
        "",
        "The column *cores* is the number for each rank. If a cell is empty, the site's default is used. *checked* is",
        "the day on which the sources were read. Many were read in a copy; then the version of the copy stands behind",
        "the address.",
        "",
        f"- {len(PROFILES) - len(own) - len(nodes)} profiles of {len({each.cluster for each in PROFILES} - {None})} "
        "cluster files",
        f"- {len(nodes)} plain nodes, for any Slurm",
        f"- {len(own)} general ones, without a source",
        "",
    ]
    for folder, profiles in sorted(folders.items()):
        lines += [f"## {folder}", "", *_table(profiles), ""]
        for name in dict.fromkeys(profile.cluster for profile in profiles):
            lines += [*_facts(str(name)), ""]
        lines += [*_sources(profiles), ""]
    lines += _unconfirmed()
    lines += ["## Plain nodes", "", *_table(nodes), "", *_sources(nodes), ""]
    lines += ["## General", "", *_table(own), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(profiles: list[Profile]) -> Iterator[str]:
    yield "| `hardware=` | what | GPUs | cores | memory | partition, QOS, constraint | minutes |"
    yield "|---|---|---|---|---|---|---|"
    for profile in profiles:
        kind, count = profile["gpu_type"], profile["gpus_per_node"]
        gpus = "" if not count else f"{profile['num_nodes']} × {count}{f' {kind}' if kind else ''}"
        cores = profile["cpus_per_gpu"] or profile["cpus_per_task"] or 1
        memory = [
            f"{profile[f'mem_gb_per_{unit}']:g} GB a {word}" for unit, word in _UNITS if profile[f"mem_gb_per_{unit}"]
        ]
        queue = ", ".join(f"`{profile[key]}`" for key in ("partition", "qos", "constraint") if profile[key])
        cells = (
            f"`{profile.name}`",
            profile.about,
            gpus,
            str(cores),
            "".join(memory),
            queue,
            profile["time_limit_min"],
        )
        yield f"| {' | '.join(map(str, cells))} |"


_UNITS = (("node", "node"), ("gpu", "GPU"), ("cpu", "core"))


def _facts(name: str) -> Iterator[str]:
    cluster = read_cluster(name)
    site = site_of(cluster)
    yield f"`cluster={name}`: {cluster.about}"
    yield ""
    known = {"architecture": site["arch"], "internet": site["internet"], "whole nodes": site["whole_nodes"]}
    words = {True: "yes", False: "no"}
    told = [f"{key}: {words.get(value, value)}" for key, value in known.items() if value is not None]
    yield f"- {'; '.join(told)}" if told else "- architecture, internet and sharing are not known"
    for limit in site["time_limits"]:
        which = [f"{kind} `{limit[key]}`" for key, kind in (("partition", "partition"), ("qos", "QOS")) if key in limit]
        sizes = f"{limit.get('min_nodes', 1)} to {limit['max_nodes']} nodes" if "max_nodes" in limit else "any size"
        yield f"- at most {limit['max_time_min']:,} minutes: {', '.join([*which, sizes])}"
    if site["preemption"]:
        yield f"- {site['preemption']}"
    yield from (f"- {note}" for note in site["notes"])
    if site["unverified"]:
        yield f"- no source confirms {', '.join(f'`{key}`' for key in site['unverified'])}"
    yield from (f"- {_linked(text)}, checked {site['checked']}" for text in split_sources(site["source"]))


def _sources(profiles: list[Profile]) -> Iterator[str]:
    """Yield each source once, with the profiles that have figures of it."""
    of: dict[str, list[Profile]] = {}
    for profile in profiles:
        for text in profile.sources:
            of.setdefault(text, []).append(profile)
    yield "Sources of the profiles:"
    yield ""
    for text, users in of.items():
        names = ", ".join(f"`{user.name.rpartition('/')[2]}`" for user in users)
        yield f"- {names}: {_linked(text)}, checked {users[0]['checked']}"


def _unconfirmed() -> Iterator[str]:
    """Yield the figures that no document confirms: of each profile, and of each cluster file."""
    yield "## Not confirmed"
    yield ""
    yield "Figures that no public document of the site confirms. `hardware check` compares them with the cluster."
    yield ""
    for profile in PROFILES:
        told = [text.removeprefix("unverified ") for text in profile.sources if text.startswith("unverified ")]
        yield from (f"- `hardware={profile.name}` {text}" for text in told)
    for name in sorted({profile.cluster for profile in PROFILES if profile.cluster is not None}):
        keys = site_of(read_cluster(name))["unverified"]
        if keys:
            yield f"- `cluster={name}`: {', '.join(f'`{key}`' for key in keys)}"
    yield ""


def _linked(text: str) -> str:
    return re.sub(r"https?://([^\s,]+)", lambda match: f"<{match[0]}>", text)
