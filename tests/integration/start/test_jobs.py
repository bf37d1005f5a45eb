"""The files of jobs/ run, and the commands in README.md and docs/ compose, with the files that the pages show."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from hpc_trainer.cli.main import app
from hpc_trainer.errors import ConfigError
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import append_specs
from tests import warm
from tests.starting_records import write_records
from tests.unit.record.builders import make_specs

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobs/*.md")])
# What a reader fills in: <name>, $NAME, NAME, and what is left out.
_PLACEHOLDER = re.compile(r"[<$]|\.\.\.|\b[A-Z][A-Z_]{3,}\b")
_FILE_NAME = re.compile(r"(?:# @package .*\n)?# ([\w./-]+\.(?:py|yaml))\n")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def _run_job(name: str, *words: str, folder: Path) -> str:
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))},
        "HPC_TRAINER_RUNS": str(folder / "runs"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [ROOT / "jobs" / name, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    logs = [path.read_text()[-2000:] for path in folder.glob("runs/*/*/logs/*")]
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    return done.stdout


def test_quickstart_trains_and_shows_results(tmp_path: Path) -> None:
    printed = _run_job("quickstart.sh", "debug=smoke", folder=tmp_path)
    assert "COMPLETED at step 4/4" in printed
    assert "Best eval_accuracy" in printed


@pytest.mark.long
def test_byte_gpt_reads_the_file_that_is_named(tmp_path: Path) -> None:
    text = tmp_path / "a text, with spaces.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    small = ("debug=smoke", "model.num_layers=1", "model.embed_dim=16", "data.seq_len=16")
    printed = _run_job("byte_gpt.sh", str(text), *small, folder=tmp_path)
    assert "COMPLETED at step 4/4" in printed
    assert "EVAL_LOSS" in printed
    (specs,) = (tmp_path / "runs").glob("byte_gpt/specs.jsonl")
    assert str(text) in specs.read_text()


@pytest.mark.long
def test_own_loop_goes_on_and_takes_values_of_its_own(tmp_path: Path) -> None:
    words = ("train.num_steps=30", "params.width=16", "checkpoint.every_steps=10")
    assert "COMPLETED at step 30/30" in _run_job("own_loop.sh", *words, folder=tmp_path)
    assert "all steps are done" in _run_job("own_loop.sh", *words, folder=tmp_path)
    (specs,) = (tmp_path / "runs").glob("own_loop/specs.jsonl")
    assert '"params": {"width": 16}' in specs.read_text()


@pytest.mark.long
def test_any_program_runs_as_it_is(tmp_path: Path) -> None:
    printed = _run_job("any_program.sh", folder=tmp_path)
    assert "2 COMPLETED" in printed
    results = [json.loads(each.read_text()) for each in (tmp_path / "runs").glob("any_program/*/result.json")]
    assert [each["metrics"]["error"] < 1e-3 for each in results] == [True, True]


@pytest.mark.long
def test_a_hydra_app_runs_as_it_is(tmp_path: Path) -> None:
    assert "4 COMPLETED" in _run_job("hydra_app.sh", folder=tmp_path)
    results = [json.loads(each.read_text()) for each in (tmp_path / "runs").glob("hydra_app/*/result.json")]
    assert [each["metrics"]["return_value"] < 0.1 for each in results] == [True] * 4


@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("*.sh")), ids=lambda path: path.name)
def test_jobs_are_short_and_say_what_to_expect(job: Path) -> None:
    text = job.read_text()
    assert len(text.splitlines()) <= 40
    assert all(f"# {word}:" in text for word in ("Command", "Cost", "Expected"))
    assert "set -euo pipefail" in text
    assert os.access(job, os.X_OK)


@dataclass
class Command:
    """A command of a page, and the line that the page shows under it."""

    page: Path
    words: list[str]
    next_line: str


def _aims() -> Iterator[list[str]]:
    """The words behind `hpc-trainer` of each line of docs/i_want_to.md."""
    for line in (ROOT / "docs" / "i_want_to.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| I want to"):
            aim = re.fullmatch(r"\| [^|`]+ \| `hpc-trainer ([^`]+)` \| \[[^]]+\]\([^)]+\) \|", line)
            assert aim is not None, line
            yield shlex.split(aim[1])


@pytest.mark.long
def test_each_aim_has_a_command_whose_options_exist() -> None:
    aims = [*_aims()]
    assert len(aims) > 40
    for words in aims:
        command: Any = typer.main.get_command(app)
        left = [*words]
        while hasattr(command, "commands"):
            command = command.commands[left.pop(0)]
            assert not command.hidden, words
        command.make_context("hpc-trainer", left).close()


def _blocks(page: Path) -> Iterator[str]:
    """The indented blocks of a page, without their indent."""
    for found in re.finditer(r"(?:^    .*\n(?:[ \t]*\n)*)+", page.read_text(), flags=re.MULTILINE):
        yield textwrap.dedent(found.group())


def _commands() -> Iterator[Command]:
    for page in PAGES:
        for block in _blocks(page):
            lines = [*re.sub(r"\\\n\s*", "", block).splitlines(), ""]  # a line may go on in the next
            for line, next_line in itertools.pairwise(lines):
                command = line.removeprefix("$ ").split("  #")[0].rstrip()
                is_ours = re.match(r"hpc-trainer (plan|train|submit) ", command)
                if is_ours and not _PLACEHOLDER.search(command):
                    yield Command(page, shlex.split(command)[2:], next_line)
    for words in _aims():
        if words[0] in ("plan", "train", "submit") and not {"--app", "--command"} & {*words}:
            yield Command(ROOT / "docs" / "i_want_to.md", words[1:], "")


def _write_files_of(page: Path, folder: Path) -> None:
    """Writes the files that a page shows: blocks that begin with a comment that is a file name."""
    for block in _blocks(page):
        named = _FILE_NAME.match(block)
        if named:
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)


def _plan_words(words: list[str]) -> list[str]:
    """The overrides and the options that decide what is composed."""
    kept = []
    rest = iter(words)
    for word in rest:
        if word in ("--config-dir", "--trust", "--command"):
            kept += [word, next(rest)]
        elif word == "--app":
            kept += [word, *rest]
        elif word == "--canary":
            next(rest)
        elif not word.startswith("-"):
            kept.append(word)
    return kept


COMMANDS = list(_commands())


def test_the_pages_have_commands() -> None:
    assert {command.page.name for command in COMMANDS} >= {
        "README.md",
        "quickstart.md",
        "configure.md",
        "grids.md",
        "submit.md",
    }


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs in which a page's earlier command has trained digits; here for a few steps."""
    folder = tmp_path_factory.mktemp("digits")
    env = {**os.environ, "HPC_TRAINER_RUNS": str(folder / "runs"), "XDG_CONFIG_HOME": str(folder / "config")}
    words = ("train", "experiment=digits", "train.num_steps=12", "sweep_name=base")
    done = warm.run([sys.executable, "-m", "hpc_trainer", *words], cwd=folder, env=env, text=True, timeout=200)
    assert "COMPLETED at step 12/12" in done.stdout, (done.stdout, done.stderr)
    return folder / "runs"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that docs/data_records.md names."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder)
    return folder


