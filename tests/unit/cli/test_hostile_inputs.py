"""Values that would break a script, or run something: refused with exit 2 and nothing written, or inert words.

Each case goes the whole way: command line, fake sbatch, and the script that sbatch got under a real bash whose srun
writes down its words. A file named `pwned` appears if anything of a value was run, at submit or in the job.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import read_specs
from hpc_trainer.record.submissions import read_submissions
from tests.unit.launch.scripts import read_script
from tests.unit.slurm.fake_slurm import FakeSlurm

PAYLOADS = [
    "$(touch pwned)", "`touch pwned`", "x; touch pwned", "x\ntouch pwned\n", "x\r\ntouch pwned", "x' ; touch pwned #",
    'x" ; touch pwned #', "x && touch pwned", "x | touch pwned", "x > pwned", "x\n#SBATCH --wrap='touch pwned'",
    "--wrap=touch pwned", "--export=NONE", "-x", "x # y", "x#y", "x\x00y", "x\x1b[31my", "x\x7fy", "x\u2028touch pwned",
    "x\u202etouch pwned", "x\x85y", "%x_%j_%A", "x\\", "x\\\ny", "~/x", "~nobody-of-this-name", "*", "{a,b}", "..",
    "../x", "", " ", "é中", "x\udce9", "A" * 300, "A" * 9000, "${oc.env:HOME}", "${oc.env:NO_SUCH_VARIABLE}", "null",
]  # fmt: skip


class Case(NamedTuple):
    """Where a value is given, and the value."""

    where: str
    value: str


# Keys whose value becomes a word of a directive, or goes to the ranks: a fifth of the values each, taken in turn
# (tests/unit/config/rules/test_validate.py has more for each).
WORDS = (
    "hardware.partition", "hardware.qos", "hardware.constraint", "hardware.exclude", "hardware.gpu_type",
    "hardware.name", "cluster.account", "cluster.master_addr", "cluster.name",
)  # fmt: skip
# Keys that end up in a command or a path: every other value.
PLACES = (
    "cluster.python", "cluster.setup", "cluster.srun_args", "cluster.env.A", "sweep_name", "paths.runs_dir",
    "HPC_TRAINER_RUNS",
)  # fmt: skip
# What a person types without quoting it for Hydra, wherever it goes.
TYPED = (
    "hardware.time_limit_min=1;touch pwned", "hardware.time_limit_min=60\n#SBATCH --uid=0",
    "cluster.signal_lead_s=USR1@1", "cluster.signal_lead_s=$(touch pwned)", "hardware.num_nodes=1-9",
    "hardware.num_nodes=-1", "hardware.gpus_per_node=8 --uid=0", "hardware.gpu_request=--wrap", "seed=$(touch pwned)",
    "optim.lr=`touch pwned`", "experiment_name=x;touch pwned", "experiment_name=../../x", "hardware=../../etc/passwd",
    "model=$(touch pwned)", "+cluster.comment=x", "+hardware.comment='x\ny'", "+cluster.sbatch_args=[--wrap=id]",
    "hardware.mem_gb_per_node=60G", "cluster.array_parallelism=1%1", "cluster.array_parallelism=0",
    "cluster.env={A B: c}", "cluster.env={A;touch pwned: c}", "cluster.env={$(touch pwned): c}", "cluster.env={1A: c}",
    "cluster.srun_args=[bash,-c,touch pwned]", "cluster.srun_args=[--,sh]", "cluster.srun_args=[--multi-prog x]",
    "cluster.environment.modules=['x\n#BSUB -q x']", "cluster.environment.modules=[-x]",
    "cluster.environment.stage='/a\n#BSUB -q x'", "cluster.environment.venv=$(touch pwned)",
    "cluster.environment.container=apptainer; touch pwned", "cluster.environment.container_args=[--nv]",
    "cluster.setup=['#SBATCH --uid=0']", "cluster.setup=['#PBS -q x']", "cluster.setup=['#BSUB -q x']",
    "x y", "=x", "--script\n", "sweep_name=a,b;touch pwned", "seed=choice($(touch pwned))", "seed=glob(*)",
)  # fmt: skip
CASES = [
    *(Case(where, value) for number, where in enumerate(WORDS) for value in PAYLOADS[number % 5 :: 5]),
    *(Case(where, value) for number, where in enumerate(PLACES) for value in PAYLOADS[number % 2 :: 2]),
    *(Case("typed", value) for value in TYPED),
]


def test_there_are_enough_of_them() -> None:
    assert len(set(CASES)) == len(CASES) >= 200


def _for_hydra(value: str) -> str:
    """A value in the quotes of Hydra's grammar."""
    quoted = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", quoted) + "'"


