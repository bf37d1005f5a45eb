"""Rules about the device: unused memory, a slow number format, a GPU that waits for its host or is throttled."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.gpu_types import find_gpu_type
from hpc_trainer.config.mesh import divisors, num_parts
from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.config.schema.train import CompileMode, Recompute
from hpc_trainer.operate.advice.facts import IDLE_GPU, Facts, RankUse
from hpc_trainer.operate.advice.rule import LEAST_LOST_S, Change, Finding, Gain, Rule
from hpc_trainer.record.telemetry import HARMFUL, mean_of

_ROOMY, _FULL = 0.5, 0.85  # of the GPU's memory
_KEPT_BY_FULL = 0.4  # of the activations: config/rules/memory.py
_TIME_OF_FULL = 4 / 3
_LITTLE_WORK, _LITTLE_WAIT = 0.5, 0.1
_THROTTLED = 0.3  # of the samples
_LITTLE, _MUCH = 0.95, 0.6  # of the highest clock
_AT_LIMIT = "at its power limit"
_SAMPLES = 5
_AMPERE = 8
_CAPPED = ("power_cap",)


def _memory(facts: Facts) -> tuple[float, float, float] | None:
    """Return the bytes of activations, of all else at the peak, and of a GPU's limit; None if not measured."""
    memory = facts.memory
    if facts.config.hardware.device_type != "cuda" or not {"activations", "peak", "limit"} <= memory.keys():
        return None
    activations, peak, limit = memory["activations"], memory["peak"], memory["limit"]
    return (activations, max(0.0, peak - activations), limit) if activations > 0 and limit > 0 else None


def _utilisation(facts: Facts) -> float | None:
    """Return the mean utilisation of GPUs that are not idle; another rule reports idle GPUs."""
    shares = [rank.utilisation for rank in facts.ranks if rank.utilisation is not None and rank.samples >= _SAMPLES]
    return mean_of([share for share in shares if share >= IDLE_GPU] or shares)


def _recompute(facts: Facts) -> Iterator[Finding]:
    memory, train = _memory(facts), facts.config.train
    if memory is None or train.recompute is Recompute.none:
        return
    activations, others, limit = memory
    wanted = others + activations / _KEPT_BY_FULL
    if wanted > _FULL * limit:
        return
    now, then = (others + activations) / limit, wanted / limit
    gain = Gain(share=1 - 1 / _TIME_OF_FULL, is_bound=train.recompute is not Recompute.full)
    seen = f"activations are computed twice, and {now:.0%} of the memory is used; without it {then:.0%} would be"
    yield Finding(seen, [Change({"train.recompute": Recompute.none}, gain)])


