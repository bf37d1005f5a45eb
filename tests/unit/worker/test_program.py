"""A person's program: its words and environment, and when it is not started again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_trainer.config.schema.train import CommandEnv, CommandPer, TrainConfig
from hpc_trainer.errors import ConfigError, NoProgressError, RankEnvError
from hpc_trainer.record.journal import Attempt, read_result
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.metrics import VARIABLE, read_metrics
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.spans import Spans
from hpc_trainer.runtime.start import FROZEN_CODE
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker import program
from hpc_trainer.worker.program import ASKED, written_beside_code
from hpc_trainer.worker.program_start import Place, Program, environment_of, folder_of, meeting_place, words_of

PLACE = Place("node1", 4321)


def _env(rank: int = 3) -> RankEnv:
    return RankEnv(
        rank=rank, local_rank=rank % 2, world_size=4, local_world_size=2, node_rank=rank // 2, num_nodes=2,
        launcher="slurm", job_id="7_0", restart_count=0, node="n2",
    )  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(str(tmp_path / "runs" / "sweep" / "r1"))


def _config(command: str, folder: Path) -> TrainConfig:
    config = TrainConfig()
    config.params = {"lr": 0.001, "name": "a b"}
    config.train.command, config.train.command_dir = command, str(folder)
    return config


def test_scripts_are_the_frozen_ones_and_other_files_are_not(tmp_path: Path, paths: RunPaths) -> None:
    copy = tmp_path / "code" / "app"
    (copy / "my").mkdir(parents=True)
    (copy / "my" / "fit.py").touch()
    (tmp_path / "app").mkdir()
    command = "python my/fit.py --data data.csv --out {run.dir}/x --name {params.name} other.py"
    words = words_of(
        _config(command, tmp_path / "app"), paths,
        {"HPC_TRAINER_FROZEN_CODE": json.dumps({str(tmp_path / "app"): str(copy)})},
    )  # fmt: skip
    assert words == [
        "python", f"{copy}/my/fit.py", "--data", "data.csv", "--out", f"{paths.output}/x", "--name", "a b", "other.py",
    ]  # fmt: skip


def test_scripts_in_the_text_of_a_shell_are_the_frozen_ones(tmp_path: Path, paths: RunPaths) -> None:
    copy = tmp_path / "code {x}" / "app"
    copy.mkdir(parents=True)
    (copy / "fit.py").touch()
    command = (
        "sh -c 'python3 -m lab.x && python fit.py --data data.csv --out {run.dir}/x; echo fit.py; python other.py'"
    )
    (_, _, text) = words_of(
        _config(command, tmp_path / "app"), paths,
        {"HPC_TRAINER_FROZEN_CODE": json.dumps({str(tmp_path / "app"): str(copy)})},
    )  # fmt: skip
    safe = " -P" if sys.version_info >= (3, 11) else ""
    assert text == (
        f"python3{safe} -m lab.x && python '{copy}/fit.py' --data data.csv --out {paths.output}/x; echo fit.py; "
        "python other.py"
    )


def test_the_first_rank_decides_whether_there_is_a_checkpoint(tmp_path: Path, paths: RunPaths) -> None:
    """What rank 0 has written when a rank starts that waited longer is no checkpoint of an earlier attempt."""
    config = _config("x {run.resume:--resume} {run.resume[log/a]:--log {run.dir}}", tmp_path)
    first = dataclasses.replace(_env(rank=0), num_nodes=1)
    paths.logs.mkdir(parents=True)
    place = meeting_place(config, paths, first, 0, lambda: False)
    assert place is not None
    assert words_of(config, paths, {}, place.holding) == ["x"]
    paths.own_checkpoints.mkdir(parents=True)
    (paths.own_checkpoints / "step-1.pt").touch()
    other = meeting_place(config, paths, _env(rank=1), 0, lambda: False)
    assert other is not None
    assert other.holding == frozenset()

    (paths.output / "log").mkdir()
    (paths.output / "log" / "a").touch()  # empty
    place = meeting_place(config, paths, first, 0, lambda: False)
    assert place is not None
    assert words_of(config, paths, {}, place.holding) == ["x", "--resume"]
    (paths.output / "log" / "a").write_text("1")
    place = meeting_place(config, paths, first, 0, lambda: False)
    assert place is not None
    assert place == meeting_place(config, paths, _env(1), 0, lambda: False)
    assert words_of(config, paths, {}, place.holding) == ["x", "--resume", "--log", str(paths.output)]


def test_a_program_in_the_runs_own_folder_finds_its_code(
    tmp_path: Path, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPC_TRAINER_FROZEN_CODE", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    (tmp_path / "fit.py").touch()
    config = _config("python fit.py data.csv", tmp_path)
    config.train.command_dir, config.train.command_from = "{run.dir}", str(tmp_path)
    assert folder_of(config, paths) == str(paths.output)
    assert words_of(config, paths, {}) == ["python", str(tmp_path / "fit.py"), "data.csv"]
    assert environment_of(config, paths, _env(), 0, PLACE)["PYTHONPATH"] == f"{tmp_path}:/mine"


def test_modules_are_not_looked_for_in_the_current_folder(tmp_path: Path, paths: RunPaths) -> None:
    config = _config("torchrun --x python3.11 -m lab.fit", tmp_path)
    assert words_of(config, paths, {}) == ["torchrun", "--x", "python3.11", "-m", "lab.fit"]
    safe = words_of(config, paths, {"HPC_TRAINER_FROZEN_CODE": json.dumps({"/x": "/y"})})
    extra = ["-P"] if sys.version_info >= (3, 11) else []
    assert safe == ["torchrun", "--x", "python3.11", *extra, "-m", "lab.fit"]


def test_a_rank_finds_its_place(tmp_path: Path, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = environment_of(_config("x", tmp_path), paths, _env(), 2, PLACE)
    named = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [found[name] for name in named] == ["3", "1", "4", "2", "1", "node1", "4321"]
    assert found["HPC_TRAINER_ATTEMPT"] == "2"
    assert found[VARIABLE] == str(paths.folder / "told" / "attempt-002.jsonl")
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    assert "PET_NNODES" not in found


def test_a_program_on_one_rank_finds_none_of_torchruns_names(
    tmp_path: Path, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nanoGPT, as many others, asks whether there is a RANK, and begins a distributed training then."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
    names = {*own, "MASTER_ADDR", "MASTER_PORT"}
    for name in (*names, "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")  # we may be started by torchrun ourselves
    config, env = _config("x", tmp_path), dataclasses.replace(_env(rank=0), world_size=1, num_nodes=1)
    assert not {*names, "TORCHELASTIC_RUN_ID"} & environment_of(config, paths, env, 0, PLACE).keys()

    config.cluster.env = {"MASTER_PORT": "7"}
    monkeypatch.setenv("MASTER_PORT", "7")
    assert names & environment_of(config, paths, env, 0, PLACE).keys() == {"MASTER_PORT"}

    config.train.command_env = CommandEnv.torchrun
    found = environment_of(config, paths, env, 0, PLACE)
    assert names <= found.keys()
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("0", "1", "4321")


def test_tensorflow_finds_the_workers_of_all_ranks(tmp_path: Path, paths: RunPaths) -> None:
    """Each rank chooses its own port, and all ranks are told the same list, in the order of the ranks."""
    paths.logs.mkdir(parents=True)
    config = _config("x", tmp_path)
    config.train.command_env, config.cluster.master_addr = CommandEnv.tensorflow, "10.0.0.1"
    # What an earlier start of this attempt has left is not read.
    paths.program_worker(2, 3).write_text(json.dumps({"incarnation": "6_0.0.0", "worker": "gone:1"}))
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda rank: meeting_place(config, paths, _env(rank), 2, lambda: False), (3, 1, 0, 2)))
    assert len(set(places)) == 1
    place = places[0]
    assert place is not None
    assert [worker.rpartition(":")[0] for worker in place.workers] == ["10.0.0.1", *[socket.gethostname()] * 3]
    assert len({worker.rpartition(":")[2] for worker in place.workers}) == 4
    assert place.workers[0] == f"{place.address}:{place.port}"
    found = [json.loads(environment_of(config, paths, _env(rank), 2, place)["TF_CONFIG"]) for rank in range(4)]
    assert found == [
        {"cluster": {"worker": list(place.workers)}, "task": {"type": "worker", "index": rank}} for rank in range(4)
    ]
    assert "TF_CONFIG" not in environment_of(_config("x", tmp_path), paths, _env(), 2, place)


def test_tensorflow_on_one_rank_is_one_worker(tmp_path: Path, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    config, env = _config("x", tmp_path), dataclasses.replace(_env(rank=0), world_size=1, num_nodes=1)
    config.train.command_env = CommandEnv.tensorflow
    place = meeting_place(config, paths, env, 0, lambda: False)
    assert place is not None
    found = environment_of(config, paths, env, 0, place)
    assert json.loads(found["TF_CONFIG"])["cluster"] == {"worker": [f"127.0.0.1:{place.port}"]}
    assert "RANK" not in found, "torchrun's names are another choice"

    config.cluster.master_addr = "fe80::1"
    place = meeting_place(config, paths, env, 0, lambda: False)
    assert place is not None
    assert place.workers == (f"[fe80::1]:{place.port}",)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, paths: RunPaths) -> None:
    paths.logs.mkdir(parents=True)
    config = _config("x", tmp_path)
    config.train.command_env, config.parallel.timeout_s = CommandEnv.tensorflow, 1
    paths.program_worker(0, 1).write_text(json.dumps({"incarnation": _env(0).incarnation, "worker": "n1:1"}))
    with pytest.raises(RankEnvError, match=r"rank 0 waited 1 s for ranks 2, 3 in vain \(parallel.timeout_s\)"):
        meeting_place(config, paths, _env(0), 0, lambda: False)
    assert meeting_place(config, paths, _env(0), 0, lambda: True) is None


def test_the_port_of_rank_0_is_given_to_nobody_else_before_it_listens(tmp_path: Path, paths: RunPaths) -> None:
    """Of a kernel's free ports two programs that start at once could have got the same one."""
    env = dataclasses.replace(_env(rank=0), world_size=1, num_nodes=1)
    place = meeting_place(_config("x", tmp_path), paths, env, 0, lambda: False)
    assert place is not None
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", place.port))
    with socket.create_server(("", place.port)) as server:  # as stores and servers do: SO_REUSEADDR
        assert server.getsockname()[1] == place.port


