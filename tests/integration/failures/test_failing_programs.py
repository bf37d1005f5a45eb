"""Programs that really fail, each for a known reason that `why` names; the corpus of the unit tests is made of them."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.failures.test_watchdog import DATA, WORDS
from tests.programs.failing import BLIND, CGROUPS, LABELS, SAYS
from tests.starting_points import PROGRAMS

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

ROOT = Path(__file__).parents[3]
CORPUS = ROOT / "tests" / "unit" / "operate" / "failures.jsonl"


def plain(text: str) -> str:
    """A recorded text without the names of this machine, and without checksums, which would no longer fit."""
    text = re.sub(r"/tmp/(?:pytest-of|hpc_trainer)-[^\"\s\\]*?/(?=(?:failing|train)\.py)", "/home/anna/project/", text)
    text = re.sub(r"/tmp/pytest-of-[^\"\s:\\]*", "/home/anna/project", text)  # no backslash: that of a quote in JSON
    text = re.sub(r"/[^\"\s:\\]*/slurm_script", "/var/spool/slurmd/job7/slurm_script", text)
    for prefix in {sys.prefix, sys.base_prefix, str(Path(pytest.__file__).parents[4])}:
        text = text.replace(prefix, "/home/anna/env")
    text = text.replace(f"{ROOT}/", "/home/anna/project/")  # after its environment, which may be in it
    text = text.replace(f'"{platform.node()}"', '"node1"').replace(f'"{platform.node()}:', '"node1:')
    return re.sub(r', "crc": "[0-9a-f]{8}"\}', "}", text)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_why_names_the_reason_of_each(local: LocalDriver) -> None:
    """With HPC_TRAINER_UPDATE_GOLDEN=1 the corpus is recorded anew."""
    for name in ("failing.py", "blind_failures.txt"):
        (local.folder / name).write_bytes((PROGRAMS / name).read_bytes())
    labels = {case: label for case, label in LABELS.items() if case != "cgroup" or os.access(CGROUPS, os.W_OK)}
    process = local.start(
        "submit", "--command", "python failing.py {params.case}", f"params.case={','.join(labels)}", "sweep_name=bad",
        "cluster=local", "monitor.heartbeat_every_s=0", "--wait",
    )  # fmt: skip
    process.communicate(timeout=1700)
    runs = {run["run_id"]: run for run in local.json("why", "bad")["runs"]}
    cases = {run["axes"]["params.case"]: run["run_id"] for run in local.json("status", "bad")["runs"]}
    found = {case: runs[run_id]["diagnosis"] for case, run_id in cases.items()}
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN"):
        records = [_record(local.runs / "bad" / run_id, case, labels[case]) for case, run_id in cases.items()]
        kept = [json.loads(line) for line in CORPUS.read_text().splitlines()] if CORPUS.exists() else []
        records += [record for record in kept if record["case"] not in labels]
        CORPUS.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert found == labels


@pytest.mark.long
@pytest.mark.dist
def test_why_names_the_reason_of_runs_that_train(local: LocalDriver) -> None:
    """A run whose gradients are NaN, and one with a rank that hangs. They join the corpus as above."""
    (local.folder / "standing.py").write_text(DATA)
    sweeps = {
        "diverged": ("experiment=digits", "cluster=local", "optim=sgd", "optim.lr=1e10", "train.num_steps=100"),
        "stuck": (*WORDS, "+data.kwargs.how=hangs", "--trust", "standing"),
    }
    records = []
    for label, words in sweeps.items():
        assert local.run("submit", *words, f"sweep_name={label}", "--wait", check=False).returncode == 1
        assert local.json("why", label)["diagnosis"] == label
        record = _record(local.run_folder(label), label, label)
        records.append({**record, "source": "tests/integration/failures/test_failing_programs.py"})
    if os.environ.get("HPC_TRAINER_UPDATE_GOLDEN"):
        kept = [line for line in CORPUS.read_text().splitlines() if json.loads(line)["case"] not in sweeps]
        CORPUS.write_text("".join(f"{line}\n" for line in (*kept, *map(json.dumps, records))))


def _record(folder: Path, case: str, label: str) -> dict[str, object]:
    files = {name: plain((folder / name).read_text()) for name in ("attempt-000.jsonl", "logs/attempt-000.rank-0.log")}
    source = SAYS[case][1] if case in SAYS else BLIND[case].source if case in BLIND else ""
    again = {"again": BLIND[case].again} if case in BLIND else {}
    return {
        "case": case, "label": label, **again, "source": source or "tests/programs/failing.py",
        "overrides": ["cluster=local"], "files": files,
    }  # fmt: skip