_HYDRA_APP = """
import hydra
from hydra.core.config_store import ConfigStore

store = ConfigStore.instance()
store.store(name="config", node={"defaults": [{"model": "small"}, "_self_"], "optim": {"lr": 0.1}})
for name in ("small", "big"):
    store.store(group="model", name=name, node={"name": name})


@hydra.main(version_base=None, config_name="config")
def main(config):
    pass


if __name__ == "__main__":
    main()
"""


@pytest.mark.few(20)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: f"{each.page.stem}: {' '.join(each.words)}"[:90])
def test_documented_commands_compose(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    begins_with_digits = "init_from=base/cnn" in command.words
    runs = request.getfixturevalue("digits") if begins_with_digits else tmp_path / "runs"
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(runs))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    _write_files_of(ROOT / "docs" / "site.md", tmp_path)  # the site that other pages name
    _write_files_of(command.page, tmp_path)
    for sweep in ("pretrain", "finetune"):
        if any(f"{way}{sweep}" in command.words for way in ("init_from=best:", "after=")):  # a command before made it
            (runs / sweep).mkdir(parents=True)
            append_specs(SweepPaths(runs / sweep), make_specs(1))
    if "cluster=testbed" in command.words:  # the line before it on the page sets this folder
        monkeypatch.setenv("HPC_TRAINER_CONFIG_DIR", str(ROOT / "tests" / "slurm" / "testbed" / "conf"))
    if any("lab_x" in word for word in command.words):  # profiles of a site that the page describes
        profiles = {"lab_x1": "num_nodes: 1\ngpus_per_node: 1\n", "lab_x4": "num_nodes: 1\ngpus_per_node: 4\n"}
        (tmp_path / "lab" / "hardware").mkdir(parents=True)
        for name, text in profiles.items():
            (tmp_path / "lab" / "hardware" / f"{name}.yaml").write_text(f"# A lab.\nname: {name}\n{text}")
        monkeypatch.setenv("HPC_TRAINER_CONFIG_DIR", str(tmp_path / "lab"))
    if "./fit.sh {params.lr}" in command.words:  # a program of the reader's
        (tmp_path / "fit.sh").write_text("sleep 4\n")
        (tmp_path / "fit.sh").chmod(0o755)
    is_search = any(word.startswith("search=") for word in command.words)
    if is_search:
        (tmp_path / "train.py").write_text(_HYDRA_APP if "--app" in command.words else "")  # a program of the reader's
        monkeypatch.syspath_prepend(warm.OPTUNA)  # this environment's own is too old, for hydra-optuna-sweeper
    if command.page.name == "data_records.md":
        monkeypatch.chdir(request.getfixturevalue("records"))
    words = ["plan", *_plan_words(command.words)]
    if command.next_line.startswith("error: "):
        with pytest.raises(ConfigError) as caught:
            app(words, standalone_mode=False)
        assert str(caught.value).splitlines()[0] == command.next_line.removeprefix("error: ")
    else:
        app(words, standalone_mode=False)
        assert ("Next: hpc-trainer submit" if is_search else "To submit: ") in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.long
