"""cluster.setup on a real bash: the first line that fails ends the shell and is named; what is no failure is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_trainer.launch.batch_job import setup_lines
from hpc_trainer.record.last_words import words_of_setup

MODULE = "module() { false; [ \"$2\" != cuda/99 ] || { echo 'ERROR: no module cuda/99' >&2; return 5; }; }"


def _bash(tmp_path: Path, *setup: str, how: str = "script") -> subprocess.CompletedProcess[str]:
    """What a batch script, or a rank's shell on this machine, does with these lines."""
    text = "\n".join(["#!/bin/bash", "# of sbatch", *setup_lines(setup), "false", "echo began", "exit 0"])
    script = tmp_path / "slurm_script"
    script.write_text(text)
    command = ["bash", str(script)] if how == "script" else ["bash", "-c", text]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=tmp_path
    )


def _message(done: subprocess.CompletedProcess[str], setup: tuple[str, ...]) -> str:
    words = words_of_setup(done.stdout.splitlines(), setup)
    assert words is not None, done.stdout
    return str(words["message"])


FAILS = {
    "a function": (1, (MODULE, "module load gcc || true", "module load cuda/99", "echo not reached"),
                   "cluster.setup line 3 failed: `module load cuda/99`: ERROR: no module cuda/99"),
    "a program": (1, ("true", "ls /not/here", "echo not reached"), "cluster.setup line 2 failed: `ls /not/here`: ls:"),
    "no such program": (1, ("nosuchprogram a",), "line 1 failed: `nosuchprogram a`: "),
    "in a loop": (1, ("for name in here there; do", "  [ $name = here ]", "done"),
                  "line 2 failed: `  [ $name = here ]`: exit status 1"),
    "continued": (1, ("true", "ls \\", "  /not/here"), "failed: `"),
    "a sourced file": (1, ("echo hello", ". ./broken.sh"), "line 2 failed: `. ./broken.sh`: no such environment"),
    "a file that exits": (3, (". ./leaves.sh", "echo not reached"), "line 1 failed: `. ./leaves.sh`: it leaves"),
    "an exit": (4, ("true", "exit 4"), "line 2 failed: `exit 4`: exit status 4"),
    "set -e in a function": (1, ("set -e", "f() { false; }", "f"), "line 3 failed: `f`: exit status 1"),
    "killed": (143, ("true", "bash -c 'kill -TERM $$'"), "line 2 failed: `bash -c 'kill -TERM $$'`: "),
    "an unset variable": (None, ("set -u", "echo $NOT_SET_HERE"), "line 2 failed: `echo $NOT_SET_HERE`: "),
    "no shell": (2, ("echo hello", "if then"), "bash cannot parse cluster.setup: "),
    "unfinished": (2, ("echo hello", "if true; then"), "bash cannot parse cluster.setup: "),
}  # fmt: skip


@pytest.mark.parametrize("how", ["script", "words"])
@pytest.mark.parametrize("which", FAILS)
def test_the_first_line_that_fails_ends_the_start_and_is_named(tmp_path: Path, which: str, how: str) -> None:
    code, setup, told = FAILS[which]
    (tmp_path / "broken.sh").write_text("false\necho 'no such environment' >&2\nfalse\n")
    (tmp_path / "leaves.sh").write_text("echo 'it leaves' >&2\nexit 3\n")
    done = _bash(tmp_path, *setup, how=how)
    assert "began" not in done.stdout
    assert "not reached" not in done.stdout
    assert done.returncode == code or (code is None and done.returncode), done
    assert told in _message(done, setup)


GOES_ON = {
    "none": (),
    "what is asked about": ("if ! ls /not/here; then", "  echo other", "fi", "false || echo other", "! true"),
    "within a function": (MODULE, "module load gcc; true", "module load cuda/99 || module load cuda"),
    "within a sourced file": (". ./careless.sh",),
    "a here-document": ("cat <<END", "exit 3", "END"),
    "a case": ("case x in", "  y) false ;;", "  *) true ;;", "esac"),
    "a pipe": ("false | true",),
    "set -eu": ("set -eu", "true"),
    "a line for the end": ("trap 'echo cleaned' EXIT",),
    "a comment and nothing": ("# modules", "", "true"),
}  # fmt: skip


@pytest.mark.parametrize("how", ["script", "words"])
@pytest.mark.parametrize("which", GOES_ON)
def test_what_is_no_failure_ends_nothing(tmp_path: Path, which: str, how: str) -> None:
    (tmp_path / "careless.sh").write_text("false\n[ -z x ] && false\ntrue\n")
    done = _bash(tmp_path, *GOES_ON[which], how=how)
    assert done.returncode == 0, done
    assert "began" in done.stdout, "and what fails after the set-up is another matter"
    assert words_of_setup(done.stdout.splitlines(), GOES_ON[which]) is None
    assert "unary operator" not in done.stdout
    assert ("cleaned" in done.stdout) == (which == "a line for the end")


def test_a_signal_still_ends_the_set_up_as_a_signal(tmp_path: Path) -> None:
    """A preemption while a module loads is no failure of the run: Slurm must see 0:15."""
    assert _bash(tmp_path, "kill -TERM $$; sleep 5").returncode == -15


def test_an_earlier_start_is_not_taken_for_this_one() -> None:
    """The file is of all starts of a job."""
    ended = "hpc_trainer: the job ends at cluster.setup line 1: exit status 1"
    began = "run-1: attempt 1, rank 0 logs to /runs/run-1/logs/attempt-001.rank-0.log"
    assert words_of_setup(["oops", ended, began, "srun: error: n1: task 0: Killed"], ["x"]) is None
    words = words_of_setup([began, "srun: error: n1: task 0: Exited with exit code 75", "oops", ended], ["x"])
    assert words == {
        "cause": "not started", "message": "cluster.setup line 1 failed: `x`: oops", "output": "oops"
    }  # fmt: skip
