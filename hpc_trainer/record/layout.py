"""Paths of all files in a sweep's folder and in a run's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.record.files import node_name
from hpc_trainer.record.reading import Faults, exists


def default_runs_dir() -> Path:
    """Return $HPC_TRAINER_RUNS, or ./runs if it is not set."""
    return Path(os.environ.get("HPC_TRAINER_RUNS") or "runs")


OTHER_FOLDER = "For sweeps in another folder add --runs-dir FOLDER, or once: export HPC_TRAINER_RUNS=FOLDER"
"""Advice for messages about a sweep that is not found."""
SWEEP_FILES = ("specs.jsonl", "submissions.jsonl", "sweep.json")
"""Files that identify the folder of a sweep; any of them may be lost."""
TRASH = ".trash-"
"""Beginning of the name of a folder that is being deleted."""
_NAMED = 3
_UUID, _RUN = "[0-9a-f]" * 32, f"*-{'[0-9a-f]' * 10}"
_SIGNS = (
    f"submissions/{_UUID}.json", f"slurm/{_UUID}.sh",
    f"{_RUN}/attempt-*.jsonl", f"{_RUN}/attempts.jsonl", f"{_RUN}/logs",
)  # fmt: skip


def sweep_folder(runs_dir: Path, name: str) -> Path:
    """Return the folder of the sweep with this name; for a name from before a `rename`, the folder that it became.

    `rename` leaves a symbolic link to the new name, which may be renamed again. Other links are not followed.
    """
    folder = runs_dir / name
    for _ in range(_MOST_RENAMES):
        try:
            is_link = folder.is_symlink() and folder.lstat().st_uid in (os.getuid(), 0)
            target = str(folder.readlink()) if is_link else ""
        except OSError:
            target = ""
        if not is_run_id(target):
            break
        folder = runs_dir / target
    return folder


_MOST_RENAMES = 20


def no_sweeps_words(runs_dir: Path, whose: str = "") -> str:
    """Return a sentence that names the folder in which no sweep was found, and says why none is there.

    Args:
        runs_dir: the folder of sweeps.
        whose: words on sweeps that are there all the same, such as ` of yours, and 2 of others`.
    """
    folder = runs_dir.absolute()
    by = " (HPC_TRAINER_RUNS)" if os.environ.get("HPC_TRAINER_RUNS") in (str(runs_dir), str(folder)) else ""
    if has_sweep_file(runs_dir):
        return (
            f"{folder}{by} is a sweep itself, and not a folder of sweeps. Its name is {folder.name}: add --runs-dir "
            f"{folder.parent}."
        )
    try:
        names = sorted(path.name for path in runs_dir.iterdir())
    except FileNotFoundError:
        why = "there is no such folder"
    except OSError as error:
        why = error.strerror or str(error)
    else:
        few = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        without = f"{', '.join(SWEEP_FILES[:-1])} or {SWEEP_FILES[-1]}"
        why = f"it has only {few}, without {without}" if names else "it is empty"
    return f"{folder}{by} holds no sweep{whose}." if whose else f"{folder}{by} holds no sweep: {why}."


def sweep_folders(runs_dir: Path) -> list[Path]:
    """Return what may be the folders of sweeps in a folder of sweeps; [] if there is no such folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        # A link is the earlier name of a renamed sweep, which its new name lists.
        paths = [path for path in runs_dir.iterdir() if not path.name.startswith(TRASH) and not _is_earlier_name(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    if has_sweep_file(runs_dir):  # folders in a sweep's folder have files of the same names
        return [path for path in paths if exists(path / "sweep.json", Faults())]
    return paths


def _is_earlier_name(path: Path) -> bool:
    return path.is_symlink() and sweep_folder(path.parent, path.name) != path


def has_sweep_file(folder: Path) -> bool:
    """Return True if one of the files that identify a sweep is directly in this folder."""
    return any((folder / name).is_file() for name in SWEEP_FILES)


def is_run_id(name: str) -> bool:
    """Return True if a name may be the id of a run, which is also the name of its folder."""
    return _RUN_ID.fullmatch(name) is not None


_RUN_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,200}")

# Files of a run, beside its journals, that every command that shows the state of its sweep reads.
HEARTBEAT, RESULT, SUBMISSIONS = "heartbeat.json", "result.json", "submissions.jsonl"
AFTER = "after.json"
RETURNED = "returned.json"
OLD_JOURNAL = "attempts.jsonl"
"""Name of the journal of all attempts, which earlier versions wrote."""
_JOURNAL = re.compile(r"attempt-([0-9]{3,9})\.jsonl")


def journals_in(names: Iterable[str]) -> list[tuple[int, str]]:
    """Return (attempt, name) of every journal among the names in a run's folder, in order.

    The old journal of all attempts comes first, with attempt -1.
    """
    numbered = ((_JOURNAL.fullmatch(name), name) for name in names if name.startswith("attempt"))
    return sorted(
        (-1 if match is None else int(match[1]), name)
        for match, name in numbered
        if match is not None or name == OLD_JOURNAL
    )


@dataclass(frozen=True, slots=True)
class _Named:
    """Attribute of a folder's paths that returns the path of the file or folder with this name."""

    name: str

    def __get__(self, paths: RunPaths | SweepPaths, kind: object) -> Path:
        return Path(paths.at(self.name))


@dataclass(frozen=True, slots=True, init=False)
class RunPaths:
    """Paths in a run's folder, runs/<sweep>/<run_id>/, which the run creates when it starts."""

    place: str
    """The folder as text, so that a command about 10,000 runs does not create 100,000 Path objects."""

    metrics = _Named("metrics.jsonl")
    """One line for each logged step; rank 0 appends."""
    heartbeat = _Named(HEARTBEAT)
    """Step, speed, ETA; rank 0 replaces it."""
    ledger = _Named("ledger.jsonl")
    """Seconds that attempts spent on each kind of work; rank 0 appends."""
    allocations = _Named("allocations.json")
    """Time for which the run's jobs held their nodes; a command that asks the accounting replaces the file."""
    memory = _Named("memory.json")
    """Memory of a rank by kind, after the first steps of the newest attempt; rank 0 replaces it."""
    result = _Named(RESULT)
    """Final metrics; rank 0 writes once."""
    first_weights = _Named("first_weights.json")
    """Weights that `init_from` loaded, and those that it did not load; rank 0 writes at the first start."""
    after = _Named(AFTER)
    """Decision of a run that follows others (record/chain.py); rank 0 replaces it, before its first attempt."""
    profile_table = _Named("profile.txt")
    """Figures, advice and the top operators of the newest profile; rank 0 replaces it."""
    profile_trace = _Named("profile.trace.json.gz")
    """The newest profile for chrome://tracing or Perfetto; rank 0 replaces it."""
    stragglers = _Named("stragglers.jsonl")
    """Ranks that slowed the others down (observe/straggler_log.py); rank 0 appends."""
    profile = _Named("profile")
    """Requests of `hpc-trainer profile` to a running run, answers of ranks, and profiles of all ranks but 0."""
    profile_request = _Named("profile/request.json")
    """The newest profile request; the command replaces or removes it."""
    rendezvous = _Named("rendezvous.json")
    """Address at which rank 0 listens for the other ranks; rank 0 replaces it."""
    agents = _Named("agents.json")
    """Address at which the nodes' agents meet (`hardware.launcher=torchrun`); that of the first node replaces it."""
    checkpoints = _Named("checkpoints")
    """Checkpoints: step-00000100/ and so on."""
    logged = _Named("told")
    """Metrics that the user's program logs, a file for each attempt, and the return value of a Hydra app's task."""
    returned = _Named(f"told/{RETURNED}")
    """Return value of the task of a Hydra app; its first rank writes once."""
    logs = _Named("logs")
    """Logs of ranks: attempt-000.rank-0.log and so on."""
    telemetry = _Named("telemetry")
    """Samples of devices and hosts (`observe/telemetry.py`): attempt-000.rank-0.jsonl and so on."""
    submissions = _Named(SUBMISSIONS)
    """Successor jobs of this run: intents and confirmations; rank 0's attempt appends."""
    lr_range = _Named("lr_range.svg")
    """The plot of `hpc-trainer find-lr` for this configuration; the command replaces it."""
    tracker = _Named("tracker.json")
    """Records of this run that W&B and MLflow already have; `hpc-trainer sync` replaces it."""
    wandb = _Named("wandb")
    """Folders for `wandb sync`, each with its own range of steps; `hpc-trainer sync` adds one."""
    wandb_work = _Named("wandb.part")
    """Folder that `hpc-trainer sync` is writing for W&B."""
    canary = _Named("CANARY")
    """Mark of a run for which others wait (`submit --canary`); `submit` writes it."""
    canary_end = _Named("canary.json")
    """Time at which such a run had trained and saved (worker/line.py); rank 0 replaces it."""
    requeue_token = _Named("requeue.json")
    """The incarnation that asked for a requeue, so that no incarnation asks twice; rank 0 replaces it."""

    def __init__(self, folder: Path | str) -> None:
        object.__setattr__(self, "place", os.fspath(folder))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.place)

    @property
    def run_id(self) -> str:
        """The run's id, which is the folder's name."""
        return self.place.rpartition("/")[2]

    def at(self, name: str) -> str:
        """Return the path of a name in the folder, as text."""
        return f"{self.place}/{name}"

    def until(self, step: int) -> Path:
        """Return the file that lets the run train until `step`, and pause there (`record/rungs.py`)."""
        return Path(self.at(f"until-{step:09d}.json"))

    def journal(self, attempt: int) -> Path:
        """Return the path of an attempt's journal (`record/journal.py`), which only the attempt's rank 0 writes."""
        return Path(self.at(f"attempt-{attempt:03d}.jsonl"))

    def log(self, attempt: int, rank: int) -> Path:
        """Return the log file of one rank of one attempt."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.log"

    def telemetry_file(self, attempt: int, rank: int) -> Path:
        """Return the telemetry file of one rank of one attempt; that rank appends, and thins out old samples."""
        return self.telemetry / f"attempt-{attempt:03d}.rank-{rank}.jsonl"

    def move(self, attempt: int) -> Path:
        """Return the file that says why a restart must avoid one of the nodes (`record/journal.py`, `Move`)."""
        return self.telemetry / f"attempt-{attempt:03d}.move.json"

    def environment(self, attempt: int, node_rank: int = 0) -> Path:
        """Return the file with an attempt's environment (record/environment.py), one for each node.

        Rank 0 and the first rank of each other node write it.
        """
        node = f".node-{node_rank}" if node_rank else ""
        return self.logs / f"attempt-{attempt:03d}.environment{node}.json"

    def claim(self, race: str) -> Path:
        """Return the file by which one of several jobs of the run has claimed the run; the job's rank 0 links it."""
        return Path(self.at(f"claim-{race}.json"))

    @property
    def output(self) -> Path:
        """The folder for all files of the user's program or loop; hpc_trainer keeps no file there.

        For a run that an earlier version started, this is the run's folder itself, which holds the program's files.
        """
        return self.folder if self._is_old else Path(self.at("output"))

    @property
    def own_checkpoints(self) -> Path:
        """The folder for checkpoints that a user's program or loop writes; hpc_trainer does not read them."""
        return Path(self.at("own_checkpoints" if self._is_old else "output/checkpoints"))

    @property
    def _is_old(self) -> bool:
        return exists(self.at(OLD_JOURNAL), Faults()) is True

    def logged_metrics(self, attempt: int) -> Path:
        """Return the file for a program's metrics of one attempt (`$HPC_TRAINER_METRICS`); the program appends."""
        return self.logged / f"attempt-{attempt:03d}.jsonl"

    def program_end(self, attempt: int, rank: int) -> Path:
        """Return the file that says that a rank's program ended well; that rank writes, rank 0 waits for it."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.end"

    def program_worker(self, attempt: int, rank: int) -> Path:
        """Return the file with the address at which a rank's program will listen (TF_CONFIG); that rank replaces it."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.worker.json"

    def program_stop(self, attempt: int) -> Path:
        """Return the file that asks all ranks to stop their programs; the first rank to stop writes it."""
        return self.logs / f"attempt-{attempt:03d}.stop"

    def trace(self, rank: int) -> Path:
        """Return the file with a rank's state after each step; only ranks of `verify resume` append to it."""
        return self.folder / f"trace.rank-{rank}.jsonl"

    def profile_answer(self, rank: int) -> Path:
        """Return the file with a rank's answer to the newest profile request; that rank replaces it."""
        return self.profile / f"rank-{rank}.json"

    def profile_files(self, rank: int) -> tuple[Path, Path]:
        """Return the files with the table and the trace of a rank's newest profile; that rank replaces them."""
        if rank == 0:
            return self.profile_table, self.profile_trace
        return self.profile / f"rank-{rank}.txt", self.profile / f"rank-{rank}.trace.json.gz"

    def memory_snapshot(self, attempt: int, rank: int) -> Path:
        """Return the file with the CUDA allocator's blocks at an out-of-memory error; that rank writes."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.memory.json"

    def flight(self, attempt: int, rank: int) -> Path:
        """Return the file with a rank's flight record (`observe/flight.py`), which that rank replaces."""
        return self.logs / f"attempt-{attempt:03d}.rank-{rank}.flight.json"

    def failure(self, attempt: int) -> Path:
        """Return the file with the error of the first failing rank, which that rank writes once."""
        return self.logs / f"attempt-{attempt:03d}.failure.json"

    def marker(self, name: str) -> Path:
        """Return the path of a marker: DONE, CANCEL or HOLD."""
        return Path(self.at(name))


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """Paths in a sweep's folder, runs/<sweep>/."""

    folder: Path

    sweep = _Named("sweep.json")
    """The last grid that was submitted: command line, run ids, revision of the code."""
    specs = _Named("specs.jsonl")
    """All frozen RunSpecs, one line each; `submit` appends."""
    submissions = _Named(SUBMISSIONS)
    """Intents and confirmations; `submit` appends."""
    intents = _Named("submissions")
    """A file for each submission with a copy of its lines; an array element reads there which run it executes."""
    specs_copy = _Named("submissions/specs.jsonl")
    """A copy of the lines of `specs`, for jobs that begin after that file is lost or damaged; `submit` appends."""
    drawn = _Named("drawn")
    """Specs of runs that a search has drawn, a file for each trial: 000012.jsonl (search/folder.py)."""
    search = _Named("search.json")
    """The sweep's search: its space, its sampler, and the runs that trials are made from; `submit` replaces it."""
    search_problem = _Named("search-problem.json")
    """Why a slot of the search could not draw; the first such slot writes it, and `submit` removes it."""
    ends = _Named("ends")
    """Ends of jobs known only to Slurm's accounting, which forgets them; a file for each host that asked."""
    old_ends = _Named("ends.jsonl")
    """File of such job ends in sweeps of earlier versions; any host appended."""
    finished = _Named("finished.json")
    """Completed runs, so that `status` opens fewer folders (record/known_ends.py); `status` replaces it."""
    summaries = _Named("summaries.jsonl")
    """Summaries of the files of completed runs (record/summaries.py); a look at many runs replaces the file."""
    lock = _Named("submit.lock")
    """Lock of the one `submit` that is running."""
    removed = _Named("removed")
    """Tombstones of removed runs, a file RUN_ID.json for each (record/submissions.py); `rm` writes each once."""
    removed_whole = _Named("REMOVED")
    """The only file that `rm SWEEP` leaves in the folder."""
    hold = _Named("HOLD")
    """Hold of the whole sweep (record/holds.py); `hold` writes it, and so does a failing run
    (`cluster.stop_after_alike`)."""
    alike = _Named("alike")
    """Failures by their fingerprint (`cluster.stop_after_alike`); each failing run adds a file, `submit` clears it."""
    notify = _Named("notify")
    """Ends of runs, and events that were sent (notify/events.py); runs add files, `submit` removes its runs' files."""
    labels = _Named("labels.json")
    """Tags and note of the sweep (tidy/labels.py); `tag` and `note` replace it."""
    walk = _Named("walk.json")
    """Sizes and best metrics of the folders in the sweep (tidy/walk.py); `sweeps` replaces it."""
    sync_lock = _Named("sync.lock")
    """Lock of the one `sync` that is running."""
    scripts = _Named("slurm")
    """Batch scripts that submitit rendered, and the output of Slurm's batch shells."""
    local_logs = _Named("local")
    """Output of the local queue and its controllers."""
    compile_cache = _Named("compile_cache")
    """Cache of torch.compile, an archive for each configuration and local rank; the first run writes it."""
    chain = _Named("chain.json")
    """Chain of which the sweep is a stage, with the names of all its stages' sweeps; `submit` replaces it."""
    followers = _Named("followers")
    """Sweeps whose runs follow runs of this sweep, a file for each; their `submit` writes."""
    pickles = _Named("pickles")
    """Tasks of Hydra apps that no command starts (hydra_apps/pickled.py); the launcher writes."""
    turns = _Named("turns")
    """Claims of the slots of pools: which slot has which run (record/turns.py); slots link them, and remove none."""
    code = _Named("code")
    """Frozen code: an archive for each digest, and its unpacked copy if no node's disk could hold one."""

    def at(self, name: str) -> str:
        """Return the path of a name in the folder, as text."""
        return f"{self.folder}/{name}"

    @property
    def name(self) -> str:
        """The sweep's name, which is the folder's name."""
        return self.folder.name

    def intent(self, uuid: str) -> Path:
        """Return the file with the copy of one submission."""
        return self.intents / f"{uuid}.json"

    @property
    def ends_of_this_host(self) -> Path:
        """The file of `ends` that this host appends to."""
        return self.ends / f"ends-{node_name()}.jsonl"

    def script(self, uuid: str) -> Path:
        """Return the batch script of a submission; its name distinguishes a running sbatch from all others."""
        return self.scripts / f"{uuid}.sh"

    @property
    def is_group_readable(self) -> bool:
        """True if the group may read the sweep's folder (`paths.group_readable`)."""
        return bool(self.folder.stat().st_mode & 0o040)

    @property
    def signs(self) -> list[Path]:
        """Evidence that the sweep exists: its files, or, if they are all lost, files of submissions and runs."""
        files = [path for path in (self.folder / name for name in SWEEP_FILES) if exists(path, Faults()) is not False]
        return files or [path for pattern in _SIGNS for path in self.folder.glob(pattern)]

    @property
    def is_foreign(self) -> bool:
        """True if the folder has files, and none that hpc-trainer writes into the folder of a sweep."""
        try:
            names = {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}
        except OSError:
            return False
        ours = {item.name.partition("/")[0] for item in vars(SweepPaths).values() if isinstance(item, _Named)}
        return bool(names) and not names & ours and not self.exists

    @property
    def exists(self) -> bool:
        """True if there is any sign of the sweep, because single files may be lost or invisible at the moment."""
        if exists(self.folder, Faults()) is False:
            return False
        try:
            return bool(self.signs)
        except OSError:
            return True

    def requeue_request(self, job_id: str, restart_count: int) -> Path:
        """Return the file by which a worker that cannot requeue its job asks the batch script to do it.

        The file contains the run's folder, where the batch script looks for the cancel marker before it requeues.
        """
        return self.scripts / f"requeue-{job_id}-{restart_count}"

    def run(self, run_id: str) -> RunPaths:
        """Return the paths of one run."""
        return RunPaths(f"{self.folder}/{run_id}")
