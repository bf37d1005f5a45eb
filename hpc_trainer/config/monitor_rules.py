"""Rules of `monitor/`'s profile."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.checks import at_least
from hpc_trainer.config.schema.train import TrainConfig

# A step of a large model leaves some 10,000 spans in the trace, 1 MB.
_MOST_PROFILED = 1000


def monitor_problems(config: TrainConfig) -> Iterator[str]:
    """What the keys of the profile break, a line each."""
    monitor, num_steps = config.monitor, config.train.num_steps
    problems = [
        *at_least("monitor.profile_steps", monitor.profile_steps, 0, most=_MOST_PROFILED),
        *at_least("monitor.profile_warmup_steps", monitor.profile_warmup_steps, 1),
    ]
    yield from problems
    if problems or not monitor.profile_steps:
        return
    if config.train.main is not None:
        yield (
            f"monitor.profile_steps={monitor.profile_steps} watches the shared loop, and train.main="
            f"{config.train.main} is your own. Use monitor.profile_steps=0, and torch.profiler in your loop."
        )
    elif monitor.profile_warmup_steps + monitor.profile_steps > num_steps:
        warmup = max(1, num_steps - monitor.profile_steps)
        steps = "" if monitor.profile_steps < num_steps else f" monitor.profile_steps={num_steps - 1}"
        yield (
            f"monitor.profile_warmup_steps={monitor.profile_warmup_steps} and profile_steps={monitor.profile_steps} "
            f"must be at most train.num_steps={num_steps} together. Use "
            + (f"monitor.profile_warmup_steps={warmup}{steps}." if num_steps > 1 else "monitor.profile_steps=0.")
        )
