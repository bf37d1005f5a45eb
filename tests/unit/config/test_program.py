"""`train.command`: words, placeholders, names, and what is wrong with it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hpc_trainer.config.compose.overrides import override_value
from hpc_trainer.config.program import (
    fill,
    module_names,
    place_of_text,
    placeholders,
    program_name,
    resume_files,
    resumed,
    runs_of,
    script_files,
    shell_files,
    values_of,
)
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import Grid, freeze_grid

CONFIG = {"params": {"lr": 1e-5, "name": "a b; rm -rf /", "wide": True, "none": None, "list": [1, 2]}, "seed": 3}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    Path("train.py").touch()


def _freeze(command: str, *words: str) -> Grid:
    return freeze_grid([f"train.command={override_value(command)}", "cluster=local", *words])


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{params.lr}", "1e-05"),
        ("--out={run.dir}/x", "--out=/runs/r1/x"),
        ("{params.name}", "a b; rm -rf /"),
        ("{params.wide},{params.none},{seed}", "true,null,3"),
        ("{params.list}", "[1, 2]"),
        ("{{}}${HOME}", "{}${HOME}"),
    ],
)
def test_placeholders_are_filled_in_and_stay_one_word(word: str, filled: str) -> None:
    assert fill(word, values_of(CONFIG, {"run.dir": "/runs/r1"})) == filled


def test_values_that_look_like_placeholders_are_not_filled_in_again() -> None:
    config = {"params": {"a": "{params.b}", "b": "no"}}
    assert fill("{params.a}", values_of(config, {})) == "{params.b}"


@pytest.mark.parametrize("text", ["{", "a } b", "{{{"])
def test_a_lone_brace_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is unmatched"):
        list(placeholders(text))


@pytest.mark.parametrize(
    ("command", "name", "scripts", "modules"),
    [
        ("python train.py --lr {params.lr}", "train", ["train.py"], []),
        ("torchrun --nproc-per-node 2 my/fit.py", "fit", ["my/fit.py"], []),
        ("python -m lab.fit {params.x}", "fit", [], ["lab.fit"]),
        ("./count.sh 3", "count", ["./count.sh"], []),
        ("sh -c 'echo {run.dir}'", "sh", [], []),
        ("sh -c 'exec python train.py'", "train", [], []),
        ("sh -c 'cd x && python $Y/fit.py'", "fit", [], []),
        ("sh -c 'python -m lab.fit {params.lr}'", "fit", [], ["lab.fit"]),
        ("python train.py {run.resume:--from old.py}", "train", ["train.py"], []),
        ("{params.python} train.py", "train", ["train.py"], []),
    ],
)
def test_what_a_command_runs(command: str, name: str, scripts: list[str], modules: list[str]) -> None:
    words = shlex.split(command)
    assert (program_name(command), script_files(words), module_names(words)) == (name, scripts, modules)


@pytest.mark.parametrize(
    ("text", "scripts", "modules", "unclear"),
    [
        ("cd sub && python train.py", [], [], ["train.py"]),
        ("cd sub && python /a/train.py", ["/a/train.py"], [], []),
        ("R=1; exec python -u train.py $R > out.py 2>&1", ["train.py"], [], []),
        ("python -m lab.fit; python $X/train.py", [], ["lab.fit"], ["$X/train.py"]),
        ("if [ -f a.sh ]; then bash b.sh; fi", ["b.sh"], [], []),
        ("cp a.py b.py; rm c.py; echo d.py", [], [], []),
        ("./go.sh && A=1 torchrun --nproc 2 'my train.py' other.py", ["./go.sh", "my train.py"], [], []),
        ("# python a.py\npython 'un closed", [], [], []),
    ],
)
def test_what_a_text_for_a_shell_runs(text: str, scripts: list[str], modules: list[str], unclear: list[str]) -> None:
    words = ["srun", "bash", "-eo", "pipefail", "-c", text]
    assert place_of_text(words) == 5
    found = runs_of(text)
    assert (shell_files(words), found.modules, found.unclear) == (scripts, modules, unclear)


def test_the_words_of_a_program_that_goes_on() -> None:
    command = "python t.py {run.resume:--from {params.x} -v}{run.resume[a/b.pt]: c} {{run.resume:y}} ${run.resume:z}"
    rest = "{{run.resume:y}} ${run.resume:z}"
    assert resume_files(command) == ["", "a/b.pt"]
    assert resumed(command) == f"python t.py --from {{params.x}} -v c {rest}"
    assert resumed(command, lambda name: name == "") == f"python t.py --from {{params.x}} -v {rest}"
    assert resumed(command, lambda _: False) == f"python t.py  {rest}"
    assert list(placeholders(command)) == ["params.x"]


def test_each_point_is_a_run_named_after_the_program_and_its_params() -> None:
    specs = _freeze("python train.py --lr {params.lr}", "params.lr=1e-3,1e-2").specs
    assert [spec.run_id.rpartition("-")[0] for spec in specs] == ["train-lr0.001-s0", "train-lr0.01-s0"]
    assert {spec.num_steps for spec in specs} == {0}
    assert {spec.config["train"]["command_dir"] for spec in specs} == {str(Path.cwd())}


@pytest.mark.parametrize("word", ["run", "{run.dir}", "'{run.dir}'"])
def test_a_folder_of_each_runs_own(word: str) -> None:
    (spec,) = _freeze("python train.py", f"train.command_dir={word}").specs
    (plain,) = _freeze("python train.py").specs
    assert spec.config["train"]["command_dir"] == "{run.dir}"
    assert spec.config["train"]["command_from"] == str(Path.cwd())
    assert spec.run_id == plain.run_id


def test_a_folder_that_is_called_run_is_meant_as_before() -> None:
    Path("run").mkdir()
    Path("run", "train.py").touch()
    (spec,) = _freeze("python train.py", "train.command_dir=run").specs
    assert spec.config["train"]["command_dir"] == str(Path("run").absolute())
    assert spec.config["train"]["command_from"] is None


def test_steps_that_the_command_names_are_known() -> None:
    (spec,) = _freeze("python train.py {train.num_steps}", "train.num_steps=70").specs
    assert spec.num_steps == 70


def test_one_task_a_node_has_all_its_cores() -> None:
    words = ("hardware.tasks_per_node=4", "hardware.cpus_per_task=2")
    (rank,) = _freeze("python train.py", *words).specs
    (node,) = _freeze("python train.py", *words, "train.command_per=node").specs
    assert (rank.shape.tasks_per_node, rank.shape.cpus_per_task) == (4, 2)
    assert (node.shape.tasks_per_node, node.shape.cpus_per_task) == (1, 8)
    assert rank.run_id != node.run_id


def test_a_value_of_the_environment_is_the_programs_own() -> None:
    (spec,) = _freeze("sh -c 'echo \\${HOME} $x'").specs
    assert spec.config["train"]["command"] == "sh -c 'echo ${HOME} $x'"


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("python train.py {lr}", ["params.lr=1"], r"\{lr\} is neither a key .* Did you mean params.lr\?"),
        ("python train.py {run.dirr}", [], r"Did you mean run.dir\? Write"),
        ("python train.py {params.lr}", [], r"\{params.lr\} has no value: add params.lr=VALUE. Write"),
        (
            "python train.py {params.lrr}",
            ["params.lr=1"],
            r"no value: add params.lrr=VALUE. Did you mean params.lr\? W",
        ),
        ("python train.py", ["params.lr=1,2"], r"params.lr is an axis .* Pass it on as \{params.lr\}"),
        ("cd x && python train.py", [], r"&& is shell syntax.* sh -c 'cd x && python train.py'"),
        ("python train.py > {run.dir}/out", [], "> is shell syntax"),
        ("pythn train.py", [], "pythn is not a program on this machine's PATH"),
        ("cd x", [], "cd is not a program on this machine's PATH"),
        ("./train.py", [], r"./train.py is not executable: chmod \+x ./train.py"),
        ("python train.py {}", [], r"\{\} names nothing"),
        ("python train.py {", [], "brace at character 17 is unmatched"),
        ("python 'train.py", [], "No closing quotation"),
        ("", [], "must begin with a program"),
        ("python train.py {run.resume}", [], r"\{run.resume\} needs the arguments with which the program resumes, as"),
        ("python train.py {run.resume:{params.y}}", [], r"\{params.y\} has no value"),
        ("{run.resume:python train.py}", [], "must begin with a program"),
        ("python train.py", ["train.command_dir='{run.dri}'"], r"\{run.dri\} is not a place of the run"),
        ("python train.py", ["train.command_from=/no/such"], "train.command_from=/no/such: there is no such folder"),
        ("--lr 3", [], "must begin with a program"),
        ("python tran.py", [], "runs tran.py, and .* has no such file"),
        ("./tran", [], "runs ./tran, and .* has no such file"),
        ("python train.py", ["optim.lr=1e-3"], "optim.lr=0.001 has no effect|optim.lr=1e-3 has no effect"),
        ("python train.py", ["model=gpt"], "model=gpt has no effect"),
        ("python train.py", ["tracker=tensorboard"], "tracker=tensorboard has no effect"),
        ("python train.py", ["train.main=my.main"], "exclude each other"),
        (
            "python train.py",
            ["train.command_per=node", "train.command_env=torchrun"],
            "train.command_env=torchrun has no effect with train.command_per=node",
        ),
        (
            "python train.py",
            ["train.command_env=tensorflow", "+cluster.env.TF_CONFIG='{}'"],
            "cluster.env.TF_CONFIG is replaced by the one that train.command_env=tensorflow makes",
        ),
        ("python train.py", ["train.command_env=tensorflo"], "tensorflow"),
        ("python train.py", ["train.command_dir=/no/such"], "train.command_dir=/no/such: there is no such folder"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_planned(command: str, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _freeze(command, *words)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py {params}", ["params.lr=1,2"]),
        ("python train.py", ["params.note=first", "seed=0,1"]),
        ("expr 2 '>' 1", []),
        ("pythn train.py", ["+cluster.env.PATH=/opt/bin"]),
        ("pythn train.py", ["cluster.setup=[module load python]"]),
        ("{params.python} train.py", ["params.python=pythn"]),
        ("sh -c 'exec python train.py'", []),
        ("sh -c 'python made.py > later.py'", []),
    ],
)
def test_what_may_be_right_is_not_refused(command: str, words: list[str]) -> None:
    assert _freeze(command, *words).specs


def test_metrics_that_a_program_tells_may_go_to_a_tracker() -> None:
    (spec,) = _freeze("python train.py", "tracker=wandb", "tracker.project=mine").specs
    assert spec.config["tracker"]["project"] == "mine"


def test_an_override_that_the_command_reads_is_welcome() -> None:
    specs = _freeze("python train.py {optim.lr} {model.name}", "optim.lr=1e-3,1e-2", "model=mlp").specs
    assert len(specs) == 2


def test_the_keys_of_a_command_need_one() -> None:
    with pytest.raises(ConfigError, match=r"train\.command_per=node is for train\.command"):
        freeze_grid(["experiment=digits", "train.command_per=node", "cluster=local"])
