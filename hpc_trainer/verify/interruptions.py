"""Kinds of interruptions, and the interface between `verify resume` and its ranks: plan of interruptions, trace names.

No slow imports: the command line needs the kinds.
"""

from __future__ import annotations

import enum
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_trainer.runtime.rank_env import PROBE_VARIABLE


class InterruptionKind(str, enum.Enum):
    """Kind of interruption of a run that `verify preempt` watches."""

    preempt = "preempt"
    timeout = "timeout"
    cancel = "cancel"
    nodefail = "nodefail"
    kill = "kill"


VARIABLE = "HPC_TRAINER_INTERRUPTIONS"
"""Environment variable of a run of `verify resume`: the interruptions of its attempts, or `NONE`."""
NONE = "none"
LOOSE, LOOSE_BUFFER = "loose.", "loose-buffer."
"""Prefixes in a trace for parts of a model that no checkpoint holds: attributes, and non-persistent buffers."""
ALL_RANKS = -1
_KINDS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """End of one attempt: signal `number` to `rank` (-1: all), `fraction` of a step (0 to 1) after `step` is done."""

    step: int
    number: signal.Signals
    fraction: float
    rank: int = ALL_RANKS

    def __str__(self) -> str:
        """Return a text such as `SIGTERM to rank 1 at step 7`."""
        if self.number is signal.SIGKILL:
            return f"kill -9 at step {self.step}"
        return f"{self.number.name} to rank {self.rank} at step {self.step}"


def draw(seed: int, *, num_steps: int, every_steps: int, count: int, world_size: int) -> list[Interruption]:
    """Draw up to `count` interruptions at different steps, in order; the same seed gives the same interruptions.

    Steps up to `every_steps`, the distance of checkpoints, are left out: a kill there leads back to step 0 and shows
    nothing. The last three steps are left out: a rank acts on a signal up to two steps later, when the run would be
    done. So there are num_steps - every_steps - 3 steps to draw from, and no more interruptions than these.

    Kills and signals alternate, and the first kind is drawn: two interruptions are of two kinds.
    """
    chance = random.Random(seed)  # noqa: S311  # no attacker to fear
    legal = range(every_steps + 1, num_steps - 2)
    steps = sorted(chance.sample(legal, min(count, len(legal))))
    first = chance.randrange(2)
    drawn = []
    for index, step in enumerate(steps):
        number = _KINDS[2] if (index + first) % 2 else chance.choice(_KINDS[:2])
        rank = ALL_RANKS if number is signal.SIGKILL else chance.randrange(world_size)
        drawn.append(Interruption(step=step, number=number, fraction=round(chance.random(), 2), rank=rank))
    return drawn


def to_text(interruptions: Sequence[Interruption]) -> str:
    """Return interruptions as text for the environment, such as `7:SIGTERM:0.4:1,19:SIGKILL:0.2:-1`."""
    return ",".join(f"{item.step}:{item.number.name}:{item.fraction}:{item.rank}" for item in interruptions) or NONE


def from_text(text: str) -> list[Interruption]:
    """Parse the result of `to_text`; raise ValueError for other text."""
    parsed = []
    for word in text.split(",") if text != NONE else ():
        step, name, fraction, rank = word.split(":")
        parsed.append(
            Interruption(step=int(step), number=signal.Signals[name], fraction=float(fraction), rank=int(rank))
        )
    return parsed


def environment(interruptions: Sequence[Interruption]) -> dict[str, str]:
    """Return the environment variables of ranks that are watched and interrupted."""
    return {PROBE_VARIABLE: "hpc_trainer.verify.probe", VARIABLE: to_text(interruptions)}
