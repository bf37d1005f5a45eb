"""Programs of a person's own on this machine: stopped and going on, failing, on several ranks, one a node."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.starting_points import OF_KERAS, PROGRAMS, STARTING_POINTS, changed_lines, take

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

FAST = ("monitor.heartbeat_every_s=0",)


def _take(local: LocalDriver, name: str) -> None:
    shutil.copy(PROGRAMS / name, local.folder)


def _metrics(local: LocalDriver, sweep: str) -> list[int]:
    lines = (local.run_folder(sweep) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_stopped_program_goes_on_from_its_own_checkpoint(local: LocalDriver) -> None:
    _take(local, "count.sh")
    words = ("--command", "./count.sh {params.steps}", "params.steps=60", "sweep_name=counted", *FAST)
    process = local.start("train", *words)
    local.wait_for_step("counted", 10)
    local.signal_rank("counted", signal.SIGUSR2)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1, output + errors
    (end,) = local.events("counted", "end")
    assert (end["state"], end["signal"], end["error"]) == ("PREEMPTED", "SIGUSR2", {})
    done = local.train(*words)
    assert (done["state"], done["step"], done["metrics"]) == ("COMPLETED", 60, {"left": 0})
    assert _metrics(local, "counted") == list(range(1, 61)), "no step twice, none left out"
    logs = sorted((local.run_folder("counted") / "logs").glob("*.log"))
    assert f"begins after step {end['step']}" in logs[1].read_text()
    assert "all steps are done" in local.run("train", *words).stdout
    ledger = local.json("why", "counted")["ledger"]
    assert [each["seconds"]["program"] > 0 for each in ledger["attempts"]] == [True, True]
    assert 0.1 < ledger["goodput"] < 1
    assert "step" not in ledger["seconds"]


_WRITES_WHERE_IT_STANDS = """\
import os, sys
from pathlib import Path
import lab
Path("picture.txt").write_text(sys.argv[1])
saved = Path(os.environ["HPC_TRAINER_CHECKPOINTS"], "saved")
Path("said.txt").open("a").write(f"{sys.argv[2:]} {lab.NAME}\\n")
if not saved.exists():
    saved.write_text("1")
    sys.exit(75)
