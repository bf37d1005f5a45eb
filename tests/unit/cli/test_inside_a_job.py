"""`plan` and `submit` inside a job, a step or torchrun do what they do on a login node."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hpc_trainer.cli.main import main
from tests.unit.slurm.fake_slurm import FakeSlurm

GRID = ["cluster=slurm", "hardware=gpu_x8", "seed=0,1", "sweep_name=inside"]
SECRET = "not-to-be-written-4711"

# What a shell in a real allocation has (Slurm 22.05 to 26.05, srun --pty and sbatch), and settings that people export.
IN_A_JOB = {
    "SLURM_JOB_ID": "77", "SLURM_JOBID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "9", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "16", "SLURM_NPROCS": "16", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "9", "SLURM_CPUS_ON_NODE": "72", "SLURM_MEM_PER_NODE": "100",
    "SLURM_MEM_PER_CPU": "100", "SLURM_MEM_PER_GPU": "100", "SLURM_GPUS": "8", "SLURM_GPUS_PER_NODE": "8",
    "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_GPUS": "0,1", "SLURM_JOB_PARTITION": "other", "SLURM_JOB_QOS": "other",
    "SLURM_JOB_ACCOUNT": "other", "SLURM_JOB_NAME": "bash", "SLURM_JOB_USER": "me", "SLURM_JOB_UID": "0",
    "SLURM_SUBMIT_DIR": "/elsewhere", "SLURM_SUBMIT_HOST": "n1", "SLURM_CLUSTER_NAME": "other",
    "SLURM_TOPOLOGY_ADDR": "n1",
    "SLURM_EXPORT_ENV": "NONE", "SLURM_GET_USER_ENV": "1", "SLURM_UMASK": "0002", "SLURM_PRIO_PROCESS": "0",
    "SLURM_RESTART_COUNT": "4", "SLURM_HINT": "nomultithread", "SLURM_OPEN_MODE": "t", "SLURM_EXIT_ERROR": "9",
    "SLURM_TIMELIMIT": "1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_WCKEY": "x", "SLURM_STEP_GPUS": "0",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_SRUN_COMM_PORT": "1", "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_OVERLAP": "1", "SLURM_NO_KILL": "1", "SLURM_KILL_BAD_EXIT": "0", "SLURM_TRES_PER_TASK": "cpu:9",
    "SLURMD_NODENAME": "n1", "SLURMD_DEBUG": "3", "SRUN_CPUS_PER_TASK": "9", "SRUN_DEBUG": "3",
    "SBATCH_EXPORT": "NONE", "SBATCH_ACCOUNT": "other", "SBATCH_PARTITION": "other", "SBATCH_QOS": "other",
    "SBATCH_TIMELIMIT": "1", "SBATCH_ARRAY_INX": "0-99", "SBATCH_GPUS": "9", "SBATCH_GRES": "gpu:9",
    "SBATCH_MEM_PER_NODE": "1", "SBATCH_MEM_PER_GPU": "1", "SBATCH_MEM_PER_CPU": "1", "SBATCH_CONSTRAINT": "x",
    "SBATCH_EXCLUSIVE": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_OPEN_MODE": "t", "SBATCH_SIGNAL": "KILL@1",
    "SBATCH_JOB_NAME": "x", "SBATCH_OUTPUT": "/dev/null", "SBATCH_TEST_ONLY": "1", "SBATCH_WAIT": "1",
    "SBATCH_WCKEY": "x", "SBATCH_REQUEUE": "0", "SBATCH_UMASK": "0002", "SBATCH_DEBUG": "3",
    "SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_FOLDER": "/elsewhere", "SUBMITIT_PREEMPT_SIGNAL": "USR1",
    "CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1", "GPU_DEVICE_ORDINAL": "1", "ZE_AFFINITY_MASK": "1",
    "PMI_RANK": "3", "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.77.0",
}  # fmt: skip
IN_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "RANK": "1",
    "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "ROLE_RANK": "1",
    "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
}  # fmt: skip


class Heard(NamedTuple):
    """What sbatch was given, the fresh uuids replaced by one word."""

    argv: list[str]
    script: str
    environment: dict[str, str]


def _give(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
    code = 0
    try:
        main()
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 0


def _submit(fake: FakeSlurm, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Heard:
    heard = fake.folder / "heard"
    shutil.rmtree(runs_dir, ignore_errors=True)
    (fake.folder / "queue").write_text("")
    (fake.bin / "sbatch").write_text(
        f'#!/bin/sh\n[ "$1" = --test-only ] && exit 0\n'
        f'env -0 > "{heard}.env"\nprintf "%s\\n" "$@" > "{heard}.argv"\ncp "$1" "{heard}.sh"\n'
        'echo "Submitted batch job 101"\n'
    )
    _give(monkeypatch, "submit", *GRID)

    def text(kind: str) -> str:
        found = heard.with_name(f"heard.{kind}").read_text()
        return re.sub("inside-[0-9a-f]{8}", "inside-UUID", re.sub("[0-9a-f]{32}", "UUID", found))

    pairs = (pair.partition("=") for pair in text("env").split("\0") if pair)
    environment = {key: value for key, _, value in pairs if key not in ("_", "SHLVL", "PWD", "PYTEST_CURRENT_TEST")}
    return Heard(text("argv").splitlines(), text("sh"), environment)


def _plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    _give(monkeypatch, "plan", *GRID, "--json")
    (array,) = json.loads(capsys.readouterr().out)["arrays"]
    return str(array["script"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "leaked", [IN_A_JOB, IN_TORCHRUN, {**IN_A_JOB, **IN_TORCHRUN}], ids=["job", "torchrun", "both"]
)
def test_sbatch_hears_the_same_as_on_a_login_node(
    leaked: dict[str, str], tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    runs_dir = tmp_path / "runs"
    for name in (*IN_A_JOB, *IN_TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(runs_dir))
    monkeypatch.setenv("SLURM_CONF", "/site/slurm.conf")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    script = _plan(monkeypatch, capsys)
    heard = _submit(fake_slurm, runs_dir, monkeypatch)
    for name, value in leaked.items():
        monkeypatch.setenv(name, value)
    inside = _submit(fake_slurm, runs_dir, monkeypatch)
    assert inside.script == heard.script
    assert inside.argv == heard.argv == [str(runs_dir / "inside/slurm/UUID.sh")]
    assert inside.environment == heard.environment
    assert inside.environment["SLURM_CONF"] == "/site/slurm.conf", "this names the cluster"
    assert heard.script.rstrip("\n") == script.rstrip("\n")
    shutil.rmtree(runs_dir)
    assert _plan(monkeypatch, capsys) == script
    assert {name: os.environ[name] for name in leaked} == leaked, "our own environment is as it was"


def test_secrets_of_the_environment_reach_the_job_and_no_file(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    heard = _submit(fake_slurm, tmp_path / "runs", monkeypatch)
    assert heard.environment["WANDB_API_KEY"] == SECRET, "sbatch exports it: --export=ALL is its default"
    assert "--export" not in heard.script
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(files) >= 4
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in heard.script


def test_devices_that_a_person_chose_on_a_login_node_stay(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert _submit(fake_slurm, tmp_path / "runs", monkeypatch).environment["CUDA_VISIBLE_DEVICES"] == "0"
