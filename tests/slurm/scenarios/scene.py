"""One scenario's run on a real Slurm: its gates, its story so far, and what tests do to it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.record.checkpoint_folders import committed
from hpc_trainer.record.metrics import SPEED
from tests.journals import JOURNALS, journal_records
from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster
from tests.slurm.testbed.spec import NODES

NUM_STEPS, SAVED_EVERY = 200, 50
WORDS = (
    "experiment=digits", "data=custom", "data._target_=gated.build", "model=custom", "model._target_=gated.Net",
    "--trust", "gated", f"train.num_steps={NUM_STEPS}", "train.eval_every_steps=100", "train.grad_accum_steps=2",
    f"checkpoint.every_steps={SAVED_EVERY}", "monitor.log_every_steps=10", "monitor.heartbeat_every_s=0.05",
    "snapshot=off",
)  # fmt: skip
RANKS = {"testbed_x1": 1, "testbed_x4": 4}
# Seconds a batch, two batches a step: 200 steps take some ten seconds, so there is a middle to disturb.
PACE_S = 0.02
# Importing torch in four ranks takes two busy cores 15 s; the rest is margin, waited out on failure only.
PATIENCE_S = 180.0
_WORKLOADS = tuple(Path(__file__).with_name(name) for name in ("gated.py", "counter.py"))


@dataclass(frozen=True)
class Run:
    """One run's folder, read as it grows."""

    folder: Path
    job_id: str
    seed: int

    def records(self, event: str) -> list[dict[str, Any]]:
        """The journal's records of one kind, in order."""
        return journal_records(self.folder, event)

    @property
    def heartbeat(self) -> dict[str, Any]:
        """The newest sign of life; {} before the first."""
        path = self.folder / "heartbeat.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what differs from start to start: times and speeds."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        varying = {"time", *SPEED}
        return [{k: v for k, v in json.loads(line).items() if k not in varying} for line in lines]

    @property
    def final_state(self) -> bytes:
        """The bytes of weights, optimizer and scaler in the newest checkpoint; of a program what it saved itself."""
        own = self.folder / "output" / "checkpoints" / "state.json"
        if own.exists():
            return own.read_bytes()
        newest = max(path for path in (self.folder / "checkpoints").glob("step-*") if path.name[5:].isdecimal())
        return (newest / "state.safetensors").read_bytes()

    @property
    def is_done(self) -> bool:
        """The run wrote that it is complete."""
        return (self.folder / "DONE").exists()


