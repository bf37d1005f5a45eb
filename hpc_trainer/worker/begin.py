"""Beginning of an attempt: rank 0 records it, and a thread records the environment that it runs in. No torch.

The environment (record/environment.py) is written beside the training, after its first step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_trainer import __version__
from hpc_trainer.config.environment import IMAGE_FACTS, PACK_FACTS, STAGE_KEY, STAGED
from hpc_trainer.config.program import code_folder
from hpc_trainer.config.schema.cluster import EnvironmentConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import packages_of
from hpc_trainer.domains import contributions
from hpc_trainer.errors import LowGoodputError
from hpc_trainer.record.environment import write_environment
from hpc_trainer.record.journal import Attempt, Journal
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.ledger import keep_spent, most_timeouts, newest_timeouts, timed_out_words
from hpc_trainer.record.reading import Faults, read_json
from hpc_trainer.record.redaction import Redaction
from hpc_trainer.runtime import machine
from hpc_trainer.runtime.code import checkouts_of, code_digests, places_of
from hpc_trainer.runtime.pace import better_limit_min
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.start import FROZEN_CODE
from hpc_trainer.runtime.stop import StopFlag, wait_for_record

if TYPE_CHECKING:
    from hpc_trainer.runtime.rank_group import RankGroup


def begin_attempt(paths: RunPaths, env: RankEnv, attempt: int) -> Journal:
    """Record the beginning of this attempt, keep the time spent by the previous one, and return the run's journal.

    Only rank 0 writes.
    """
    journal = Journal(paths)
    if env.rank == 0:
        journal.start(
            attempt,
            job_id=env.job_id,
            restart_count=env.restart_count,
            node=env.node,
            pid=os.getpid(),
            executor=env.launcher,
            world_size=env.world_size,
            per_gpu=env.per_gpu,
        )
        keep_spent(paths, attempt)
    return journal


def check_goodput(
    config: TrainConfig, paths: RunPaths, attempts: list[Attempt], group: RankGroup | None = None
) -> None:
    """Check that the attempts that the time limit ended trained enough to start another attempt.

    Args:
        group: ranks to which rank 0 sends its result, in a collective call; None if this is rank 0, and the other ranks
            learn of its end in another way.

    Raises:
        LowGoodputError: less than `cluster.min_goodput` of their time was training.
    """
    problem = _goodput_problem(config, paths, attempts) if group is None or group.is_rank_zero else None
    problem = problem if group is None else group.broadcast(problem)
    if problem is not None:
        raise LowGoodputError(problem)


def _goodput_problem(config: TrainConfig, paths: RunPaths, attempts: list[Attempt]) -> str | None:
    cluster, limit_min = config.cluster, config.hardware.time_limit_min
    most = most_timeouts(cluster.max_no_progress)
    times = newest_timeouts(paths, attempts, most, least=most) if cluster.min_goodput else None
    if times is None or times.share >= cluster.min_goodput:
        return None
    longer_min = better_limit_min(limit_min, times.other_s, cluster.signal_lead_s)
    return (
        f"{timed_out_words(times, limit_min)}: less than cluster.min_goodput={cluster.min_goodput:g}, so it is stopped "
        f"for good. An attempt spends {times.other_s:.0f} s on other things than training. To continue: hpc-trainer "
        f"retry {paths.run_id} hardware.time_limit_min={longer_min}"
    )


_LOG = logging.getLogger(__name__)
# A first step that takes longer, such as one that compiles, is not waited for.
_LONGEST_WAIT_S = 10.0
_POLL_S = 0.05
_OURS = "hpc_trainer"

Facts = Callable[[], Mapping[str, Any]]


@contextlib.contextmanager
def recording(
    config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, stop: StopFlag, *,
    has_begun: Callable[[], bool] = lambda: True, facts: Facts = dict,
) -> Iterator[None]:  # fmt: skip
    """Write the record once the first step of the block is done, at the latest when the block ends.

    The first rank of each node writes; others do nothing. Errors are logged, and do not harm training. A stop does not
    wait for the record.

    Args:
        stop: stop flag of this rank.
        has_begun: returns True once the first step is done.
        facts: returns what the training itself knows: `code` (package -> digest) and `data` (name -> description).
    """
    if env.local_rank != 0:
        yield
        return
    go = threading.Event()

    def work() -> None:
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while not (go.wait(_POLL_S) or has_begun() or time.monotonic() > deadline):
            pass
        try:
            record = node_facts(env) if env.rank else _record(config, paths, env, facts())
            write_environment(paths, attempt, record, env.node_rank)
        except Exception as error:  # of any kind: a record must not end a training
            _LOG.warning(
                "WARNING: the environment of this attempt was not recorded: %s: %s", type(error).__name__, error
            )

    thread = threading.Thread(target=work, name="environment", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads for this user
        _LOG.warning("WARNING: the environment of this attempt was not recorded: %s", error)
        yield
        return
    try:
        yield
    finally:
        go.set()
        wait_for_record(thread, _LONGEST_WAIT_S, stop)


@contextlib.contextmanager
def sampled(
    config: TrainConfig, paths: RunPaths, env: RankEnv, attempt: int, stop: StopFlag, *,
    step: Callable[[], int | None], gpu: Sequence[str] = (),
) -> Iterator[None]:  # fmt: skip
    """Run the samplers of domains beside the work of this rank (hook `samplers`), while the block runs.

    Args:
        config: configuration of the run.
        paths: paths of the run.
        env: place of this rank.
        attempt: number of the attempt.
        stop: stop flag of this rank, which a sampler may set.
        step: returns the newest step; None if it is not known.
        gpu: names of the rank's GPU, if torch knows them (`DeviceKind.names`).
    """
    with contextlib.ExitStack() as stack:
        for sampler_of in contributions("samplers"):
            stack.enter_context(sampler_of(config, paths, env, attempt, stop, step=step, gpu=gpu))
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Entries of environment records that are equal for all runs forked from one process."""

    node: Mapping[str, Any]
    packages: tuple[dict[str, str], dict[str, dict[str, Any]]]
    digests: Mapping[str, str]
    """Digest of each package whose code cannot change while the process lives: hpc_trainer is imported, others are
    frozen."""
    own_checkouts: Sequence[dict[str, Any]]
    num_redacted: int


