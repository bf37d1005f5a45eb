"""`checkpoint/`, `monitor/` and `tracker/`: what a run saves, reports and watches."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.key import ALWAYS, ONCE_SET, key, only_with


class SaveEvery(str, enum.Enum):
    """Rule that decides when a run saves."""

    steps = "steps"
    auto = "auto"


class BestMode(str, enum.Enum):
    """Rule that decides which value of a metric is the best."""

    auto = "auto"
    min = "min"
    max = "max"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: SaveEvery = key(SaveEvery.steps, ALWAYS)
    """steps: a save every `every_steps`. auto: from the second save on, the interval with the least time lost to saves
    and repeated work (Daly 2006). It follows from the duration of a save and from how often this run was
    interrupted."""
    every_steps: int = key(100, ALWAYS, limits="≥ 1")
    """Steps between saves; with `every=auto` the steps before the first save. A stop and the last step also save."""
    keep_last: int = key(2, ALWAYS, limits="≥ 1")
    """Number of valid checkpoints to keep. With two, the older one remains if the newest is damaged."""
    asynchronous: bool = key(True, ALWAYS)
    """true: regular saves copy the state, which takes as much host memory again, and are written while training
    continues. false: training waits for the disk. Saves at a stop and after the last step always wait."""
    keep_every_steps: int = key(0, ALWAYS, limits="≥ 0")
    """Checkpoints whose step is a multiple of this number are kept for good; 0: none."""
    keep_best: str | None = key(None, ALWAYS)
    """Metric of metrics.jsonl, such as eval_loss or eval_accuracy, whose best checkpoint is kept. null: none."""
    best_mode: BestMode = key(BestMode.auto, only_with("checkpoint.keep_best"))
    """min or max: which value is the best. auto: min for a metric named after a loss, an error or a perplexity, max for
    an accuracy, a score and the like."""
    resume_from: str | None = key(None, ALWAYS, ONCE_SET)
    """Folder of another run, or of one of its checkpoints (.../checkpoints/step-00000200): a new run begins with that
    state at that step, in a folder of its own. Part of the run's identity. null: the run begins at step 0."""
    allow_changes: list[str] = key([], ALWAYS)
    """Keys, such as `seed` or `dataset.digest`, that may differ between a checkpoint and the start that resumes from
    it. The result is then another training. A refused start prints the list to allow."""


_SMALL_IS_GOOD = re.compile(r"loss|err|perplexity|ppl|nll|mae|mse|rmse|wer|cer")


def best_is_max(checkpoint: CheckpointConfig) -> bool:
    """Return True if the largest value of `keep_best` is the best."""
    if checkpoint.best_mode is BestMode.auto:
        return not small_is_better(checkpoint.keep_best or "")
    return checkpoint.best_mode is BestMode.max


def is_best_small(checkpoint: CheckpointConfig, metric: str) -> bool:
    """Return True if small values of a metric are best: `best_mode` decides for `keep_best`, the name for others."""
    return not best_is_max(checkpoint) if metric == checkpoint.keep_best else small_is_better(metric)


_USUAL_METRICS = ("eval_accuracy", "eval_loss", "val_accuracy", "val_loss", "accuracy", "loss")


def compared_by(checkpoint: CheckpointConfig, known: Collection[str]) -> str | None:
    """Return the metric by which runs are compared, among those that are known; None if it is not known.

    It is that of `checkpoint.keep_best`, else the first known one of eval_accuracy, eval_loss, val_accuracy, val_loss,
    accuracy and loss. A program (`--command`) has no `keep_best`.
    """
    return next((name for name in (checkpoint.keep_best, *_USUAL_METRICS) if name is not None and name in known), None)


def kept_best(checkpoint: Mapping[str, Any]) -> CheckpointConfig:
    """Return how the best checkpoint is chosen, by the section `checkpoint` of a frozen configuration.

    Raises:
        KeyError: there is no such `best_mode`.
    """
    mode = BestMode[checkpoint.get("best_mode", BestMode.auto.name)]
    return CheckpointConfig(keep_best=checkpoint.get("keep_best"), best_mode=mode)


def small_is_better(name: str) -> bool:
    """Return True if a metric is named after a loss or an error, whose small values are the better ones."""
    return bool(_SMALL_IS_GOOD.search(name.lower()))


class NotifyShape(str, enum.Enum):
    """Form in which a webhook gets an event."""

    slack = "slack"
    ntfy = "ntfy"
    json = "json"


EVENTS = ("done", "failed", "stalled", "best")
"""Events that `notify.events` may name."""


