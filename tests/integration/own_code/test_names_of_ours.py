"""A program may use every name: none of its files is taken for one of ours, and none of ours is in its folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_trainer.record.layout import OLD_JOURNAL, RunPaths, SweepPaths
from tests.journals import journal_records
from tests.seeds import chosen_seed
from tests.starting_points import PROGRAMS

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

MARKERS = ("DONE", "CANCEL", "HOLD")


def _names(folder: Path) -> list[str]:
    """Return every name that hpc_trainer has for something in the folder of a run or of a sweep."""
    run = RunPaths(folder)
    attributes = [*vars(RunPaths).values(), *vars(SweepPaths).values()]
    named = [each.name for each in attributes if isinstance(getattr(each, "name", None), str)]
    of_attempt = [
        run.journal(0), run.log(0, 0), run.logged_metrics(0), run.failure(0), run.program_end(0, 0),
        run.program_stop(0), run.environment(0), run.telemetry_file(0, 0), run.move(0), run.trace(0), run.flight(0, 0),
        run.own_checkpoints, run.profile_answer(0), run.checkpoints / "step-00000002" / "manifest.json",
    ]  # fmt: skip
    return sorted({*MARKERS, OLD_JOURNAL, *named, *(str(path.relative_to(folder)) for path in of_attempt)})


def _stands(local: LocalDriver, sweep: str) -> dict[str, tuple[Any, ...]]:
    """Return what hpc_trainer says of each run, by its exit code: all but what differs from play to play."""
    stands = {}
    metrics = {row["run_id"]: {key: row.get(key) for key in ("loss", "state")} for row in local.json("results", sweep)}
    for run in local.json("status", sweep)["runs"]:
        why = local.json("why", run["run_id"], "--sweep", sweep)
        code = run["axes"]["params.code"]
        stands[str(code)] = (
            run["state"], run["step"], run["cause"], metrics[run["run_id"]], why["verdict"], why["cause"],
        )  # fmt: skip
    return stands


@pytest.mark.long
@pytest.mark.parametrize("more", range(8))
@pytest.mark.parametrize("folder", ["run", "null"])
def test_a_program_that_takes_every_name_of_ours_changes_nothing(local: LocalDriver, more: int, folder: str) -> None:
    seed = chosen_seed() + more
    shutil.copy(PROGRAMS / "hostile.py", local.folder)
    names = local.folder / "names.json"
    names.write_text(json.dumps(_names(local.folder / "x")))
    words = (
        "params.code=0,1,75", f"train.command_dir={folder}", "monitor.heartbeat_every_s=0", "cluster=local", "--wait",
    )  # fmt: skip
    for sweep, number in (("quiet", 0), ("hostile", seed)):
        command = f"python hostile.py {number} {{params.code}} {names}"
        local.run("submit", "--command", command, *words, f"sweep_name={sweep}", check=False)
    quiet, hostile = (_stands(local, sweep) for sweep in ("quiet", "hostile"))
    assert quiet["0"][0] == "COMPLETED"
    assert quiet["1"][0] == "FAILED"
    assert hostile == quiet, f"seed {seed}"
    outputs = [path for path in (local.folder / "runs" / "hostile").glob("*/output") if any(path.iterdir())]
    assert len(outputs) == 3, "the program did write"
    for output in outputs:
        assert len(journal_records(output.parent, "start")) == 1


def test_no_program_is_handed_a_path_to_files_of_ours(local: LocalDriver) -> None:
    """Its arguments and environment name the output folder and the file for metrics, and nothing else of the run."""
    (local.folder / "tell.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv, dict(os.environ), os.getcwd()]))\n"
    )
    command = "python tell.py {run.dir} {run.checkpoints} {run.id}"
    local.train("--command", command, "train.command_dir=run", "sweep_name=told")
    run = local.run_folder("told")
    log = (run / "logs" / "attempt-000.rank-0.log").read_text()
    (line,) = [line for line in log.splitlines() if line.startswith('[["')]
    argv, environ, cwd = json.loads(line)
    texts = [*argv, *environ.values(), cwd]
    handed = {word for text in texts for word in text.split(os.pathsep) if word.startswith(str(local.folder / "runs"))}
    assert handed - {str(local.folder / "runs")} == {
        str(run / "output"), str(run / "output" / "checkpoints"), str(run / "told" / "attempt-000.jsonl"),
    }  # fmt: skip
