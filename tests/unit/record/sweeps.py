"""Sweeps as they lie on disk, written by the real writers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import parse_record, read_lines, seal
from hpc_trainer.record.spec import RunSpec, append_specs
from hpc_trainer.record.states import RunState
from hpc_trainer.record.submissions import write_confirmation, write_intent
from tests.unit.slurm.fake_slurm import uuid_of


class SweepOnDisk:
    """One sweep and what its runs, the submitter and time did to it."""

    def __init__(self, folder: Path, specs: Sequence[RunSpec]) -> None:
        folder.mkdir(parents=True)
        self.paths = SweepPaths(folder)
        self.specs = list(specs)
        append_specs(self.paths, self.specs)

    def submit(
        self, job_id: str = "500", executor: str = "slurm", *, age_s: float = 3600.0, cluster: str | None = None
    ) -> None:
        """All runs, as one array, `age_s` ago."""
        intent = write_intent(
            self.paths, executor=executor, hardware="cpu_x1", run_ids=[spec.run_id for spec in self.specs]
        )
        write_confirmation(self.paths, intent, job_id)
        shutil.rmtree(self.paths.intents)  # as older versions left it
        lines = list(read_lines(self.paths.submissions))  # without their checksums
        for line in lines[-2:]:
            line["uuid"] = uuid_of(job_id) if executor == "slurm" else line["uuid"]
            line["time"] -= age_s
            if cluster is not None:
                line["cluster"] = cluster
        self.paths.submissions.write_text("".join(seal(json.dumps(line)) + "\n" for line in lines))

    def run(self, index: int = 0) -> RunPaths:
        """The folder of one run, made if need be."""
        paths = self.paths.run(self.specs[index].run_id)
        paths.logs.mkdir(parents=True, exist_ok=True)
        return paths

    def start(
        self, index: int = 0, *, attempt: int = 0, job_id: str | None = None, executor: str = "slurm", node: str = "n1",
        pid: int = 1, resumed: int | None = None, age_s: float = 0.0, per_gpu: int = 1,
    ) -> None:  # fmt: skip
        """Rank 0 of an attempt is alive."""
        journal = Journal(self.run(index))
        journal.start(
            attempt,
            job_id=job_id or f"500_{index}",
            restart_count=attempt,
            node=node,
            pid=pid,
            executor=executor,
            world_size=1,
            per_gpu=per_gpu,
        )
        self._backdate(index, attempt, age_s)
        if resumed is not None:
            journal.resume(attempt, resumed)

    def end(
        self, index: int = 0, *, attempt: int = 0, state: RunState, cause: str, age_s: float = 0.0, **more: Any
    ) -> None:
        """The attempt told how it ended."""
        Journal(self.run(index)).end(attempt, state=state, cause=cause, **more)
        self._backdate(index, attempt, age_s)

    def _backdate(self, index: int, attempt: int, age_s: float) -> None:
        path = self.run(index).journal(attempt)
        lines = path.read_text().splitlines()
        last = parse_record(lines[-1].encode())
        last["time"] -= age_s
        path.write_text("".join(line + "\n" for line in (*lines[:-1], seal(json.dumps(last)))))

    def beat(self, index: int = 0, *, attempt: int = 0, step: int, age_s: float = 0.0, **metrics: float) -> None:
        """The run's heartbeat."""
        beat = {"attempt": attempt, "step": step, "time": time.time() - age_s, "metrics": metrics,
                "steps_per_s": 2.0, "eta_s": 30.0}  # fmt: skip
        write_json(self.run(index).heartbeat, beat)

    def done(self, index: int = 0, **metrics: float) -> None:
        """The run is complete."""
        write_json(self.run(index).result, {"metrics": metrics})
        self.mark("DONE", index)

    def mark(self, name: str, index: int = 0) -> None:
        """A marker."""
        write_json(self.run(index).marker(name), {"time": time.time()})