_shared: _Shared | None = None


def share_records(config: TrainConfig) -> None:
    """Gather the entries that all runs forked from this process share; that may take longer than a short run.

    Args:
        config: configuration of one of the runs.
    """
    global _shared
    packages = packages_of(config)
    redaction = Redaction.of_process()
    # Python keeps the patterns that these compile, and what `platform` reads; each run would take 10 ms for them.
    redaction.text("")
    for facts in (machine.python, machine.devices, machine.cpu):
        facts()
    is_frozen = _frozen() is not None
    _shared = _Shared(
        node=_fixed_facts(), packages=machine.packages(),
        digests=code_digests(packages if is_frozen else [_OURS]),
        own_checkouts=[] if is_frozen else _own_checkouts(places_of([_OURS]), redaction),
        num_redacted=redaction.count,
    )  # fmt: skip


def _fixed_facts() -> dict[str, Any]:
    return {"driver": machine.driver(), "memory_bytes": machine.memory_bytes(), "system": machine.system()}


def node_facts(env: RankEnv) -> dict[str, Any]:
    """Return the facts that each node records about itself."""
    return {
        "node": env.node, "node_rank": env.node_rank, "devices": machine.devices(), "cpu": machine.cpu(),
        "libraries": machine.libraries(), **(_fixed_facts() if _shared is None else _shared.node),
    }  # fmt: skip


def _record(config: TrainConfig, paths: RunPaths, env: RankEnv, facts: Mapping[str, Any]) -> dict[str, Any]:
    redaction = Redaction.of_process()
    versions, origins = machine.packages() if _shared is None else _shared.packages
    record = {
        **node_facts(env),
        "hpc_trainer": __version__,
        "job_id": env.job_id, "world_size": env.world_size, "num_nodes": env.num_nodes,
        "nodes": os.environ.get("SLURM_JOB_NODELIST"),
        "command": _commands(paths, redaction),
        "code": _code(config, paths, facts, redaction),
        "python": machine.python(), "packages": versions, "origins": redaction.values(origins),
        "modules": machine.modules(), "environment": environment_facts(config.cluster.environment, versions),
        "variables": redaction.variables(machine.variables()),
        "data": redaction.values(facts.get("data") or {}),
    }  # fmt: skip
    return {**record, "redacted": redaction.count}