def _micro_batch(facts: Facts) -> Iterator[Finding]:
    memory, config = _memory(facts), facts.config
    micro, accum = config.train.given_micro_batch_size, config.train.grad_accum_steps or 1
    if memory is None or micro is None or accum == 1:
        return
    activations, others, limit = memory
    if (others + activations) / limit > _ROOMY:
        return
    share = config.train.global_batch_size // num_parts(config.train, config.hardware, config.parallel)
    fits = [size for size in divisors(share) if others + activations * size / micro <= _FULL * limit]
    utilisation = _utilisation(facts)
    if utilisation is None:
        return
    changes = []
    for size in sorted((size for size in fits if size > micro), reverse=True):
        values = {"train.micro_batch_size": size, "train.grad_accum_steps": share // size}
        # The GPU's idle time between passes is proportional to their number.
        changes.append(Change(values, Gain(share=(1 - utilisation) * (1 - micro / size))))
    used = (others + activations) / limit
    yield Finding(
        f"{used:.0%} of the GPU's memory is used, and a step takes {accum} passes of {micro} samples", changes
    )


def _precision(facts: Facts) -> Iterator[Finding]:
    dtype, hardware = facts.config.precision.compute_dtype, facts.config.hardware
    if dtype not in (Dtype.fp32, Dtype.tf32) or hardware.device_type != "cuda" or not facts.is_shared_loop:
        return
    name = hardware.gpu_type or next((rank.device for rank in facts.ranks if rank.device), None)
    gpu, utilisation = find_gpu_type(name), _utilisation(facts)
    if gpu is None or gpu.capability < _AMPERE or (utilisation is not None and utilisation < _LITTLE_WORK):
        return
    if facts.pace is None or facts.pace.seconds < LEAST_LOST_S:
        return
    # Matrix products gain more, by their peak rates; memory-bound operations move half the bytes.
    change = Change({"precision.compute_dtype": Dtype.bf16}, Gain(share=0.5))
    yield Finding(f"computes in {dtype.value} on {name}, which has bf16", [change])


def _host_bound(facts: Facts) -> Iterator[Finding]:
    utilisation, pace, train = _utilisation(facts), facts.pace, facts.config.train
    if utilisation is None or pace is None or not facts.is_shared_loop:
        return
    if utilisation > _LITTLE_WORK or pace.wait_share > _LITTLE_WAIT:
        return
    gain = Gain(share=1 - max(utilisation, 0.01))
    if not train.compile:
        graphs = {"train.compile": True, "train.compile_mode": CompileMode.reduce_overhead}
        changes = [Change(graphs, gain), Change({"train.compile": True}, gain)]
    else:
        changes = [Change({"train.compile_mode": CompileMode.reduce_overhead}, gain)]
    seen = (
        f"the GPU is at work {utilisation:.0%} of the time, and data make it wait {pace.wait_share:.0%}: the host does"
    )
    yield Finding(seen, changes)


def _straggler(facts: Facts) -> Iterator[Finding]:
    slow = facts.stragglers[0] if facts.stragglers else None
    if slow is None or facts.pace is None:
        return
    gain = Gain(share=min(1.0, max(0.0, slow.own_s - slow.others_s) / facts.pace.step_s))
    yield Finding(
        slow.in_words(), [_without_node(facts, slow.node, gain, f"look at {slow.node}: what else runs there?")]
    )


def _without_node(facts: Facts, node: str, gain: Gain, otherwise: str) -> Change:
    """Return a change that excludes a node on Slurm; elsewhere, or if it is excluded already, the text `otherwise`."""
    excluded = facts.config.hardware.exclude
    if not facts.is_on_slurm or node in (excluded or "").split(","):
        return Change({}, gain, otherwise)
    return Change({"hardware.exclude": f"{excluded},{node}" if excluded else node}, gain)


def _held_back(facts: Facts) -> Iterator[Finding]:
    ranks = [rank for rank in facts.ranks if rank.samples >= _SAMPLES and rank.clock_share is not None]
    for words, what, most in ((HARMFUL, "held back by heat or its power supply", _LITTLE), (_CAPPED, _AT_LIMIT, _MUCH)):
        worst = max(ranks, key=lambda rank: _share(rank, words), default=None)
        if worst is None or worst.clock_share is None or worst.clock_share > most:
            continue
        if (share := _share(worst, words)) < _THROTTLED:
            continue
        limit = f" of {worst.power_limit_w:.0f} W" if words is _CAPPED and worst.power_limit_w else ""
        seen = (
            f"the GPU of {worst.name} on {worst.node} is {what}{limit} {share:.0%} of the time, and its clock at "
            f"{worst.clock_share:.0%} of its highest"
        )
        gain = Gain(share=1 - worst.clock_share)
        otherwise = f"ask the site about the {'power limit' if words is _CAPPED else 'cooling'} of {worst.node}"
        yield Finding(seen, [_without_node(facts, worst.node, gain, otherwise)])


def _share(rank: RankUse, words: tuple[str, ...]) -> float:
    return max((rank.throttle.get(word, 0.0) for word in words), default=0.0)


RULES = (
    Rule(
        name="recompute",
        when="train.recompute, and without it ≤ 85 % of the GPU's memory would be used",
        why="full keeps 40 % of the activations and takes a third more time",
        find=_recompute,
    ),
    Rule(
        name="micro-batch",
        when="gradients are accumulated, ≤ 50 % of the GPU's memory is used, and it idles; the value uses ≤ 85 %",
        why="activations grow with the micro-batch, all else stays; gaps between passes go with their number",
        find=_micro_batch,
    ),
    Rule(
        name="precision",
        when="fp32 or tf32 on a GPU with bf16 (Ampere and later) that is ≥ 50 % at work",
        why="half the bytes; products gain more, by the peaks of the datasheets",
        find=_precision,
    ),
    Rule(
        name="host-bound",
        when="the GPU is ≤ 50 % at work, and a step waits for data ≤ 10 % of its time",
        why="what is left is the host: Python and launches of kernels",
        find=_host_bound,
    ),
    Rule(
        name="straggler",
        when="a rank's own work takes ≥ monitor.straggler_factor (1.3) times as long as the others' at the last look",
        why="docs/decisions/0048-stragglers.md; the gain is the difference, as a share of the step",
        find=_straggler,
    ),
    Rule(
        name="held-back",
        when="≥ 30 % of the samples name heat or power supply, clock ≤ 95 % of its highest; the power limit: ≤ 60 %",
        why="a GPU that works hard is at its power limit, and then a good part below its highest clock",
        find=_held_back,
    ),
)
