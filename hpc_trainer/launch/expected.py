"""Expected times of a plan's runs, from measurements of their hardware by `hardware check --run`.

Sizes come from `plan --memory`, from an earlier run of the same training, or, for a gpt, from its configuration; the
time of a step from an earlier run of the same training on the same hardware. Unknown times are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.config.rules.memory import checkpoint_bytes, num_weights
from hpc_trainer.config.schema.output import SaveEvery
from hpc_trainer.config.schema.parallel import Strategy
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.launch.fit import Speed, Speeds, duration
from hpc_trainer.launch.memory import Need
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.measured import Figures, is_on_each_rank, read_figures, reduced_bytes
from hpc_trainer.record.reading import is_number, read_json
from hpc_trainer.record.spec import RunSpec

_MOST = 4
_OF_A_CHECKPOINT = ("weights", "optimizer", "average")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected times of the runs of one hardware, for its first run; None where something is not known."""

    hardware: str
    run_id: str
    source: str
    """Measurement that the times are from."""
    step_s: float | None = None
    """Time of a step of an earlier run."""
    reduce_bytes: float | None = None
    reduce_s: float | None = None
    """Time of a step's collectives, if no computation hides it."""
    save_bytes: float | None = None
    save_s: float | None = None
    """Time to write a checkpoint."""
    between_saves_s: float | None = None
    """Time of the steps between two checkpoints."""
    lines: tuple[str, ...] = ()
    """Sentences for the user."""


def find_expected(plan: SweepPlan, needs: Sequence[Need] = ()) -> list[Expected]:
    """Return the expected times of each hardware of a plan that was measured on this cluster, at most four.

    Args:
        needs: answers of `plan --memory`, whose sizes come first.
    """
    by_hardware: dict[str, Expected] = {}
    speeds: Speeds | None = None
    runs_dir = plan.grid.sweep.folder.parent
    for array in plan.arrays:
        if array.hardware in by_hardware or len(by_hardware) == _MOST:
            continue
        figures = read_figures(plan.cluster, array.hardware)
        if figures is not None:
            spec = array.specs[0]
            speeds = speeds or Speeds(runs_dir)
            own = [need for need in needs if need.run_id == spec.run_id and need.parts]
            need = next((need for need in own if need.hardware in (None, array.hardware)), None)
            by_hardware[array.hardware] = _expected(spec, figures, need, speeds.of(spec), runs_dir)
    return [*by_hardware.values()]


def _expected(spec: RunSpec, figures: Figures, need: Need | None, speed: Speed | None, runs_dir: Path) -> Expected:
    config = spec.typed()
    weights, save_bytes = (None, None) if spec.is_own_loop else _sizes(spec, config, need, _held(speed, runs_dir))
    link, ranks = figures.link_on(spec.shape.num_nodes), spec.shape.world_size
    reduce_bytes = None if weights is None or ranks == 1 else reduced_bytes(config, weights)
    reduce_s = None if link is None or reduce_bytes is None else link.seconds(reduce_bytes, ranks)
    writers = spec.shape.num_nodes if config.parallel.strategy is Strategy.fsdp else 1
    save_s = None if save_bytes is None else figures.write_s(save_bytes, writers)
    every = None if config.checkpoint.every is SaveEvery.auto else config.checkpoint.every_steps
    between_s = every * speed.step_s if every and speed is not None else None
    faults = figures.problems.items()
    lines = [
        *_reduce_line(figures, spec, reduce_bytes, reduce_s, speed),
        *_save_line(figures, save_bytes, save_s, every, between_s),
        *(f"{key}: {text}" for key, text in faults if key != "internet" or _may_download(spec)),
    ]
    return Expected(
        hardware=figures.hardware, run_id=spec.run_id, source=figures.source,
        step_s=None if speed is None else speed.step_s, reduce_bytes=reduce_bytes, reduce_s=reduce_s,
        save_bytes=save_bytes, save_s=save_s, between_saves_s=between_s, lines=tuple(lines),
    )  # fmt: skip


def _sizes(
    spec: RunSpec, config: TrainConfig, need: Need | None, held: Mapping[str, float] | None
) -> tuple[float | None, float | None]:
    """Return the number of weights that have gradients, and the bytes of a checkpoint; None for an unknown number."""
    weight_bytes = config.precision.format.weight_bytes
    if is_on_each_rank(config):
        if need is not None and need.parts.get("gradients"):
            return 1e9 * need.parts["gradients"] / weight_bytes, 1e9 * (need.checkpoint_gb or 0.0) or None
        if held is not None:
            return held["gradients"] / weight_bytes, math.fsum(held.get(name, 0.0) for name in _OF_A_CHECKPOINT)
    weights = num_weights(spec.config)
    if need is not None and need.checkpoint_gb is not None:
        return weights, 1e9 * need.checkpoint_gb
    return weights, None if weights is None else checkpoint_bytes(config, weights)


def _held(speed: Speed | None, runs_dir: Path) -> Mapping[str, float] | None:
    """Return the memory of a rank in an earlier run of this training, in bytes by name; None if unknown."""
    if speed is None:
        return None
    sweep, _, run_id = speed.runs[0].partition("/")
    record = read_json(SweepPaths(runs_dir / sweep).run(run_id).memory) or {}
    held = {name: float(value) for name, value in record.items() if is_number(value)}
    return held if held.get("gradients") and "weights" in held else None


def _reduce_line(
    figures: Figures, spec: RunSpec, num_bytes: float | None, seconds: float | None, speed: Speed | None
) -> Iterator[str]:
    nodes, ranks = spec.shape.num_nodes, spec.shape.world_size
    link = figures.link_on(nodes)
    if link is None and ranks > 1:
        where = "within a node" if nodes == 1 else "between nodes"
        yield f"the links {where} were not measured. Type: hpc-trainer hardware check {figures.hardware} --run"
    if link is None or num_bytes is None or seconds is None:
        return
    share = ""
    if speed is not None:
        part = f"{seconds / speed.step_s:.0%}" if seconds < speed.step_s else "all"
        share = f", {part} of a step of {_time(speed.step_s)} (by {speed.runs[0]})"
    yield (
        f"sending a step's gradients and weights takes as long as an all-reduce of {_size(num_bytes)}: about "
        f"{_time(seconds)} on {ranks} ranks{share}, less what computation hides; "
        f"measured {_size(link.bus_bytes_per_s)}/s among {link.ranks} ranks"
    )


def _save_line(
    figures: Figures, num_bytes: float | None, seconds: float | None, every: int | None, between_s: float | None
) -> Iterator[str]:
    if num_bytes is None or seconds is None:
        return
    interval = "" if every is None else f", each {every} steps (checkpoint.every_steps)"
    if between_s is not None:
        interval += f", which take {_time(between_s)}"
    rate = f"{_size(figures.write_bytes_per_s or 0.0)}/s a node"
    kind = f" on {figures.filesystem}" if figures.filesystem else ""
    slow = ""
    if between_s is not None and seconds > between_s:
        slow = ". Saves take longer than the steps between them: use checkpoint.every=auto"
    written = f"a checkpoint of {_size(num_bytes)} takes about {_time(seconds)} to write{interval}"
    yield f"{written}; measured {rate}{kind}{slow}"


def _may_download(spec: RunSpec) -> bool:
    """Return True if the run may fetch something at run time: only a program or loop of the user's own does."""
    return spec.is_own_loop and (spec.config["cluster"].get("env") or {}).get("HF_HUB_OFFLINE") != "1"


def _size(num_bytes: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _time(seconds: float) -> str:
    if seconds >= 60:
        return duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
