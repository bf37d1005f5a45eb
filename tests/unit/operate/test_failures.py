"""The corpus of failures: runs that really failed, recorded once, each with the reason that `why` must name.

tests/integration/failures/test_failing_programs.py and tests/slurm/test_failures.py record it (failures.jsonl has a
line for each run: its files, and what Slurm answered).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.operate.verdicts import MAY_PASS
from hpc_trainer.operate.why import NOT_KNOWN, Why, explain
from hpc_trainer.record.signs import SIGNS
from hpc_trainer.record.status import read_status
from hpc_trainer.record.tracebacks import sign_of, with_causes
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm

CORPUS = [json.loads(line) for line in Path(__file__).with_name("failures.jsonl").read_text().splitlines()]
LEAST, RIGHT = 60, 0.95
_PLACE = re.compile(r"(/\S+?):(\d+): (.*)")


def _laid_out(record: dict[str, Any], folder: Path, slurm: FakeSlurm, *overrides: str) -> SweepOnDisk:
    """The recorded run in a sweep of its own."""
    sweep = SweepOnDisk(folder, make_specs(1, *(overrides or record["overrides"])))
    answers = record.get("answers", {})
    for name in ("squeue", "sacct"):
        slurm.answer(name, answers.get(name, ""))
    journal = record["files"].get("attempt-000.jsonl", "").partition("\n")[0]
    began = json.loads(journal)["time"] if journal else time.time()
    age_s = time.time() - began + 60.0  # it was submitted before it began, however long ago that was
    sweep.submit("500" if answers else "local-1", executor="slurm" if answers else "local", age_s=age_s)
    for name, text in record["files"].items():
        path = sweep.paths.scripts / name.partition("/")[2] if name.startswith("slurm/") else sweep.run().folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sweep


def _why(sweep: SweepOnDisk) -> Why:
    status = read_status(sweep.paths)
    return explain(status, status.runs[0])


@pytest.fixture(scope="module")
def found() -> dict[str, Why]:
    """The explanation of each recorded run, as the tests before have left it."""
    return {}


@pytest.mark.few(15)
@pytest.mark.parametrize("record", CORPUS, ids=lambda record: record["case"])
def test_each_recorded_failure_is_explained(
    record: dict[str, Any], found: dict[str, Why], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """No answer is wrong, and each names the file and the line that it rests on."""
    sweep = _laid_out(record, tmp_path / "runs" / "sweep", fake_slurm)
    why = found[record["case"]] = _why(sweep)
    assert why.diagnosis in (record["label"], NOT_KNOWN), why
    if "again" in record and record["again"] != "either":  # what the label says of a repetition
        assert (MAY_PASS.says in why.verdict) is (record["again"] == "may_pass"), why
    places = [match for line in why.evidence if (match := _PLACE.fullmatch(line)) is not None]
    if why.state.has_failed and any(name.endswith(".log") for name in record["files"]) and not _is_silent(record):
        assert places, why.evidence
    for match in places:
        assert match[3].removesuffix("…") in Path(match[1]).read_text(errors="replace").splitlines()[int(match[2]) - 1]


def _is_silent(record: dict[str, Any]) -> bool:
    """True if the program printed nothing that could be pointed at."""
    return record["case"] in ("silent", "exit_3")


def test_the_corpus_is_large_and_nearly_all_of_it_is_known(found: dict[str, Why]) -> None:
    if len(found) < len(CORPUS):
        pytest.skip("only after all cases above")
    assert len(CORPUS) >= LEAST
    right = [record["case"] for record in CORPUS if found[record["case"]].diagnosis == record["label"]]
    assert len(right) >= RIGHT * len(CORPUS), sorted({record["case"] for record in CORPUS} - {*right})


_COMMAND = re.compile(r"hpc-trainer [a-z].*?(?=$|[;`()?]|: |, | \(| and | if | shows | says |\.$)")
_READS = ("logs", "why", "status", "results", "advise", "plan", "sweeps")


def commands_in(advice: list[str]) -> list[str]:
    """The commands of hpc-trainer that advice names, `a && b` as two."""
    joined = [match.group() for line in advice for match in _COMMAND.finditer(line)]
    return [part.strip() for command in joined for part in command.split("&&")]


@pytest.mark.long
def test_every_advised_command_runs(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run one advised command of each form: commands that read, and commands that retry, which reach sbatch."""
    run = _runner(monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    seen: set[str] = set()
    for number, record in enumerate(CORPUS):
        if record.get("answers"):
            continue
        folder = tmp_path / f"runs-{number}"
        sweep = _laid_out(record, folder / "sweep", fake_slurm, "cluster=slurm", "snapshot=off")
        for command in commands_in(_why(sweep).advice):
            words = shlex.split(command)[1:]
            form = re.sub(r"=\S+", "", " ".join(words).replace(sweep.specs[0].run_id, "RUN"))
            if form in seen or words[0] == "submit":  # a whole command line, which nobody can know here
                continue
            seen.add(form)
            monkeypatch.setenv("HPC_TRAINER_RUNS", str(folder))
            code, output = run(*words)
            assert code == 0, (command, output)
    assert {form.split()[0] for form in seen} >= {"logs", "retry"}
    assert any("hardware.exclude" in form for form in seen)


def _runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    def run(*words: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *words])
        capsys.readouterr()
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
        else:
            code = 0
        out = capsys.readouterr()
        return code, out.out + out.err

    return run


