"""The list of scenarios: each is a function of a scene and the undisturbed results, found here by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.slurm.scenarios.checks import References
from tests.slurm.scenarios.scene import Scene

Play = Callable[[Scene, References], None]
ONE, TWO_NODES = "testbed_x1", "testbed_x4"
BOTH = (ONE, TWO_NODES)
ANY = "any"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row of the table.

    Attributes:
        hardware: profiles that it is played with: one rank, and two nodes with two ranks each.
        variant: of the test Slurm.
        timeout_s: after which pytest gives up.
        faults: release, hardware or ANY -> what the product does wrong there; the test then must fail.
    """

    name: str
    play: Play
    hardware: tuple[str, ...]
    variant: str = ""
    timeout_s: int = 600
    faults: Mapping[str, str] = field(default_factory=dict)

    def fault(self, release: str, hardware: str) -> str | None:
        """What the product is known to do wrong here."""
        return next((self.faults[key] for key in (release, hardware, ANY) if key in self.faults), None)

    @property
    def says(self) -> str:
        """Given, when, then, in a sentence."""
        return (self.play.__doc__ or "").strip()


SCENARIOS: dict[str, Scenario] = {}
_MODULES = (
    "accounting", "batch_shell", "cancels", "controller", "moments", "nodes", "preemption", "ranks", "requeues",
    "storage", "timeouts",
)  # fmt: skip


def all_scenarios() -> dict[str, Scenario]:
    """The whole table, by name."""
    for module in _MODULES:
        importlib.import_module(f"tests.slurm.scenarios.{module}")
    return SCENARIOS


def ids() -> list[str]:
    """`name-x1`, `name-x4` of the whole table."""
    return [f"{name}-{short(hardware)}" for name, each in all_scenarios().items() for hardware in each.hardware]


def short(hardware: str) -> str:
    """`x1` of `testbed_x1`."""
    return hardware.removeprefix("testbed_")


def scenario(
    *hardware: str,
    variant: str = "",
    timeout_s: int = 600,
    faults: Mapping[str, str] | None = None,
) -> Callable[[Play], Play]:
    """Enters a function into the table under its own name."""

    def enter(play: Play) -> Play:
        name = play.__name__
        assert name not in SCENARIOS, f"two scenarios are called {name}"
        assert play.__doc__, f"{name} does not say what happens"
        SCENARIOS[name] = Scenario(
            name=name,
            play=play,
            hardware=hardware or BOTH,
            variant=variant,
            timeout_s=timeout_s,
            faults=faults or {},
        )
        return play

    return enter
