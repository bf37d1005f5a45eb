"""Which rank this is: Slurm, torchrun, the local executor, or nobody's; and what is refused."""

from __future__ import annotations

import os
import re
import socket

import pytest

from hpc_trainer.errors import ExitCode, RankEnvError
from hpc_trainer.runtime.rank_env import read_rank_env, slurm_job_id

SLURM = {
    "SLURM_JOB_ID": "1083", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4", "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURMD_NODENAME": "gpu007",
}  # fmt: skip
ARRAY = {**SLURM, "SLURM_ARRAY_JOB_ID": "1080", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
LOCAL = {
    "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1", "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_NODEID": "0", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1", "SUBMITIT_LOCAL_JOB_ID": "4711",
}  # fmt: skip


def test_slurm() -> None:
    env = read_rank_env(SLURM)
    assert (env.launcher, env.job_id, env.restart_count, env.incarnation) == ("slurm", "1083", 0, "1083.0.0")
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (5, 1, 8, 4)
    assert (env.node_rank, env.num_nodes, env.node) == (1, 2, "gpu007")


def test_an_array_element_goes_by_its_array_name() -> None:
    env = read_rank_env(ARRAY)
    assert (env.job_id, env.restart_count, env.incarnation) == ("1080_3", 2, "1080_3.2.0")


def test_ranks_of_a_node_follow_from_the_rest() -> None:
    assert read_rank_env({k: v for k, v in SLURM.items() if k != "SLURM_NTASKS_PER_NODE"}).local_world_size == 4


def test_torchrun() -> None:
    env = read_rank_env(TORCHRUN)
    assert (env.launcher, env.job_id, env.restart_count) == ("torchrun", f"torchrun-none-{os.getppid()}", 0)
    assert env.incarnation.endswith(".0.1")
    assert read_rank_env({**TORCHRUN, **ARRAY}).incarnation == "1080_3.2.1"
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size, env.node_rank) == (3, 1, 4, 2, 1)
    assert env.node == socket.gethostname()


def test_torchrun_inside_a_slurm_job_has_its_own_ranks_and_the_jobs_id() -> None:
    env = read_rank_env({**ARRAY, **TORCHRUN})
    assert (env.launcher, env.rank, env.job_id, env.node) == ("torchrun", 3, "1080_3", "gpu007")


def test_the_local_executor_even_inside_a_slurm_job() -> None:
    for environ in (LOCAL, {**ARRAY, **LOCAL}):
        env = read_rank_env(environ)
        assert (env.launcher, env.job_id, env.rank, env.world_size) == ("local", "local-4711", 1, 2)
        assert (env.local_world_size, env.num_nodes) == (2, 1)


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_PROCID": "0"}, {"RANK": "3", "WORLD_SIZE": "4"}]
)
def test_nobodys_process_is_one_rank(environ: dict[str, str]) -> None:
    env = read_rank_env(environ)
    assert (env.launcher, env.rank, env.world_size, env.job_id) == ("none", 0, 1, f"here-{os.getpid()}")


def test_this_process_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert read_rank_env() == read_rank_env(SLURM)


@pytest.mark.parametrize("value", [None, "", "x", "-1", "1.0", " 1", "2(x3)"])
@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (SLURM, "SLURM_PROCID"), (SLURM, "SLURM_LOCALID"), (SLURM, "SLURM_NTASKS"),
        (TORCHRUN, "RANK"), (TORCHRUN, "LOCAL_RANK"), (TORCHRUN, "WORLD_SIZE"),
        (LOCAL, "SUBMITIT_LOCAL_LOCALID"), (LOCAL, "SUBMITIT_LOCAL_NTASKS"),
    ],
)  # fmt: skip
def test_a_malformed_variable_is_named(environ: dict[str, str], name: str, value: str | None) -> None:
    changed = {**environ, name: value} if value is not None else {k: v for k, v in environ.items() if k != name}
    if value is None and name == "SLURM_PROCID":
        assert read_rank_env(changed).launcher == "none"
        return
    with pytest.raises(RankEnvError, match=re.escape(f"{name}={value!r} must be a whole number")) as caught:
        read_rank_env(changed)
    assert caught.value.exit_code is ExitCode.CONFIG


@pytest.mark.parametrize("name", ["SLURM_NTASKS_PER_NODE", "SLURM_NODEID", "SLURM_NNODES", "SLURM_RESTART_COUNT"])
def test_what_may_be_missing_may_not_be_malformed(name: str) -> None:
    with pytest.raises(RankEnvError, match=name):
        read_rank_env({**SLURM, name: "two"})


@pytest.mark.parametrize(
    ("environ", "rank", "size"), [(SLURM, "SLURM_PROCID", "SLURM_NTASKS"), (TORCHRUN, "RANK", "WORLD_SIZE")]
)
def test_a_rank_outside_its_world_is_refused(environ: dict[str, str], rank: str, size: str) -> None:
    with pytest.raises(RankEnvError, match=rf"{rank}=8 must be less than {size}=8"):
        read_rank_env({**environ, rank: "8", size: "8"})


def test_no_job_has_no_id() -> None:
    assert slurm_job_id({}) == ""
    assert slurm_job_id({"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "4"}) == "5"