@dataclass
class Scene:
    """A run (or an array of some) of the gated training, and the things that can happen to it."""

    slurm: SlurmCluster
    folder: Path
    hardware: str
    runs: list[Run] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    """Attempt of the first run -> the step that later attempts must not begin before."""
    words: tuple[str, ...] = ()
    is_program: bool = False
    """True if the runs are of a program (counter.py) and not of the shared loop."""
    echoes: int = 0
    """Starts of a job whose run was complete already."""

    def __post_init__(self) -> None:
        self.gates.mkdir()
        for workload in _WORKLOADS:
            shutil.copy(workload, self.folder)

    @property
    def driver(self) -> Driver:
        """The command line in this scene's folder."""
        return Driver(self.slurm, self.folder)

    @property
    def gates(self) -> Path:
        """Where the training looks for gates."""
        return self.folder / "gates"

    @property
    def run(self) -> Run:
        """The only run, or the first."""
        return self.runs[0]

    @property
    def num_ranks(self) -> int:
        """Ranks of each run."""
        return RANKS[self.hardware]

    @property
    def _program_words(self) -> tuple[str, ...]:
        command = f"{sys.executable} counter.py {self.gates} {{seed}} {NUM_STEPS} {SAVED_EVERY}"
        return ("--command", command, "monitor.heartbeat_every_s=0.05", "snapshot=off")

    # Given

    def block(self) -> int:
        """All nodes are taken by a job of higher priority; its id."""
        blocker = self.slurm.preempt()
        self.slurm.wait_for_state(blocker, "RUNNING")
        return blocker

    def submit(self, *words: str, partition: str = "main", pace_s: float = PACE_S, seeds: Sequence[int] = (0,)) -> Run:
        """Submits one run a seed, as one array."""
        (self.gates / "pace_s").write_text(str(pace_s))
        axes = f"seed={','.join(map(str, seeds))}"
        what = self._program_words if self.is_program else WORDS
        self.words = (*what, f"hardware={self.hardware}", axes, f"hardware.partition={partition}", *words)
        answer = self.driver.submit(*self.words, "sweep_name=scene")
        (array,) = answer["arrays"]
        assert (answer["submitted"], array["runs"]) == (len(seeds), len(seeds)), answer
        sweep = self.driver.runs / "scene"
        specs = [json.loads(line) for line in (sweep / "specs.jsonl").read_text().splitlines()]
        jobs = array["slots"] or len(seeds)
        self.runs = [
            Run(sweep / spec["run_id"], f"{array['job_id']}_{index % jobs}", seed)
            for index, (spec, seed) in enumerate(zip(specs, seeds, strict=True))
        ]
        return self.run

    def submit_again(self, *words: str) -> dict[str, Any]:
        """The same command again: what a person does to bring a run back."""
        answer: dict[str, Any] = self.driver.submit(*self.words, "sweep_name=scene", *words)
        return answer

    def follow_job(self) -> None:
        """From now on the run is the job that `status` names."""
        self.runs = [Run(self.run.folder, self.driver.only_run("scene")["job_id"], self.run.seed)]

    # Waiting

    def wait_for(self, holds: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Polls; on time-out shows the journals and what the ranks wrote."""
        try:
            self.slurm.wait_for(holds, timeout_s + self.slurm.cache_age_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from error

    def wait_for_step(self, step: int, attempt: int = 0, run: Run | None = None) -> None:
        """Until an attempt has come as far as `step`; asks Slurm nothing."""
        of = run or self.run

        def reached() -> bool:
            beat = of.heartbeat
            return bool(beat) and beat["attempt"] >= attempt and beat["step"] >= step

        self.wait_for(reached, f"step {step} of attempt {attempt}")

    def wait_for_start(self, attempt: int) -> None:
        """Until the journal has this attempt."""
        self.wait_for(lambda: len(self.run.records("start")) > attempt, f"the start of attempt {attempt}")

    def wait_for_end(self, attempt: int, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Until the journal says how this attempt ended; the record."""

        def ended() -> bool:
            return any(record["attempt"] == attempt for record in self.run.records("end"))

        self.wait_for(ended, f"the end of attempt {attempt}", timeout_s)
        return next(record for record in self.run.records("end") if record["attempt"] == attempt)

    def wait_for_job(self, *states: str, run: Run | None = None, timeout_s: float = PATIENCE_S) -> None:
        """Until Slurm says one of these words of the run's job."""
        job_id = (run or self.run).job_id
        self.wait_for(lambda: self.slurm.job_state(job_id) in states, f"job {job_id}: {'/'.join(states)}", timeout_s)

    def wait_until_done(self, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Until every run wrote that it is complete."""
        self.wait_for(lambda: all(run.is_done for run in self.runs), "DONE", timeout_s)

    def row_when(self, holds: Callable[[dict[str, Any]], bool], run: Run | None = None) -> dict[str, Any]:
        """Return the row of `status` once it is as wanted: at once, or when the login shell's client may still be late.

        After that time the row is returned as it is.
        """
        name, deadline = (run or self.run).folder.name, time.monotonic() + self.slurm.cache_age_s
        while True:
            row = self.driver.status("scene")[name]
            if holds(row) or time.monotonic() >= deadline:
                return row
            time.sleep(1)

    def check_shown(self, *states: str) -> None:
        """`status` shows the run in one of the states, as soon as it can know."""
        row = self.row_when(lambda row: row["state"] in states)
        assert row["state"] in states, row

    # Gates

    def close(self, gate: str) -> None:
        """Whoever comes to this gate from now on waits."""
        for old in (*self.gates.glob(f"{gate}.rank-*"), *self.gates.glob(f"{gate}.signalled-*")):
            old.unlink()
        (self.gates / f"{gate}.closed").touch()

    def wait_at(self, gate: str, ranks: int | None = None) -> None:
        """Until all ranks (or so many) stand before the closed gate."""
        wanted = self.num_ranks if ranks is None else ranks
        self.wait_for(
            lambda: len(list(self.gates.glob(f"{gate}.rank-*"))) >= wanted, f"{wanted} ranks at the gate {gate}"
        )

    def wait_for_signal(self, gate: str) -> None:
        """Until a stop signal has reached all ranks that stand before the closed gate: scancel does not wait for it."""
        wanted = len(list(self.gates.glob(f"{gate}.rank-*")))
        self.wait_for(
            lambda: len(list(self.gates.glob(f"{gate}.signalled-*"))) >= wanted, f"the signal at the gate {gate}"
        )

    def open(self, gate: str) -> None:
        """Lets them pass."""
        (self.gates / f"{gate}.closed").unlink()

    def full_speed(self) -> None:
        """No pace from now on."""
        (self.gates / "pace_s").unlink(missing_ok=True)

    # When

    def note(self) -> None:
        """Remembers what the run may not lose: its newest checkpoint, of a program all but a checkpoint interval.

        A checkpoint is written in the background: on a busy machine that took 7.7 s, and 83 steps.
        """
        beat = self.run.heartbeat
        if beat:
            saved = max((step for step, _ in committed(self.run.folder / "checkpoints")), default=0)
            self.seen[beat["attempt"]] = beat["step"] - SAVED_EVERY if self.is_program else saved

    def preempt(self) -> int:
        """A job of higher priority wants all nodes; its id."""
        self.note()
        return self.slurm.preempt(NODES)

    def signal(self, name: str, run: Run | None = None) -> None:
        """`scancel --signal`: to every task of the job."""
        self.note()
        self.slurm.run("scancel", f"--signal={name}", (run or self.run).job_id)

    def requeue(self, job_id: str | None = None) -> None:
        """`scontrol requeue`, as a person or an administrator gives it."""
        self.note()
        self.slurm.run("scontrol", "requeue", job_id or self.run.job_id)

    def cancel(self, run: Run | None = None) -> None:
        """A plain scancel: no marker of ours."""
        self.note()
        self.slurm.run("scancel", (run or self.run).job_id)

    def pid_of(self, rank: int) -> int:
        """The process of one rank of the only run."""
        (lock,) = self.gates.glob(f"run-*.rank-{rank}.lock")
        return int(lock.read_text())

    def start_now(self, run: Run | None = None) -> None:
        """The requeued job starts in two seconds instead of two minutes.

        But not beside what the last start left on the nodes: slurmd would refuse it and Slurm drain the node
        ("Duplicate jobid"). The usual two minutes are for this.
        """
        which = run or self.run
        self.wait_for_job("PENDING", run=which)
        if len(self.runs) == 1:
            self.wait_for(lambda: self.slurm.job_processes() == [], "the end of the last start's processes")
        self.slurm.start_now(which.job_id)

    def come_back(self, run: Run | None = None) -> None:
        """The requeued job starts in two seconds, and trains at full speed."""
        self.full_speed()
        self.start_now(run)

    def nodes_of_job(self) -> list[str]:
        """The virtual nodes of the run's job, first one first."""
        hosts = self.slurm.job(self.run.job_id)["NodeList"]
        return self.slurm.run("scontrol", "show", "hostnames", hosts).stdout.split()

    # Looking

    def queue(self) -> list[str]:
        """`<job id> <state>` of the runs' jobs that wait or work."""
        lines = self.slurm.run("squeue", "-h", "-r", "-o", "%j %i %T").stdout.splitlines()
        return [line.split(None, 1)[1] for line in lines if line.startswith("scene-")]

    def story(self) -> str:
        """Journals, what Slurm says, and the ends of the logs."""
        parts = [f"at {time.strftime('%H:%M:%S')}"]
        for run in self.runs:
            journals = "".join(path.read_text() for path in sorted(run.folder.glob(JOURNALS)))
            parts.append(f"--- {run.job_id} {run.folder.name}\n{journals}")
            shown = self.slurm.run("scontrol", "show", "job", "-o", run.job_id, check=False)
            parts.append(shown.stdout[:1500] + shown.stderr)
        left = [f"{pid} {_command_of(pid)}" for pid in self.slurm.job_processes()]
        return "\n".join([*parts, "--- processes of jobs", *left, self.driver.all_logs()])


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:300]
    except OSError:
        return "(ended)"