def environment_facts(environment: EnvironmentConfig, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return facts about `cluster.environment` on this node, with a digest of each part; {} if it is not used.

    Args:
        environment: the section.
        versions: version of each installed distribution by name.
    """
    if environment == EnvironmentConfig():
        return {}
    facts: dict[str, Any] = {"packages_sha256": machine.packages_digest(versions)}
    if environment.container is not None:
        facts["container"] = environment.container.value
        facts["image"] = environment.image
        if os.path.isabs(environment.image or ""):  # noqa: PTH117 -- a path of the container's host
            facts["image_file"] = machine.file_facts(environment.image or "", os.environ.get(IMAGE_FACTS))
    if environment.uv is not None:
        facts["lock_file"] = machine.file_facts(f"{environment.uv}/uv.lock")
    if environment.conda is not None:
        facts["conda_sha256"] = machine.conda_digest(os.environ.get("CONDA_PREFIX", environment.conda))
    if environment.stage is not None:
        # Not the file itself: 500 nodes must not ask for it again.
        copy = os.environ.get(STAGED)
        packed = {} if copy is None else read_json(Path(copy, PACK_FACTS), Faults()) or {}
        facts["stage"] = {
            "path": environment.stage, "facts": os.environ.get(STAGE_KEY), "copy": copy, "sha256": packed.get("sha256"),
        }  # fmt: skip
    return facts


def _commands(paths: RunPaths, redaction: Redaction) -> dict[str, Any]:
    """Return the command that the user typed, if the sweep's newest submit named this run, and this process's own."""
    sweep = read_json(SweepPaths(paths.folder.parent).sweep, Faults()) or {}
    typed = sweep.get("command") if paths.run_id in (sweep.get("run_ids") or ()) else None
    arguments = redaction.arguments(map(str, typed)) if isinstance(typed, list) else None
    return {
        "submit": None if arguments is None else shlex.join(arguments),
        "worker": shlex.join(redaction.arguments(sys.orig_argv)),
        "folder": str(Path.cwd()),
    }


def _code(config: TrainConfig, paths: RunPaths, facts: Mapping[str, Any], redaction: Redaction) -> dict[str, Any]:
    """Return digests of packages, and the frozen code with its revision, or the checkouts if no code was frozen."""
    packages = packages_of(config)
    known = {} if _shared is None else _shared.digests
    digests = dict(facts.get("code") or {name: known.get(name) or code_digests([name])[name] for name in packages})
    frozen = _frozen()
    if frozen is not None:
        revision = (read_json(SweepPaths(paths.folder.parent).sweep, Faults()) or {}).get("code") or {}
        snapshot = revision.get("snapshot") or {}
        is_of_it = str(snapshot.get("digest", "")).startswith(frozen)
        revision_facts = {key: revision.get(key) if is_of_it else None for key in ("git_revision", "git_diff_sha256")}
        return {"frozen": frozen, **revision_facts, "packages": digests, "places": {}, "checkouts": []}
    places = places_of(packages)
    folders = {place for name, place in places.items() if name != _OURS}
    folders |= {code_folder(config.train)} if config.train.command else set()
    checkouts = checkouts_of(sorted(folders), redaction)
    if _shared is None:
        checkouts += _own_checkouts(places, redaction)
    else:
        checkouts += _shared.own_checkouts
        redaction.count += _shared.num_redacted
    return {"frozen": None, "packages": digests, "places": places, "checkouts": checkouts}


def _own_checkouts(places: Mapping[str, str], redaction: Redaction) -> list[dict[str, Any]]:
    """Return our own checkout, limited to the package: a run needs no tests or pages."""
    ours = places.get(_OURS)
    return [] if ours is None else checkouts_of([ours], redaction, within=f":/{_OURS}")


def _frozen() -> str | None:
    """Return the first 12 digits of the digest of the frozen code that this process imports; None if there is none."""
    copies = os.environ.get(FROZEN_CODE)
    if not copies:
        return None
    folders = json.loads(copies)
    return Path(next(iter(folders.values()))).parent.name if folders else None