@dataclass(kw_only=True, slots=True)
class NotifyConfig:
    """`notify`: who is notified of a sweep's end, its first failure, a stalled run or a new best one."""

    events: list[str] = key(["done", "failed"], only_with("notify.command", "notify.webhook_env"))
    """Events that send a message: done (all runs of the newest grid have ended), failed (the first failure), stalled (a
    run ended because it hung or did not advance), best (a completed run is better than all before)."""
    command: str | None = key(None, ALWAYS)
    """Shell command that is run on the node with the event as JSON on its standard input, and in the variables
    HPC_TRAINER_NOTIFY_EVENT, _SWEEP, _RUN and _TEXT."""
    webhook_env: str | None = key(None, ALWAYS)
    """Name of the environment variable with the address to which events are posted. The address is a secret: set it in
    the environment of `submit`, never in a file."""
    shape: NotifyShape = key(NotifyShape.slack, only_with("notify.webhook_env"))
    """slack: {"text": ...}, as Slack and Mattermost take it. ntfy: a text with Title and Tags. json: all fields."""
    metric: str | None = key(None, only_with("notify.command", "notify.webhook_env"))
    """Metric of the event best; null: the metric by which `results` compares runs."""
    timeout_s: float = key(10.0, only_with("notify.command", "notify.webhook_env"), limits="[1, 60]")
    """Seconds after which a command or a post is given up."""
    mail: str | None = key(None, ALWAYS)
    """Address to which Slurm mails the end and the failure of each array (sbatch --mail-type=END,FAIL)."""


class OnOverheat(str, enum.Enum):
    """Reaction to a GPU that lowers its clocks to protect itself."""

    warn = "warn"
    lower_power = "lower_power"
    move = "move"


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    log_every_steps: int = key(10, ALWAYS, limits="≥ 1")
    """Steps between lines of metrics.jsonl. The loss is read from the device only then."""
    heartbeat_every_s: float = key(2.0, ALWAYS, limits="≥ 0")
    """Smallest number of seconds between two writes of heartbeat.json in the first minute; five times as many after
    five minutes."""
    # The stacks of all ranks take some seconds (runtime/watchdog.py).
    watchdog_s: float = key(480.0, ALWAYS, limits="0 or ≥ 10")
    """Seconds without a step, a batch of an evaluation or a save after which the run fails. The rank first writes the
    stacks of its threads into its log. The run restarts (cluster.max_failures). With more than one rank at most 0.8 of
    parallel.timeout_s, or a hung collective would end without the stacks. 0: no watchdog."""
    profile_steps: int = key(0, ALWAYS, limits="0 to 1000")  # a step of a large model leaves 1 MB of spans
    """Steps that rank 0 records with torch.profiler: profile.txt and profile.trace.json.gz in the run folder
    (docs/speed.md). The bits stay the same; those steps are some percent slower. 0: none."""
    profile_warmup_steps: int = key(10, only_with("monitor.profile_steps"), limits="≥ 1")
    """Steps of each attempt before the profile: in the first ones caches, compilers and allocators are cold."""
    telemetry_every_s: float = key(5.0, ALWAYS, limits="≥ 0")
    """Seconds between two samples of each rank's GPU and host (docs/monitoring.md); all ranks together take at most 20
    a second. 0: none."""
    # Healthy ranks differ by some percent.
    straggler_factor: float = key(1.3, ALWAYS, limits="0 or ≥ 1.05")
    """`status` and `why` name a rank whose own work in a step takes longer than this many times the median of the other
    ranks (docs/monitoring.md). 0: no check."""
    on_overheat: OnOverheat = key(OnOverheat.warn, only_with("hardware.gpus_per_node"))
    """warn: `status` warns of a GPU that lowers its clocks for heat. lower_power: its power limit is lowered too, by a
    tenth each minute, if the user may set it, and restored at the end of the attempt. move: after move_after_s, or at
    once if the GPU fails, the run saves and goes back into Slurm's queue without that node (docs/monitoring.md)."""
    move_after_s: float = key(300.0, only_with("monitor.on_overheat=move"), limits="≥ 0")
    """Seconds for which a GPU lowers its clocks without a break before the run leaves its node. A move costs Slurm's
    two minutes for a requeued job, the time in the queue, and a start."""
    co2_g_per_kwh: float | None = key(None, ALWAYS, limits="≥ 0")
    """Grams of CO2 for each kWh at the site, for the column co2_g of `results`. null: no column."""
    prometheus_dir: str | None = key(None, ALWAYS)
    """Folder on each node that node_exporter's textfile collector reads: each rank keeps a file with its newest sample
    there while it works (docs/monitoring.md). null: none."""


class TrackerName(str, enum.Enum):
    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"

    @property
    def is_synced(self) -> bool:
        """True if `hpc-trainer sync` writes to the tracker, from metrics.jsonl; training has no part in it."""
        return self in SYNCED


SYNCED = (TrackerName.wandb, TrackerName.mlflow)
"""Trackers that `operate/sync/` supports."""


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    name: TrackerName = key(TrackerName.none, ALWAYS)
    """tensorboard writes event files into the run folder; wandb and mlflow are written by `hpc-trainer sync`
    (docs/trackers.md). Each needs the package of its name."""
    project: str | None = key(None, only_with("tracker.name=wandb", "tracker.name=mlflow"))
    """Project in W&B, or experiment in MLflow; null: the name of the sweep."""
    entity: str | None = key(None, only_with("tracker.name=wandb"))
    """User or team in W&B; null: your own."""
    uri: str | None = key(None, only_with("tracker.name=mlflow"))
    """Server of MLflow (https://..), database (sqlite:///..), or folder, relative to the folder of runs; null:
    $MLFLOW_TRACKING_URI, else the folder mlruns."""
