"""A hardware profile of a site chooses its cluster; whoever says `cluster=` wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.compose.grid import sweep_values
from hpc_trainer.config.compose.overrides import default_overrides
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid

PERLMUTTER = "hardware=nersc/perlmutter_x4"
CLUSTERS: list[tuple[list[str], str | None]] = [
    ([], None),
    (["hardware=gpu_x8"], None),
    (["cluster=olcf/frontier"], "frontier"),
    ([PERLMUTTER], "perlmutter"),
    ([PERLMUTTER, "cluster=olcf/frontier"], "frontier"),
    (["cluster=local", PERLMUTTER], "local"),
    (["experiment=of_a_site"], "perlmutter"),
    (["experiment=of_a_site", "hardware=cpu_x1"], None),
    (["experiment=of_a_site", "cluster=slurm"], "slurm"),
    (["experiment=of_both"], "frontier"),
]


def _clusters(folder: Path) -> list[str]:
    (folder / "experiment").mkdir()
    for name, lines in {"of_a_site": (), "of_both": ("  - override /cluster: olcf/frontier",)}.items():
        text = ["# @package _global_", "defaults:", "  - override /hardware: nersc/perlmutter_x4", *lines]
        (folder / "experiment" / f"{name}.yaml").write_text("\n".join(text))
    with GridComposer([folder]) as composer:
        fast = [composer.compose_point(words).config.cluster.name for words, _ in CLUSTERS]
        assert fast == [composer.compose(words).cluster.name for words, _ in CLUSTERS]
        assert composer.counts == {"fast": len(CLUSTERS)}
    return fast


@pytest.mark.usefixtures("fake_slurm")
def test_slurm_is_the_cluster_where_sbatch_is_and_no_site_is_chosen(tmp_path: Path) -> None:
    assert list(default_overrides([])) == []
    assert _clusters(tmp_path) == [cluster or "slurm" for _, cluster in CLUSTERS]


@pytest.mark.long
@pytest.mark.usefixtures("no_slurm")
def test_this_machine_is_the_cluster_where_sbatch_is_not(tmp_path: Path) -> None:
    assert list(default_overrides(["optim.lr=1"])) == []
    assert _clusters(tmp_path) == [cluster or "local" for _, cluster in CLUSTERS]


def test_a_profile_in_a_folder_is_an_axis_of_hardware_alone() -> None:
    """Its section is hardware itself, not hardware.nersc; a base file of the same folder changes nothing else."""
    with GridComposer() as composer:
        made = [
            composer.compose_point([f"hardware={name}"]).config.hardware
            for name in ("node/h100_x1", "node/h100_x8", "gpu_x8")
        ]
    assert [(each.name, each.gpus_per_node) for each in made] == [
        ("node/h100_x1", 1), ("node/h100_x8", 8), ("gpu_x8", 8),
    ]  # fmt: skip
    assert made[0].source == made[1].source != made[2].source
    assert made[0].mem_gb_per_gpu == made[1].mem_gb_per_gpu


def test_a_star_stays_in_its_folder() -> None:
    def values(line: str) -> list[str]:
        with Composer() as composer:
            return sweep_values(composer.parse([line])[0], composer.choices)

    assert values("hardware=glob(gpu_*)") == ["gpu_x1", "gpu_x16", "gpu_x2", "gpu_x8"]
    assert not any("/" in name for name in values("hardware=glob(*)"))
    assert values("hardware=glob(node/h100*)") == [f"node/h100_x{count}" for count in (1, 2, 4, 8)]


PROGRAM = ("train.command='true'", "snapshot=off")


def test_two_profiles_of_one_site_are_one_grid_and_of_two_sites_are_not() -> None:
    grid = freeze_grid([*PROGRAM, "hardware=nersc/perlmutter_x4,nersc/perlmutter_x4", "seed=0,1"])
    assert {spec.config["cluster"]["name"] for spec in grid.specs} == {"perlmutter"}
    assert grid.executor.value == "slurm"
    with pytest.raises(ConfigError, match="cluster is one for a whole grid"):
        freeze_grid([*PROGRAM, "hardware=nersc/perlmutter_x4,olcf/frontier_x8"])


def test_a_frozen_run_keeps_no_facts_of_the_site() -> None:
    (spec,) = freeze_grid([*PROGRAM, "hardware=olcf/frontier_x8"]).specs
    assert "site" not in spec.config["cluster"]
    assert spec.config["cluster"]["sbatch"] == {"network": "disable_rdzv_get"}
    assert spec.typed().cluster.site.time_limits == []


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["hardware.time_limit_min=120"], None),
        (["hardware.time_limit_min=121"], "at most 120 minutes for 1 to 91 nodes"),
        (["hardware.num_nodes=92", "hardware.time_limit_min=360"], None),
        (["hardware.num_nodes=92", "hardware.time_limit_min=361"], "Use hardware.time_limit_min=360"),
        (["hardware.num_nodes=9472", "hardware.time_limit_min=720"], None),
        (["hardware.num_nodes=9473"], "gives partition batch at most 9472 nodes, but hardware.num_nodes=9473"),
        (["hardware.partition=extended", "hardware.time_limit_min=1440"], None),
        (["hardware.partition=extended", "hardware.num_nodes=65"], "gives partition extended at most 64 nodes"),
        (["hardware.qos=debug", "hardware.partition=extended", "hardware.time_limit_min=1440"], "gives QOS debug"),
        (["hardware.partition=unknown", "hardware.time_limit_min=9999"], None),
    ],
)
def test_a_plan_warns_of_what_the_site_does_not_give(words: list[str], note: str | None) -> None:
    notes = freeze_grid([*PROGRAM, "hardware=olcf/frontier_x8", *words]).notes
    assert len(notes) == (note is not None), notes
    assert note is None or note in notes[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["hardware.time_limit_min=1441"], "gives partition boost_usr_prod at most 1440 minutes"),
        (["hardware.time_limit_min=5760", "hardware.qos=boost_qos_lprod"], None),
        (["hardware.time_limit_min=5761", "hardware.qos=boost_qos_lprod"], "QOS boost_qos_lprod at most 5760 minutes"),
        (["hardware.num_nodes=128", "hardware.qos=boost_qos_bprod"], None),
    ],
)
def test_limits_of_a_named_qos_replace_those_of_its_partition(words: list[str], note: str | None) -> None:
    notes = freeze_grid([*PROGRAM, "hardware=cineca/leonardo_x4", *words]).notes
    assert len(notes) == (note is not None), notes
    assert note is None or note in notes[0]