def test_custom_model_and_data_of_the_page_train(tmp_path: Path) -> None:
    page = ROOT / "docs" / "own_model_and_data.md"
    _write_files_of(page, tmp_path)
    (command,) = (each for each in COMMANDS if each.page == page and "+model.kwargs.width=32" in each.words)
    done = warm.run(
        [sys.executable, "-m", "hpc_trainer", "train", *command.words], cwd=tmp_path,
        env={**os.environ, "HPC_TRAINER_RUNS": str(tmp_path / "runs"), "XDG_CONFIG_HOME": str(tmp_path / "config")},
        text=True, timeout=200,
    )  # fmt: skip
    assert "COMPLETED at step 200/200" in done.stdout, (done.stdout, done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("name", ["own", "sgd"])
def test_loops_of_the_page_train(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "own_loop.md"
    _write_files_of(page, tmp_path)
    (command,) = (each for each in COMMANDS if each.page == page and f"sweep_name={name}" in each.words)
    done = warm.run(
        [sys.executable, "-m", "hpc_trainer", "submit", *command.words, "cluster=local", "--wait"], cwd=tmp_path,
        env={**os.environ, "HPC_TRAINER_RUNS": str(tmp_path / "runs"), "XDG_CONFIG_HOME": str(tmp_path / "config")},
        text=True, timeout=200,
    )  # fmt: skip
    logs = [path.read_text()[-2000:] for path in tmp_path.glob("runs/*/*/logs/*")]
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    results = [json.loads(path.read_text())["metrics"] for path in tmp_path.glob("runs/*/*/result.json")]
    assert len(results) == {"own": 2, "sgd": 1}[name]
    assert all(each.get("eval_accuracy", 1) > 0.85 and each.get("error", 0) < 0.1 for each in results), results


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=lambda path: path.name)
def test_loops_of_jobs_are_short_and_say_what_to_expect(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    assert all(f"{word}:" in text for word in ("Command", "Cost", "Expected"))