@pytest.mark.parametrize(
    ("word", "says"),
    [("pythn", "No such file or directory. It is looked for in PATH=.* cluster.env"), ("./fit", "chmod [+]x FILE")],
)
def test_a_program_that_cannot_be_started_says_what_to_do(tmp_path: Path, word: str, says: str) -> None:
    (tmp_path / "fit").touch()
    with pytest.raises(ConfigError, match=says):
        Program([word], dict(os.environ), str(tmp_path))


def test_a_program_of_a_node_is_told_what_torchrun_asks_for(
    tmp_path: Path, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = _config("torchrun x.py", tmp_path)
    config.train.command_per = CommandPer.node
    config.hardware.tasks_per_node = 8
    found = environment_of(config, paths, _env(1), 0, PLACE)
    pet = {key: value for key, value in found.items() if key.startswith("PET_")}
    assert pet == {
        "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "node1",
        "PET_MASTER_PORT": "4321",
    }  # fmt: skip
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & found.keys()


def test_steps_after_a_stop_that_the_program_does_not_hear_are_known(tmp_path: Path, paths: RunPaths) -> None:
    """TensorFlow catches SIGTERM, and trains and saves until it is killed: the next attempt goes on from there."""
    for folder in (paths.logs, paths.logged):
        folder.mkdir(parents=True)
    env = dataclasses.replace(_env(rank=0), world_size=1, num_nodes=1)
    rank = program._Rank(_config("x", tmp_path), paths, env, StopFlag(), 0, Spans())
    told = paths.logged_metrics(0)
    script = f"""trap 'echo "{{\\"step\\": 2, \\"loss\\": 0.5}}" >> {told}' TERM; echo '{{"step": 1}}' >> {told}
    while true; do sleep 0.05; done"""
    rank._program = Program(["sh", "-c", script], dict(os.environ), str(tmp_path))
    while not told.exists():
        time.sleep(0.05)
    rank._leave()
    assert not rank._program.is_alive()
    assert rank._step == 2
    assert [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()] == [2]


def test_metrics_that_a_killed_worker_did_not_read_are_taken_in_by_the_next_attempt(
    tmp_path: Path, paths: RunPaths
) -> None:
    """The program had saved step 3 and told it; the next attempt goes on with step 4. Step 3 was lost for good."""
    for folder in (paths.logs, paths.logged):
        folder.mkdir(parents=True)
    env = dataclasses.replace(_env(rank=0), world_size=1, num_nodes=1)
    first, second = (
        program._Rank(_config("x", tmp_path), paths, env, StopFlag(), number, Spans()) for number in (0, 1)
    )
    tell = [f'{{"step": {step}, "loss": {step}}}\n' for step in range(7)]
    paths.logged_metrics(0).write_text("".join([*tell[1:3]]))
    assert first._story is not None
    first._story.look()
    with paths.logged_metrics(0).open("a") as told:
        told.write("".join([tell[3], tell[6], tell[5]]))  # nobody looks any more; it went back from 6 to 5
    assert second._story is not None
    second._story.catch_up()
    assert [record["step"] for record in read_metrics(paths.metrics)] == [1, 2, 3, 5]
    paths.logged_metrics(1).write_text(tell[4])
    second._story.look()
    assert [record["step"] for record in read_metrics(paths.metrics)] == [1, 2, 3, 4]


def test_a_program_that_logs_nothing_after_a_stop_at_its_end_keeps_the_metrics_that_it_had(
    tmp_path: Path, paths: RunPaths
) -> None:
    """It was stopped after its last step: the next attempt finds nothing to do, and a search needs its metric."""
    for folder in (paths.logs, paths.logged):
        folder.mkdir(parents=True)
    env = dataclasses.replace(_env(rank=0), world_size=1, num_nodes=1)
    first, second, third = (
        program._Rank(_config("x", tmp_path), paths, env, StopFlag(), number, Spans()) for number in range(3)
    )
    paths.logged_metrics(0).write_text('{"step": 1, "loss": 1, "acc": 0.5}\n{"step": 2, "loss": 2}\n')
    for rank in (first, second):
        assert rank._story is not None
        rank._story.catch_up()
        rank._story.look()
    assert second._story is not None
    second._story.conclude()
    result = read_result(paths.result)
    assert (result["step"], result["metrics"]) == (2, {"loss": 2, "acc": 0.5})
    paths.result.unlink()
    paths.logged_metrics(2).write_text('{"step": 2, "loss": 3}\n{"step": 3, "f1": 4}\n')
    assert third._story is not None
    third._story.catch_up()
    third._story.look()
    third._story.conclude()
    result = read_result(paths.result)
    assert (result["step"], result["metrics"]) == (3, {"loss": 3, "acc": 0.5, "f1": 4})


def _attempts(*ends: tuple[int | None, str | None]) -> list[Attempt]:
    made = [
        Attempt(
            attempt=number, job_id="7_0", restart_count=number, node="n", pid=1, start_time=float(number),
            end_time=number + 0.5, step=step, signal=signal,
        )
        for number, (step, signal) in enumerate(ends)
    ]  # fmt: skip
    now = Attempt(attempt=len(ends), job_id="7_0", restart_count=len(ends), node="n", pid=1, start_time=99.0)
    return [*made, now]


def test_an_attempt_that_was_killed_before_its_program_started_hides_nothing_from_the_next_one(
    tmp_path: Path, paths: RunPaths
) -> None:
    """Attempt 1 was made and killed at once: attempt 2 looked only at that one's lines, and there were none."""
    for folder in (paths.logs, paths.logged):
        folder.mkdir(parents=True)
    env = dataclasses.replace(_env(rank=0), world_size=1, num_nodes=1)
    paths.logged_metrics(0).write_text('{"step": 10, "loss": 1}\n{"step": 20, "loss": 2}\n')
    third = program._Rank(_config("x", tmp_path), paths, env, StopFlag(), 3, Spans())
    assert third._story is not None
    third._story.catch_up()
    assert [record["step"] for record in read_metrics(paths.metrics)] == [10, 20]


@pytest.mark.parametrize(
    ("ends", "is_stopped"),
    [
        ([], False),
        ([(5, "SIGTERM"), (5, "SIGTERM")], False),
        ([(5, "SIGTERM")] * 3, True),
        ([(5, "SIGTERM"), (5, "SIGTERM"), (6, "SIGTERM")], False),
        ([(None, ASKED)] * 3, True),
        ([(None, "SIGTERM")] * 9, False),  # it tells no steps: a preemption proves nothing
        ([(None, ASKED), (None, "SIGTERM"), (None, ASKED), (None, ASKED)], False),
    ],
)
def test_a_program_that_gets_no_further_is_not_started_again(
    ends: list[tuple[int | None, str | None]], is_stopped: bool
) -> None:
    expected = pytest.raises(NoProgressError, match="max_no_progress=2") if is_stopped else contextlib.nullcontext()
    with expected:
        program._check_progress(_attempts(*ends), frozenset(), 2)


def test_the_worker_of_a_program_does_without_torch() -> None:
    """A program need not have torch, and importing it takes a second and hundreds of megabytes on each rank."""
    code = "import sys, hpc_trainer.worker.rank, hpc_trainer.worker.program; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )  # not warm: a fork has it
    assert done.stdout.strip() == "False"


def test_files_that_a_program_writes_beside_its_code_are_named(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("train.py", "results/1.json", "results/2.json", "old.csv", "__pycache__/train.pyc"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).touch()
    (copy / "train.py").chmod(0o444)
    since = time.time() - 60
    os.utime(copy / "old.csv", (since - 1, since - 1))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "1.csv").touch()
    (copy / "data").symlink_to(tmp_path / "data")
    (copy / "data.csv").symlink_to(tmp_path / "data" / "1.csv")
    environ = {FROZEN_CODE: json.dumps({"/home/me/project": str(copy), "/home/me/gone": str(tmp_path / "gone")})}
    assert written_beside_code(since, environ) == [f"{copy}/results/1.json", f"{copy}/results/2.json"]
    assert written_beside_code(since, {}) == []
