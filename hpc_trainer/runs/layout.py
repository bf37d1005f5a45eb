"""Every file name of a sweep folder and of a run folder, in one place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.runs.reading import Faults, exists
from hpc_trainer.runs.shared_folder import node_name


def default_runs_dir() -> Path:
    """$HPC_TRAINER_RUNS, else ./runs."""
    return Path(os.environ.get("HPC_TRAINER_RUNS") or "runs")


OTHER_FOLDER = "For sweeps in another folder add --runs-dir FOLDER, or once: export HPC_TRAINER_RUNS=FOLDER"
"""What to do where a sweep is not found."""
SWEEP_FILES = ("specs.jsonl", "submissions.jsonl", "sweep.json")
"""What tells that a folder is a sweep's: any of them may be lost."""
_UUID, _RUN = "[0-9a-f]" * 32, f"*-{'[0-9a-f]' * 10}"
_SIGNS = (
    f"submissions/{_UUID}.json", f"slurm/{_UUID}.sh",
    f"{_RUN}/attempt-*.jsonl", f"{_RUN}/attempts.jsonl", f"{_RUN}/logs",
)  # fmt: skip


def is_run_id(name: str) -> bool:
    """True for what may be the id of a run, and so the name of its folder."""
    return _RUN_ID.fullmatch(name) is not None


_RUN_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,200}")

# The files of a run that a look at its sweep reads, beside its journals.
HEARTBEAT, RESULT, SUBMISSIONS = "heartbeat.json", "result.json", "submissions.jsonl"
RETURNED = "returned.json"
OLD_JOURNAL = "attempts.jsonl"
"""The journal of all attempts of a run, as earlier versions wrote it."""
_JOURNAL = re.compile(r"attempt-([0-9]{3,9})\.jsonl")


def journals_in(names: Iterable[str]) -> list[tuple[int, str]]:
    """Return (attempt, name) of every journal among the names of a run folder, in order.

    An old journal of all attempts comes first, as -1.
    """
    numbered = ((_JOURNAL.fullmatch(name), name) for name in names if name.startswith("attempt"))
    return sorted(
        (-1 if match is None else int(match[1]), name)
        for match, name in numbered
        if match is not None or name == OLD_JOURNAL
    )


@dataclass(frozen=True, slots=True)
class _Named:
    """What has this name in a folder: of the folder's paths an attribute."""

    name: str

    def __get__(self, paths: RunPaths | SweepPaths, kind: object) -> Path:
        return Path(paths.at(self.name))