def _arguments(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a case; long or binary values come from a file of the person's, as a site's profile does."""
    if case.where == "typed":
        return [case.value]
    section, _, key = case.where.partition(".")
    if case.where == "HPC_TRAINER_RUNS":
        # An environment cannot hold NUL; what it holds is under this test's folder.
        monkeypatch.setenv("HPC_TRAINER_RUNS", f"{folder}/runs/{case.value.replace(chr(0), chr(1))}")
        return []
    if case.where in ("paths.runs_dir", "sweep_name"):
        value = f"{folder}/runs/{case.value}" if key and case.value[:1] != "~" else case.value
        return [f"{case.where}={_for_hydra(value)}"]
    content: dict[str, object] = {"name": "site"}
    content[key.partition(".")[0]] = {"A": case.value} if key == "env.A" else case.value
    if key in ("setup", "srun_args"):
        content[key] = [case.value]
    profile = {"cluster": {"executor": "slurm"}, "hardware": {"gpus_per_node": 2}}[section]
    path = folder / "site" / section / "site.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**profile, **content}))
    return ["--config-dir", str(folder / "site"), f"{section}=site"]


@pytest.fixture
def give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[list[str]], tuple[int, str]]]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(home)

    def run(argv: list[str]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
        try:
            main()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        out = capsys.readouterr()
        return code, out.out + out.err

    yield run
    assert not (home / "pwned").exists()


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _is_sampled(case: Case) -> bool:
    """Return True for one place of each value in a command or a path, and for two values of each directive's word."""
    if case.where in PLACES:
        number = PAYLOADS.index(case.value)
        given = PLACES[number % 2 :: 2]
        return case.where == given[number // 2 % len(given)]
    if case.where in WORDS:
        return PAYLOADS.index(case.value) // 5 % 4 == WORDS.index(case.where) % 4
    return True


@pytest.mark.few(30)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{number}-{case.where}", marks=() if _is_sampled(case) else pytest.mark.long)
        for number, case in enumerate(CASES)
    ],
)
def test_refused_or_inert(
    case: Case, tmp_path: Path, fake_slurm: FakeSlurm, give: Callable[[list[str]], tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arguments = _arguments(case, tmp_path, monkeypatch)
    cluster = [] if any(each.startswith("cluster=") for each in arguments) else ["cluster=slurm"]
    before = _tree(tmp_path)
    code, said = give(["submit", *arguments, *cluster])
    assert not [char for char in said if unicodedata.category(char) in ("Cc", "Cs") and char != "\n"], (
        "a message plays no tricks on the terminal"
    )
    if code:
        assert code == 2, said
        assert "error: " in said.lower()
        assert "Traceback" not in said
        assert _tree(tmp_path) == before, "nothing is written"
        return
    (path,) = fake_slurm.folder.glob("script-*.sh")
    script = path.read_text(encoding="utf-8")
    found = read_script(script)
    sweep = SweepPaths(found.sweep_dir)
    (spec,), (intent,) = read_specs(sweep).values(), read_submissions(sweep)
    assert (found.flags["comment"], intent.job_id, found.flags["array"]) == (intent.uuid, "101", "0-0%1")
    assert tmp_path in sweep.folder.resolve().parents, "the test stays in its folder"
    assert found.shape == spec.shape
    assert found.setup == spec.config["cluster"]["setup"]
    assert found.srun_args == spec.config["cluster"]["srun_args"]
    if case.where != "cluster.setup":  # shell by intention
        words = _words_of_srun(script, tmp_path)
        assert words[-len(found.command) :] == found.command
        assert words[words.index("--sweep-dir") + 1] == str(sweep.folder)
        assert words[words.index("--") - len(found.srun_args) : words.index("--")] == found.srun_args
    assert _landed(case, spec.config, found.sweep_dir)


def _words_of_srun(script: str, folder: Path) -> list[str]:
    """The words that bash hands to srun."""
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (folder / "bin" / "srun").chmod(0o755)
    environ = {"PATH": f"{folder}/bin:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "1", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["bash", "-s"], input=script.encode(), env=environ, cwd=folder / "home", check=True, capture_output=True
    )
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


def _landed(case: Case, config: dict[str, dict[str, object]], sweep_dir: Path) -> bool:
    """True if the value that was accepted is the value that was frozen: accepted, and then lost, proves nothing."""
    section, _, key = case.where.partition(".")
    if case.where in ("typed", "sweep_name", "paths.runs_dir", "HPC_TRAINER_RUNS") or "${" in case.value:
        return sweep_dir.is_dir()
    if key in ("setup", "srun_args"):
        return config[section][key] == [case.value]
    if key == "env.A":
        return config[section]["env"] == {"A": case.value}
    return config[section][key] in (case.value, None)
