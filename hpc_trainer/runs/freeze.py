"""A validated configuration becomes a frozen run."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_trainer.config.identity import SeedDigests, build_run_id, config_digest, run_id_of, run_label
from hpc_trainer.config.memo import Memo
from hpc_trainer.config.program import is_one_a_node
from hpc_trainer.config.schema.cluster import ClusterConfig
from hpc_trainer.config.schema.hardware import HardwareConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.runs.spec import RunSpec, Shape


def shape_of(config: TrainConfig) -> Shape:
    """The shape of a validated configuration."""
    return _shape(config.hardware, config.cluster, is_one_a_node(config))


def _shape(hardware: HardwareConfig, cluster: ClusterConfig, is_one_a_node: bool) -> Shape:
    # Slurm may send the signal up to 60 s early (sbatch --signal) and KillWait follows: 120 s covers a save of
    # seconds; a short job keeps three quarters of its time.
    lead_s = cluster.signal_lead_s or max(1, min(120, hardware.time_limit_min * 60 // 4))
    return Shape(
        num_nodes=hardware.num_nodes,
        tasks_per_node=1 if is_one_a_node else hardware.ranks_per_node,
        gpus_per_node=hardware.gpus_per_node,
        cpus_per_task=hardware.cpus_per_rank * (hardware.ranks_per_node if is_one_a_node else 1),
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
        shape=memo.of(_shape, config.hardware, config.cluster, is_one_a_node(config)),
        hardware=config.hardware.name,
        num_steps=config.train.num_steps,
        config=plain,
    )


class SeedTwins:
    """Freezes runs that are alike in all but their seed, after the first of them: 10 µs each, and 60 with `freeze`."""

    def __init__(self, config: TrainConfig, first: RunSpec, memo: Memo) -> None:
        self._first = first
        self._label = run_label(config)
        self._digests = SeedDigests(first.config, memo)

    def freeze(self, seed: int, *, axes: Mapping[str, str], overrides: tuple[str, ...]) -> RunSpec:
        """What `freeze` makes of the configuration with this seed."""
        first, digest = self._first, self._digests.of(seed)
        return RunSpec(
            run_id=run_id_of(self._label, seed, digest), digest=digest, axes=axes, overrides=overrides,
            shape=first.shape, hardware=first.hardware, num_steps=first.num_steps,
            config={**first.config, "seed": seed},
        )  # fmt: skip