def test_every_sign_has_a_name_of_its_own_and_says_what_to_do() -> None:
    assert len({sign.name for sign in SIGNS}) == len(SIGNS)
    for sign in SIGNS:
        assert sign.advice, sign.name
        assert set(re.findall(r"\{(\w+)\}", "".join(sign.advice))) <= {
            "run", "found", "memory", "logs", "node", "exclude",
        }  # fmt: skip


def test_what_was_printed_before_the_error_is_not_its_cause() -> None:
    traceback = ["Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    f()"]
    assert sign_of(["FileNotFoundError: [Errno 2] No such file or directory: 'x'", *traceback, "ValueError: 7"]) is None
    assert sign_of(["UserWarning: No space left on device", "exit"]) is None
    cause = [*traceback, "FileNotFoundError: [Errno 2] No such file or directory: 'x'", ""]
    direct = "The above exception was the direct cause of the following exception:"
    sign = sign_of([*cause, direct, "", *traceback, "RuntimeError: cannot open"])
    assert sign is not None
    assert sign.name == "missing_file"
    elastic = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    sign = sign_of([*traceback, "torch.OutOfMemoryError: CUDA out of memory.", *traceback, elastic])
    assert sign is not None
    assert sign.name == "gpu_memory"


def test_the_last_lines_of_a_program_without_a_traceback() -> None:
    lines = [f"line {number}" for number in range(5)]
    assert with_causes([], 3) == []
    assert with_causes(lines, 3) == lines[-3:]
    assert with_causes(lines, 5) == with_causes(lines, 9) == lines


_CHAIN = """
def resolve(depth):
    if depth:
        resolve(depth - 1) if depth % 2 else [resolve(depth - 1)]
        return
    try:
        try:
            {}["name"]
        except KeyError:
            import no_such_module
    except ImportError as error:
        raise RuntimeError("the target does not load") from error

try:
    resolve(15)
except RuntimeError as error:
    raise ValueError("the error that the app prints") from error
"""


def test_the_error_at_the_bottom_of_a_long_chain_counts() -> None:
    """Hydra raises its own error for a module that is missing, three tracebacks below the first."""
    done = subprocess.run([sys.executable, "-c", _CHAIN], capture_output=True, text=True, check=False)
    lines = [
        "Traceback (most recent call last):",
        "OSError: an earlier error",
        "",
        "all is well",
        *done.stderr.splitlines(),
    ]
    assert sign_of(lines[-8:]) is None
    kept = with_causes(lines, 8)
    assert kept[-8:] == lines[-8:]
    cause = "The above exception was the direct cause of the following exception:"
    assert kept[:-8] == [lines[0], "ModuleNotFoundError: No module named 'no_such_module'", cause, lines[0]]
    sign = sign_of(kept)
    assert sign is not None
    assert (sign.name, sign.matched) == ("missing_module", "no_such_module")


def test_the_rank_that_came_late_to_a_collective_is_named() -> None:
    says = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE) ran for 9"
    tells = "[PG ID 0 Rank {}] Exception detected by watchdog at work: 8, last enqueued NCCL work: {}, last completed"
    lines = [line for rank in range(3) for line in (says.format(rank), tells.format(rank, 8 if rank == 2 else 11))]
    sign = sign_of(lines)
    assert sign is not None
    assert sign.says.endswith("rank 2 was behind the others")
    sign = sign_of([line for line in lines if "Rank 2" not in line])
    assert sign is not None
    assert "behind" not in sign.says, "the two that tell are alike: no guess"


def test_a_node_that_failed_in_another_sweep_is_remembered(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    record = next(record for record in CORPUS if record["case"] == "xid_79")
    first, second = (_laid_out(record, tmp_path / "runs" / name, fake_slurm) for name in ("one", "two"))
    why = _why(first)
    assert not any("within 30 days" in line for line in why.evidence), "once is no pattern"
    _why(first)
    why = _why(second)
    (line,) = [line for line in why.evidence if "within 30 days" in line]
    assert "failed 2 times" in line, "a second look at the same failure is no second failure"
    assert f"one/{first.specs[0].run_id}" in line
    assert "hardware.exclude=" in line
    (folder,) = (tmp_path / "runs").glob(".nodes-*")
    for path in folder.iterdir():
        path.chmod(0o666)
    assert not any("within 30 days" in line for line in _why(second).evidence), "others may have written these"


def test_a_node_is_remembered_under_any_umask(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    record = next(record for record in CORPUS if record["case"] == "ecc")
    before = os.umask(0o002)
    try:
        sweeps = [_laid_out(record, tmp_path / "runs" / name, fake_slurm) for name in ("one", "two")]
        for path in (tmp_path / "runs").rglob("*"):
            path.chmod(path.stat().st_mode & ~0o022)
        whys = [_why(sweep) for sweep in sweeps]
    finally:
        os.umask(before)
    assert any("failed 2 times" in line for line in whys[1].evidence)