@dataclass(frozen=True, slots=True, init=False)
class RunPaths:
    """runs/<sweep>/<run_id>/: made by the run when it starts."""

    place: str
    """The folder, as text: a look at 10,000 runs makes no 100,000 paths."""

    metrics = _Named("metrics.jsonl")
    """One line for each logged step; rank 0 appends."""
    heartbeat = _Named(HEARTBEAT)
    """Step, speed, ETA; rank 0 replaces."""
    ledger = _Named("ledger.jsonl")
    """Seconds of each kind that attempts spent; rank 0 appends."""
    allocations = _Named("allocations.json")
    """For how long Slurm gave the run's jobs their nodes; whoever learns it of the accounting replaces."""
    memory = _Named("memory.json")
    """What a rank's memory holds, after the first steps of the newest attempt; rank 0 replaces."""
    result = _Named(RESULT)
    """Final metrics; rank 0 writes once."""
    first_weights = _Named("first_weights.json")
    """What was loaded by `init_from`, and what not; rank 0 writes at the first start."""
    profile_table = _Named("profile.txt")
    """Figures, advice and the top operators of the newest profile; rank 0 replaces."""
    profile_trace = _Named("profile.trace.json.gz")
    """The newest profile for chrome://tracing or Perfetto; rank 0 replaces."""
    stragglers = _Named("stragglers.jsonl")
    """Ranks that held the others up (runs/monitoring/stragglers.py); rank 0 appends."""
    profile = _Named("profile")
    """What `hpc-trainer profile` asks of a run at work, the answers of ranks, and the profiles of ranks past 0."""
    profile_request = _Named("profile/request.json")
    """The newest of these requests; the command replaces or removes it."""
    rendezvous = _Named("rendezvous.json")
    """Where rank 0 listens for the others; rank 0 replaces."""
    checkpoints = _Named("checkpoints")
    """step-00000100/ and so on."""
    told = _Named("told")
    """Files that a program of the user's is handed to tell metrics in, and what a task of a Hydra app returned."""
    returned = _Named(f"told/{RETURNED}")
    """What the task of a Hydra app returned; its first rank writes once."""
    logs = _Named("logs")
    """attempt-000.rank-0.log and so on."""
    telemetry = _Named("telemetry")
    """attempt-000.rank-0.jsonl and so on: what devices and hosts did (`runs/monitoring/telemetry.py`)."""
    submissions = _Named(SUBMISSIONS)
    """Successor jobs of this run: intents and confirmations; rank 0's attempt appends."""
    lr_range = _Named("lr_range.svg")
    """The plot of `hpc-trainer find-lr` for this configuration; the command replaces."""
    tracker = _Named("tracker.json")
    """What of this run W&B and MLflow have; `hpc-trainer sync` replaces."""
    wandb = _Named("wandb")
    """Folders for `wandb sync`, each with steps of its own; `hpc-trainer sync` adds one."""
    wandb_work = _Named("wandb.part")
    """What `hpc-trainer sync` is writing for W&B."""
    requeue_token = _Named("requeue.json")
    """Which incarnation asked for a requeue, so that none asks twice; rank 0 replaces."""

    def __init__(self, folder: Path | str) -> None:
        object.__setattr__(self, "place", os.fspath(folder))

    @property
    def folder(self) -> Path:
        """The folder."""
        return Path(self.place)

    @property
    def run_id(self) -> str:
        """The folder's name is the run's id."""
        return self.place.rpartition("/")[2]

    def at(self, name: str) -> str:
        """What has this name in the folder, as text."""
        return f"{self.place}/{name}"

    def journal(self, attempt: int) -> Path:
        """The journal of an attempt (`state/journal.py`); its rank 0 alone writes it."""
        return Path(self.at(f"attempt-{attempt:03d}.jsonl"))

    def log(self, attempt: int, rank: int) -> Path:
        """What one rank of one attempt printed."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.log"

    def telemetry_file(self, attempt: int, rank: int) -> Path:
        """What one rank's device and host did in one attempt; that rank appends, and thins it out."""
        return self.telemetry / f"attempt-{attempt:03d}.rank-{rank}.jsonl"

    def move(self, attempt: int) -> Path:
        """Why an attempt is to come back without one of its nodes (`runs/monitoring/moves.py`)."""
        return self.telemetry / f"attempt-{attempt:03d}.move.json"

    def environment(self, attempt: int, node_rank: int = 0) -> Path:
        """What an attempt ran with (runs/monitoring/environment.py); rank 0, and the first rank of each other node."""
        node = f".node-{node_rank}" if node_rank else ""
        return self.logs / f"attempt-{attempt:03d}.environment{node}.json"

    @property
    def output(self) -> Path:
        """The folder for all that a program or a loop of the user's writes. No file of ours lies in it.

        A run that an earlier version began goes on in the run's folder itself, where the files of its program are.
        """
        return self.folder if self._is_old else Path(self.at("output"))

    @property
    def own_checkpoints(self) -> Path:
        """The folder for checkpoints that a program or a loop writes by itself; nothing of ours reads it."""
        return Path(self.at("own_checkpoints")) if self._is_old else self.output / "checkpoints"

    @property
    def _is_old(self) -> bool:
        return exists(self.at(OLD_JOURNAL), Faults()) is True

    def told_metrics(self, attempt: int) -> Path:
        """The file in which a program tells metrics of one attempt (`$HPC_TRAINER_METRICS`); the program appends."""
        return self.told / f"attempt-{attempt:03d}.jsonl"

    def program_end(self, attempt: int, rank: int) -> Path:
        """Says that the program of a rank ended well; that rank writes it, rank 0 waits for it."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.end"

    def program_worker(self, attempt: int, rank: int) -> Path:
        """Address and port at which a rank's program will listen (TF_CONFIG); that rank replaces, rank 0 reads."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.worker.json"

    def program_stop(self, attempt: int) -> Path:
        """Says that a rank's program has to stop, and so all: the first that knows writes it."""
        return self.logs / f"attempt-{attempt:03d}.stop"

    def trace(self, rank: int) -> Path:
        """What a rank's state was after each step; only of runs that `certify` starts; the rank appends."""
        return self.folder / f"trace.rank-{rank}.jsonl"

    def profile_answer(self, rank: int) -> Path:
        """What a rank has made of the newest request; that rank replaces."""
        return self.profile / f"rank-{rank}.json"

    def profile_files(self, rank: int) -> tuple[Path, Path]:
        """The table and the trace of a rank's newest profile; that rank replaces."""
        if rank == 0:
            return self.profile_table, self.profile_trace
        return self.profile / f"rank-{rank}.txt", self.profile / f"rank-{rank}.trace.json.gz"

    def memory_snapshot(self, attempt: int, rank: int) -> Path:
        """The CUDA allocator's blocks where memory was not enough; that rank writes."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.memory.json"

    def flight(self, attempt: int, rank: int) -> Path:
        """What a rank did last (`runs/monitoring/flight.py`); that rank replaces."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.flight.json"

    def failure(self, attempt: int) -> Path:
        """The first failing rank's error; whoever fails first writes once."""
        return self.logs / f"attempt-{attempt:03d}.failure.json"

    def marker(self, name: str) -> Path:
        """DONE or CANCEL."""
        return Path(self.at(name))


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """runs/<sweep>/."""

    folder: Path

    sweep = _Named("sweep.json")
    """The last grid that was submitted: command line, run ids, revision of the code."""
    specs = _Named("specs.jsonl")
    """Every frozen RunSpec, a line each; `submit` appends."""
    submissions = _Named(SUBMISSIONS)
    """Intents and confirmations; `submit` appends."""
    intents = _Named("submissions")
    """A file for each submission, which tells its elements which run they are: the copy of its lines."""
    specs_copy = _Named("submissions/specs.jsonl")
    """The lines of `specs` once more, for jobs that begin after that file is lost or damaged; `submit` appends."""
    ends = _Named("ends")
    """How jobs ended of which only Slurm's accounting knows, which forgets: a file for each host that learned of
    one."""
    old_ends = _Named("ends.jsonl")
    """The same, as sweeps of before have it: any host appended."""
    finished = _Named("finished.json")
    """Runs that are done, so that `status` need not open 10,000 folders (state/finished.py); who looks replaces it."""
    lock = _Named("submit.lock")
    """Held by the one `submit` at work."""
    sync_lock = _Named("sync.lock")
    """Held by the one `sync` at work."""
    scripts = _Named("slurm")
    """Batch scripts that submitit rendered, and what Slurm's batch shell printed."""
    local_logs = _Named("local")
    """What the local queue and its controllers printed."""
    compile_cache = _Named("compile_cache")
    """What torch.compile made, an archive for each configuration and local rank; the first run writes it."""
    pickles = _Named("pickles")
    """Tasks of Hydra apps that no command starts (hydra_apps/pickled.py); the launcher writes."""
    code = _Named("code")
    """Frozen code: an archive for each digest. Beside it its copy, if no disk of a node could hold one."""

    def at(self, name: str) -> str:
        """What has this name in the folder, as text."""
        return f"{self.folder}/{name}"

    @property
    def name(self) -> str:
        """The folder's name is the sweep's name."""
        return self.folder.name

    def intent(self, uuid: str) -> Path:
        """The copy of one submission."""
        return self.intents / f"{uuid}.json"

    @property
    def ends_of_this_host(self) -> Path:
        """The file of `ends` that this host appends to."""
        return self.ends / f"ends-{node_name()}.jsonl"

    def script(self, uuid: str) -> Path:
        """The batch script of a submission: its name tells a living sbatch from all others."""
        return self.scripts / f"{uuid}.sh"

    @property
    def is_group_readable(self) -> bool:
        """True if its folder was made for the group to read (`paths.group_readable`)."""
        return bool(self.folder.stat().st_mode & 0o040)

    @property
    def signs(self) -> list[Path]:
        """What tells that there is a sweep: its files, or, if they are all lost, what was submitted and what ran."""
        files = [path for path in (self.folder / name for name in SWEEP_FILES) if exists(path, Faults()) is not False]
        return files or [path for pattern in _SIGNS for path in self.folder.glob(pattern)]

    @property
    def exists(self) -> bool:
        """True if anything tells that there is a sweep: a file may be lost, or not to be seen just now."""
        if exists(self.folder, Faults()) is False:
            return False
        try:
            return bool(self.signs)
        except OSError:
            return True

    def requeue_request(self, job_id: str, restart_count: int) -> Path:
        """A worker's wish, where it cannot ask itself: the batch script outside requeues when it finds this file.

        It holds the run's folder: the batch script looks for the cancel marker there before it acts.
        """
        return self.scripts / f"requeue-{job_id}-{restart_count}"

    def run(self, run_id: str) -> RunPaths:
        """The folder of one run."""
        return RunPaths(f"{self.folder}/{run_id}")
