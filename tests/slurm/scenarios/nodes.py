"""Nodes: set down by an administrator, without power, and cut off with the ranks on them still at work."""

from __future__ import annotations

import os

from tests.slurm.scenarios.checks import References, check_completed
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import BOTH, ONE, scenario


@scenario()
def node_set_down(scene: Scene, references: References) -> None:
    """`scontrol update nodename=... state=down` under the run: Slurm requeues it, the last checkpoint counts."""
    scene.submit()
    scene.wait_for_step(70)
    node = scene.nodes_of_job()[-1]
    scene.note()
    scene.slurm.set_node(node, "down")
    scene.wait_for_job("PENDING")
    scene.come_back()
    check_completed(scene, references, [(None, "node_fail", "requeued", "peer_lost"), "done"])


@scenario()
def node_without_power(scene: Scene, references: References) -> None:
    """slurmd and everything on the run's last node killed at once, then reported down."""
    scene.submit()
    scene.wait_for_step(70)
    node = scene.nodes_of_job()[-1]
    scene.note()
    scene.slurm.cut_power(node)
    scene.slurm.give_up(node)
    scene.wait_for_job("PENDING")
    scene.come_back()
    check_completed(scene, references, [(None, "node_fail", "requeued", "peer_lost"), "done"])


@scenario(ONE)
def node_lost_and_found_missing_by_slurm(scene: Scene, references: References) -> None:
    """The same without a word to Slurm: it finds out itself, by SlurmdTimeout (60 s here)."""
    scene.submit(pace_s=0.1)
    scene.wait_for_step(70)
    node = scene.nodes_of_job()[-1]
    scene.note()
    scene.slurm.cut_power(node)
    scene.wait_for_job("PENDING", timeout_s=240)
    scene.come_back()
    check_completed(scene, references, [None, "done"])


@scenario(*BOTH)
def slurmd_killed_and_back(scene: Scene, references: References) -> None:
    """slurmd alone dies and is started again: the run does not notice."""
    scene.submit()
    scene.wait_for_step(20)
    node = scene.nodes_of_job()[0]
    os.kill(scene.slurm.daemons()[f"slurmd-{node}"], 9)
    scene.slurm.wait_for(lambda: f"slurmd-{node}" not in scene.slurm.daemons(), 10, "the end of slurmd")
    scene.wait_for_step(60)
    scene.slurm.start_missing()
    check_completed(scene, references, ["done"])


@scenario()
def node_cut_off_with_its_ranks_alive(scene: Scene, references: References) -> None:
    """slurmd is gone, Slurm gives the node up, the old ranks train on: they must leave before the new ones write."""
    scene.submit(pace_s=0.2)
    scene.wait_for_step(30)
    node = scene.nodes_of_job()[0]
    scene.note()
    os.kill(scene.slurm.daemons()[f"slurmd-{node}"], 9)
    scene.slurm.give_up(node)
    scene.wait_for_job("PENDING")
    scene.slurm.start_now(scene.run.job_id)
    scene.wait_for(lambda: len(scene.run.records("resume")) == 2, "the resume of attempt 1")
    check_completed(scene, references, [(None, "node_fail"), "done"])
