"""RunSpec: one frozen run. Shape: what it asks of Slurm. Plain values only; written once, never changed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.identity import build_run_id, config_digest
from hpc_trainer.config.memo import Memo
from hpc_trainer.config.schema.cluster import ClusterConfig
from hpc_trainer.config.schema.hardware import HardwareConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.runs.files import append_texts, check_trusted, read_lines
from hpc_trainer.runs.layout import SweepPaths

SPEC_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The resources of one run: runs of equal shape become one job array."""

    num_nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    mem_gb_per_node: float | None
    mem_gb_per_gpu: float | None
    mem_gb_per_cpu: float | None
    gpu_type: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    exclude: str | None
    account: str | None
    time_limit_min: int
    signal_lead_s: int
    gpu_request: str = "gpus_per_node"  # specs of before this field mean it so

    @property
    def world_size(self) -> int:
        """Ranks of one run."""
        return self.num_nodes * self.tasks_per_node

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of one attempt that runs to its time limit."""
        return self.num_nodes * self.gpus_per_node * self.time_limit_min / 60


def shape_of(config: TrainConfig) -> Shape:
    """The shape of a validated configuration."""
    return _shape(config.hardware, config.cluster)


def _shape(hardware: HardwareConfig, cluster: ClusterConfig) -> Shape:
    # Slurm may send the signal up to 60 s early (sbatch --signal) and KillWait follows: 120 s covers a save of
    # seconds; a short job keeps three quarters of its time.
    lead_s = cluster.signal_lead_s or max(1, min(120, hardware.time_limit_min * 60 // 4))
    return Shape(
        num_nodes=hardware.num_nodes,
        tasks_per_node=hardware.ranks_per_node,
        gpus_per_node=hardware.gpus_per_node,
        cpus_per_task=hardware.cpus_per_rank,
        mem_gb_per_node=hardware.mem_gb_per_node,
        mem_gb_per_gpu=hardware.mem_gb_per_gpu,
        mem_gb_per_cpu=hardware.mem_gb_per_cpu,
        gpu_type=hardware.gpu_type,
        partition=hardware.partition,
        qos=hardware.qos,
        constraint=hardware.constraint,
        exclude=hardware.exclude,
        account=cluster.account,
        time_limit_min=hardware.time_limit_min,
        signal_lead_s=lead_s,
        gpu_request=hardware.gpu_request.value,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run as it was submitted. Editing YAML or code afterwards does not change it."""

    run_id: str
    digest: str
    axes: Mapping[str, str]
    overrides: tuple[str, ...]
    shape: Shape
    config: Mapping[str, Any]

    @property
    def hardware(self) -> str:
        """The hardware profile's name."""
        return str(self.config["hardware"]["name"])

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return int(self.config["train"]["num_steps"])

    def typed(self) -> TrainConfig:
        """The configuration as dataclasses.

        Raises:
            ConfigError: the spec was written by another version, or its digest does not fit its content.
        """
        from hpc_trainer.config.load import from_plain  # OmegaConf costs `status` 0.1 s that it does not need

        config = from_plain(self.config)
        digest = config_digest(self.config)
        if digest != self.digest:
            raise ConfigError(
                f"{self.run_id}: the frozen configuration was changed after submission (digest {digest[:8]}, "
                f"frozen {self.digest[:8]}). Submit it anew under another sweep_name."
            )
        return config


def freeze(
    config: TrainConfig, *, axes: Mapping[str, str], overrides: tuple[str, ...], memo: Memo | None = None
) -> RunSpec:
    """A validated configuration as a frozen run. With a `memo`, runs share what their sections share."""
    from hpc_trainer.config.load import to_plain

    memo = memo or Memo()
    plain = to_plain(config, memo)
    digest = config_digest(plain, memo)
    return RunSpec(
        run_id=build_run_id(config, digest),
        digest=digest,
        axes=axes,
        overrides=overrides,
        shape=memo.of(_shape, config.hardware, config.cluster),
        config=plain,
    )


# Of 10,000 specs, 33 MB of text: so many are held as text at a time (about 1 MB).
_SPECS_A_WRITE = 256


def append_specs(paths: SweepPaths, specs: Sequence[RunSpec]) -> None:
    """Adds specs to the sweep's file, whole lines at a time.

    Killed in between, it leaves specs that no submission names: they are NEW, and the next command adds the others.
    """
    if specs:
        memo = Memo()
        starts = range(0, len(specs), _SPECS_A_WRITE)
        append_texts(
            paths.specs,
            ("".join(_line(spec, memo) for spec in specs[start : start + _SPECS_A_WRITE]) for start in starts),
        )


def _line(spec: RunSpec, memo: Memo) -> str:
    """One line of the file. A section that several specs share is turned into text once."""
    config = ", ".join(
        f"{json.dumps(key)}: {memo.of(json.dumps, value) if isinstance(value, dict) else json.dumps(value)}"
        for key, value in spec.config.items()
    )
    head = {
        "format": SPEC_FORMAT, "run_id": spec.run_id, "digest": spec.digest, "axes": dict(spec.axes),
        "overrides": spec.overrides,
    }  # fmt: skip
    return f'{json.dumps(head)[:-1]}, "shape": {memo.of(_shape_text, spec.shape)}, "config": {{{config}}}}}\n'


def _shape_text(shape: Shape) -> str:
    return json.dumps(dataclasses.asdict(shape))


def read_specs(paths: SweepPaths) -> dict[str, RunSpec]:
    """Every spec of the sweep by run id, in order of submission; {} for a sweep that does not exist.

    Raises:
        UntrustedFileError: others may have changed the file.
    """
    if not paths.specs.exists():
        return {}
    check_trusted(paths.specs)
    return {spec.run_id: spec for spec in map(_parse, read_lines(paths.specs))}


def read_spec(paths: SweepPaths, run_id: str) -> RunSpec:
    """One spec, the newest of its run id. Parses only the lines that mention it: a sweep may hold 10,000.

    Raises:
        RunStateError: no such run; UntrustedFileError: others may have changed the file.
    """
    check_trusted(paths.specs)
    newest = None
    for line in _lines_with(paths, json.dumps(run_id)):
        with contextlib.suppress(json.JSONDecodeError):  # a torn line: its writer was killed and wrote it again
            record = json.loads(line)
            newest = record if record["run_id"] == run_id else newest
    if newest is None:
        raise RunStateError(f"{paths.specs} holds no run {run_id}.")
    return _parse(newest)


def _lines_with(paths: SweepPaths, text: str) -> Iterator[str]:
    with paths.specs.open(encoding="utf-8") as file:
        yield from (line for line in file if text in line)


def _parse(record: Mapping[str, Any]) -> RunSpec:
    try:
        return RunSpec(
            run_id=record["run_id"],
            digest=record["digest"],
            axes=record["axes"],
            overrides=tuple(record["overrides"]),
            shape=Shape(**record["shape"]),
            config=record["config"],
        )
    except (KeyError, TypeError) as error:
        raise RunStateError(f"a spec of another version cannot be read: {error}") from error