"""


@pytest.mark.long
@pytest.mark.parametrize("snapshot", ["git", "off"])
def test_runs_in_folders_of_their_own_that_go_on(local: LocalDriver, snapshot: str) -> None:
    (local.folder / "write.py").write_text(_WRITES_WHERE_IT_STANDS)
    (local.folder / "lab.py").write_text("NAME = 'lab'")
    words = (
        "--command", "python write.py {seed} {run.resume:--resume now}", "seed=0,1", "train.command_dir=run",
        "sweep_name=own", f"snapshot={snapshot}", "cluster=local", *FAST,
    )  # fmt: skip
    local.run("submit", *words, "--wait", check=False)
    local.run("submit", *words, "--wait")
    folders = [each.parent for each in sorted((local.folder / "runs" / "own").rglob("picture.txt"))]
    assert sorted((each / "picture.txt").read_text() for each in folders) == ["0", "1"]
    assert {(each / "said.txt").read_text() for each in folders} == {"[] lab\n['--resume', 'now'] lab\n"}


@pytest.mark.long
def test_a_sweep_says_what_its_failed_programs_said_last(local: LocalDriver) -> None:
    command = "sh -c 'echo the seed {seed} is bad >&2; exit 1'"
    local.run(
        "submit", "--command", command, "seed=0,1", "sweep_name=bad", "cluster=local", *FAST, "--wait", check=False
    )
    said = local.run("why", "bad", check=False).stdout
    assert "2 x" in said
    assert "its last line: the seed 0 is bad" in said
    assert "its last line: the seed 1 is bad" in said
    assert [row["step"] for row in local.json("results", "bad")] == [None, None]
    table = local.run("results", "bad").stdout
    assert "STEP" not in table


def test_75_asks_to_come_back(local: LocalDriver) -> None:
    local.run("train", "--command", "sh -c 'exit 75'", "sweep_name=asks", *FAST, check=False)
    (end,) = local.events("asks", "end")
    assert (end["state"], end["signal"]) == ("PREEMPTED", "exit 75")


@pytest.mark.long
def test_a_program_finds_its_data_and_is_told_of_files_that_are_lost(local: LocalDriver) -> None:
    (local.folder / "data").mkdir()
    (local.folder / "data" / "numbers.txt").write_text("7")
    (local.folder / "near.py").write_text(
        "from pathlib import Path\nhere = Path(__file__).parent\n"
        "print('read', (here / 'data' / 'numbers.txt').read_text())\n"
        "(here / 'results').mkdir()\n(here / 'results' / 'answer.json').write_text('42')\n"
    )
    planned = local.run("plan", "--command", "python near.py", "sweep_name=near", *FAST).stdout
    assert "Note: The frozen code has links to data that is read as it is when a run starts: data." in planned
    local.run("train", "--command", "python near.py", "sweep_name=near", *FAST)
    (log,) = (local.run_folder("near") / "logs").glob("*.log")
    assert "\nread 7\n" in log.read_text()
    assert "results/answer.json beside its frozen code, on the disk of this node alone." in log.read_text()


@pytest.mark.long
def test_a_failing_rank_ends_the_others_and_is_told_with_its_last_lines(local: LocalDriver) -> None:
    script = "if [ $RANK = 1 ]; then echo the reason; exit 7; fi; sleep 60"
    began = time.monotonic()
    done = local.run(
        "train", "--command", f"sh -c '{script}'", "hardware=cpu_x2", "sweep_name=failing", *FAST, check=False
    )
    assert done.returncode == 1
    assert time.monotonic() - began < 50, "rank 0 did not wait for its own program"
    told = local.json("why", "failing")
    assert (told["state"], told["cause"]) == ("FAILED", "program")
    assert "rank 1" in told["evidence"][0]
    assert "exit code 7" in told["evidence"][0]
    assert "  the reason" in told["evidence"]


@pytest.mark.long
def test_ranks_know_their_place_and_torchrun_starts_its_own(local: LocalDriver) -> None:
    words = take("argparse_ddp", "after.py", local.folder, 20)
    command = words[words.index("--command") + 1]
    ranks = local.train(
        "--command", command.replace("torchrun", "python"), *words[2:4], "sweep_name=ranks", "hardware=cpu_x2", *FAST
    )
    node = local.train(
        "--command", command, *words[2:4], "sweep_name=node", "train.command_per=node", "hardware=cpu_x2", *FAST
    )
    assert (ranks["state"], node["state"]) == ("COMPLETED", "COMPLETED")
    assert ranks["metrics"] == node["metrics"]
    logs = "".join(each.read_text() for each in (local.run_folder("node") / "logs").glob("*.log"))
    assert {f"rank {rank} of 2" in logs for rank in (0, 1)} == {True}


_RANKS_OF_JAX = """\
import os
import jax
env = os.environ
jax.distributed.initialize(f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}", int(env["WORLD_SIZE"]), int(env["RANK"]))
from jax.experimental import multihost_utils
print("processes", multihost_utils.process_allgather(jax.numpy.int32(jax.process_index())).tolist())
"""


@pytest.mark.long
@pytest.mark.dist
def test_ranks_of_jax_meet_where_torchruns_would(local: LocalDriver) -> None:
    """docs/any_program.md says these words of `jax.distributed`."""
    (local.folder / "ranks.py").write_text(_RANKS_OF_JAX)
    done = local.train("--command", "python ranks.py", "sweep_name=ranks", "hardware=cpu_x2", *FAST)
    assert done["state"] == "COMPLETED"
    logs = [path.read_text() for path in (local.run_folder("ranks") / "logs").glob("*.log")]
    assert [text.count("processes [0, 1]") for text in logs] == [1, 1]


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each == "plain" else pytest.mark.long) for each in STARTING_POINTS]
)
def test_a_program_runs_as_it_is(local: LocalDriver, kind: str) -> None:
    words = [word for word in take(kind, "before.py", local.folder, 20) if not word.startswith("hardware=")]
    done = local.train(*words, "hardware=cpu_x2" if kind == "argparse_ddp" else "hardware=cpu_x1", *FAST)
    assert done["state"] == "COMPLETED"
    assert any((local.run_folder(kind) / "output" / "checkpoints").iterdir()), "it saved nothing"


def test_the_page_says_how_many_lines_change() -> None:
    page = " ".join((PROGRAMS.parents[1] / "docs" / "any_program.md").read_text().split())
    for name, point in (STARTING_POINTS | OF_KERAS).items():
        assert re.search(rf"{point.title}: {changed_lines(name)}\b", page)


@pytest.mark.long
def test_nothing_of_a_cancelled_program_is_left(local: LocalDriver) -> None:
    """It starts a child that does not hear, and does not hear itself."""
    script = "trap '' TERM; (trap '' TERM; sleep 987 & echo child $!; wait); sleep 987"
    process = local.start("train", "--command", f"sh -c '{script}'", "sweep_name=deaf", "local.max_parallel=1", *FAST)
    deadline = time.monotonic() + 60
    child = 0
    while not child and time.monotonic() < deadline:
        logs = [each.read_text() for each in (local.folder / "runs" / "deaf").glob("*/logs/*.log")]
        child = next(
            (int(line.split()[1]) for text in logs for line in text.splitlines() if line.startswith("child ")), 0
        )
        time.sleep(0.1)
    assert child
    local.run("cancel", "deaf")
    process.communicate(timeout=100)
    assert local.json("status", "deaf")["runs"][0]["state"] == "CANCELLED"
    assert not _is_at_work(child)


def _is_at_work(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.few(1)
@pytest.mark.parametrize("words", [["step=x"], ["loss=1"], ["step=1", "=3"], ["step=-1"]])
def test_log_says_what_it_takes(local: LocalDriver, words: list[str]) -> None:
    done = local.run("log-metrics", *words, check=False)
    assert (done.returncode, "hpc-trainer log-metrics step=10 loss=0.3" in done.stderr) == (2, True)


@pytest.mark.long
def test_what_a_shell_script_told_last_is_known_when_it_has_failed(local: LocalDriver) -> None:
    script = f"{sys.executable} -m hpc_trainer log step=5 num_steps=9 loss=0.5; exit 3"
    local.run("train", "--command", f"sh -c '{script}'", "sweep_name=shell", check=False)  # ends before a heartbeat
    (run,) = local.json("status", "shell")["runs"]
    assert (run["state"], run["step"], run["num_steps"], run["metrics"]) == ("FAILED", 5, 9, {"loss": 0.5})
