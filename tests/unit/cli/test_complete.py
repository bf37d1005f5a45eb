"""Tab, as the shells ask: bash, zsh and fish by typer's protocol, and a real bash at a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.record.layout import SweepPaths
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

Ask = Callable[[str], list[str]]
VARIABLE = "_HPC_TRAINER_COMPLETE"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with choices of its own, a sweep, and code that fails the test when it is imported."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    monkeypatch.delenv("HPC_TRAINER_RUNS", raising=False)
    folder = tmp_path / "project"
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "rings.yaml").write_text("# @package _global_\nexperiment_name: rings\n")
    (folder / "hpc_trainer.yaml").write_text("config_dir: [conf]\ntrust: [my_lab]\nruns_dir: runs\n")
    (folder / "my_lab.py").write_text("open('imported', 'w')\n")
    sweep = SweepOnDisk(folder / "runs" / "study", make_specs(2))
    sweep.start(0)
    sweep.start(1)
    monkeypatch.chdir(folder)
    return folder


def _cut_as_bash(line: str) -> list[str]:
    """The words of a line as bash counts them: `=` is a word of its own, and nothing after a blank is one, too."""
    words = [part for word in line.split(" ") for part in _around_equals(word)]
    return words if line.rpartition(" ")[2] or not words else [*words, ""]


def _around_equals(word: str) -> list[str]:
    before, equals, after = word.partition("=")
    return [part for part in (before, equals, *(_around_equals(after) if after else ())) if part]


@pytest.fixture(params=["bash", "zsh", "fish"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Gives a line up to the cursor; returns what is offered, as the shell would write it into the line."""
    shell = request.param

    def asked(line: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer"])
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # as a script of that name is started
        monkeypatch.setenv(VARIABLE, f"complete_{shell}")
        words = _cut_as_bash(line)
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            main()
        out = capsys.readouterr()
        assert out.err == ""
        lines = out.out.splitlines()
        if shell == "zsh":
            lines = [each.split('"')[1] for each in lines if '"' in each]
        if shell == "fish":
            lines = [each.partition("\t")[0] for each in lines]
        last = line.rpartition(" ")[2]
        written = last.rpartition("=")[0] + "=" if shell == "bash" and "=" in last else ""
        return [written + each for each in lines if each]

    return asked


@pytest.mark.few(1)
@pytest.mark.usefixtures("project")
def test_verbs_and_their_options(ask: Ask) -> None:
    assert {"train", "plan", "submit", "status", "show"} <= set(ask("hpc-trainer "))
    assert "top-up" not in ask("hpc-trainer "), "hidden"
    assert "grid=digits_grid" in ask("hpc-trainer plan grid=digits_")
    assert ask("hpc-trainer pl") == ["plan"]
    assert ask("hpc-trainer submit --re") == ["--retry-failed"]
    assert ask("hpc-trainer verify pree") == ["preempt"]
    assert ask("hpc-trainer verify preempt --kind no") == ["nodefail"]
    assert ask("hpc-trainer tu") == [], "an old name"
    assert ask("hpc-trainer drill pree") == ["preempt"]
    assert ask("hpc-trainer data pre") == ["prepare"]
    assert ask("hpc-trainer data prepare tokens --to out --doc") == ["--document"]


@pytest.mark.few(1)
@pytest.mark.usefixtures("project")
def test_groups_choices_keys_and_values(ask: Ask) -> None:
    assert {"model=", "optim.", "seed="} <= set(ask("hpc-trainer plan "))
    assert ask("hpc-trainer plan model=res") == ["model=resnet18", "model=resnet34", "model=resnet50"]
    assert "model=mlp" in ask("hpc-trainer plan model=")
    assert ask("hpc-trainer data check data=dig") == ["data=digits"]
    assert ask("hpc-trainer plan model=mlp,resnet5") == ["model=mlp,resnet50"]
    assert ask("hpc-trainer plan cluster.executor=l") == ["cluster.executor=local"]
    assert ask("hpc-trainer submit --wait model=mlp optim=sgd optim.mom") == ["optim.momentum=", "optim.momentum=0.9"]
    assert "optim.betas=" not in ask("hpc-trainer plan optim=sgd optim.")


def test_choices_of_the_project_file_and_of_the_command_line(ask: Ask, project: Path) -> None:
    assert ask("hpc-trainer plan experiment=ri") == ["experiment=rings"]
    (project / "more" / "experiment").mkdir(parents=True)
    (project / "more" / "experiment" / "riddle.yaml").write_text("")
    assert ask("hpc-trainer plan --config-dir more experiment=ri") == ["experiment=riddle", "experiment=rings"]
    assert not (project / "imported").exists()


def test_profiles_of_a_site_and_of_the_project(ask: Ask, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (project / "conf", project.parent / "site"):
        (folder / "hardware").mkdir(parents=True)
        (folder / "hardware" / f"of_{folder.name}.yaml").write_text("")
    monkeypatch.setenv("HPC_TRAINER_CONFIG_DIR", str(project.parent / "site"))
    assert ask("hpc-trainer plan hardware=of_") == ["hardware=of_conf", "hardware=of_site"]
    assert ask("hpc-trainer hardware show of_") == ["of_conf", "of_site"]
    monkeypatch.setenv("HPC_TRAINER_CONFIG_DIR", "/no/such/folder")
    assert ask("hpc-trainer hardware show gpu_x1") == [], "the command itself reports the error"


@pytest.mark.few(1)
def test_sweeps_and_runs(ask: Ask, project: Path) -> None:
    first, second = sorted(spec.run_id for spec in make_specs(2))
    assert ask("hpc-trainer status ") == ["study"]
    assert ask("hpc-trainer why --sweep st") == ["study"]
    assert ask("hpc-trainer cancel ") == ["study"]
    assert sorted(ask(f"hpc-trainer why {first[:4]}")) == [first, second]
    assert sorted(ask("hpc-trainer logs ")) == [first, second]
    assert ask(f"hpc-trainer diff {first} {second}") == [second]
    SweepPaths(project / "elsewhere" / "other").folder.mkdir(parents=True)
    (project / "elsewhere" / "other" / "sweep.json").write_text("{}")
    assert ask("hpc-trainer status --runs-dir elsewhere ") == ["other"]


def test_where_something_is_wrong_tab_is_silent(ask: Ask, project: Path) -> None:
    (project / "hpc_trainer.yaml").write_text("nonsense: 1\n")
    assert ask("hpc-trainer plan experiment=ri") == []
    assert ask("hpc-trainer status ") == []


def test_the_line_that_is_typed_is_not_looked_up_as_a_command(ask: Ask, project: Path) -> None:
    """A bare name among overrides is refused by the verb; while it is typed that would cost a look at all sweeps."""
    assert "model=mlp" in ask("hpc-trainer plan study model=ml")


@pytest.mark.long
def test_no_tab_imports_what_is_heavy(project: Path) -> None:
    code = (
        "import sys, atexit, hpc_trainer.cli.main as m\n"
        "atexit.register(lambda: print([n for n in ('torch', 'hydra', 'omegaconf', 'submitit', 'numpy', 'rich') "
        "if n in sys.modules], file=sys.stderr))\nsys.argv = ['hpc-trainer']\nm.main()"
    )
    for line in ("hpc-trainer plan optim.l", "hpc-trainer plan experiment=", "hpc-trainer why ml"):
        words = _cut_as_bash(line)
        asked = {VARIABLE: "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=True
        )
        assert done.stdout
        assert done.stderr == "[]\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_a_real_bash_at_a_terminal(project: Path, tmp_path: Path) -> None:
    program = tmp_path / "hpc-trainer"
    program.write_text(f"#!{sys.executable}\nfrom hpc_trainer.cli.main import main\nmain()\n")
    program.chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="dumb", PS1="READY> ", INPUTRC="/dev/null", PATH=f"{tmp_path}:{os.environ['PATH']}")
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        _type(terminal, "bind 'set bell-style none'; bind 'set page-completions off'\n", "READY> ")
        _type(terminal, "hpc-trainer --install-completion\n", "bash completion installed in ")
        _type(terminal, 'source ~/.bashrc; echo "DO""NE"\n', "DONE\r\n")
        for typed, shown in (
            ("hpc-trainer pl\t", "hpc-trainer plan "),
            ("model=resnet1\t", "model=resnet18 "),
            ("optim.momentu\t", "optim.momentum="),
            ("0.9 cluster.executor=l\t", "0.9 cluster.executor=local "),
        ):
            _type(terminal, typed, shown)
        _type(terminal, "\x15hpc-trainer status st\t", "hpc-trainer status study ")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.long
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_another_real_shell_at_a_terminal(shell: str, project: Path, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    program = tmp_path / "hpc-trainer"
    program.write_text(f"#!{sys.executable}\nfrom hpc_trainer.cli.main import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / ".zshrc").touch()  # else zsh asks a new user about it
    # Else fish reads all pages of man first, on two cores, and goes on when the test has ended.
    (tmp_path / "data" / "fish" / "generated_completions").mkdir(parents=True)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", ZDOTDIR=str(tmp_path), SHELL=shell, PATH=f"{tmp_path}:{os.environ['PATH']}")
        # Where typer and fish write, whatever it was.
        os.environ.update(XDG_CONFIG_HOME=str(tmp_path / ".config"), XDG_DATA_HOME=str(tmp_path / "data"))
        os.execvp(shell, [shell, "-i"])
    try:
        # Two words, which the terminal's echo of what is typed does not show.
        _type(terminal, 'hpc-trainer --install-completion; echo "DO""NE"\n', "DONE\r\n")
        _type(terminal, f"exec {shell} -i\n", "")
        _type(terminal, 'echo "RE""ADY"\n', "READY\r\n")
        # zsh loads it at the first Tab of a session, and completes from the second one on.
        first = "hpc-trainer sta\t" + "\t" * (shell == "zsh")
        for typed, shown in (
            (first, "tus"),
            ("\x15hpc-trainer plan model=resnet1\t", "resnet18"),
            (" optim.momentu\t", "optim.momentum="),
            ("0.9 experiment=ri\t", "experiment=rings"),
        ):
            _type(terminal, typed, shown)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _type(terminal: int, keys: str, until: str) -> None:
    """Types, and reads until the terminal shows this."""
    os.write(terminal, keys.encode())
    shown, deadline = "", time.monotonic() + 60
    while until not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 65536).decode()
