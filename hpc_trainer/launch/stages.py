"""Chain of stages (`sweep.stages`): one command line becomes a grid and a sweep for each stage.

Each stage is an ordinary sweep, NAME-STAGE, so that every verb works on it. Its folder has a record of the chain, by
which `status NAME` and `cancel NAME` find all stages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.config import script_words
from hpc_trainer.config.compose.fast_compose import GridComposer
from hpc_trainer.config.compose.grid import read_stages
from hpc_trainer.config.compose.overrides import in_full
from hpc_trainer.config.compose.own_files import config_dirs_of
from hpc_trainer.config.schema.train import SweepConfig, SweepStage
from hpc_trainer.errors import ConfigError, did_you_mean
from hpc_trainer.launch.freeze import Grid, freeze_grid
from hpc_trainer.launch.grids import Submitted, plan_grid, submit_grid
from hpc_trainer.launch.plan import SweepPlan
from hpc_trainer.record.chain import PLANNED, Planned, awaited_of, write_chain

_OF_STAGE = re.compile(r"([A-Za-z0-9_-]+):(.+)", re.DOTALL)
_OF_CHAIN = frozenset({"sweep", "grid", "sweep_name"})


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a chain, with its frozen grid."""

    name: str
    grid: Grid
    planned: Planned
    """Stages of the chain that this stage can follow, and those that it cannot."""

    @property
    def follows(self) -> list[str]:
        """Names of the stages and sweeps that runs of the stage follow, each once."""
        folders = [
            followed.folder.name
            for spec in self.grid.specs
            for followed in awaited_of(spec.config, self.grid.sweep.folder.parent)
        ]
        stages = {sweep: stage for stage, sweep in self.planned.names.items()}
        return [stages.get(folder, folder) for folder in dict.fromkeys(folders)]


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages of one command line, in order."""

    name: str
    stages: tuple[Stage, ...]


def freeze_chain(
    overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), trust: Sequence[str] = ()
) -> Chain | None:
    """Return the chain that a command line describes; None if it describes one grid.

    Raises:
        ConfigError: a stage has no name, names a later stage, or cannot be frozen; each message names its stage.
    """
    if not any(_key(word) in ("sweep", "grid") for word in overrides):
        return None
    with GridComposer(config_dirs_of(config_dirs)) as composer:
        shared = [word for word in overrides if not _OF_STAGE.fullmatch(word)]
        section = read_stages(composer, shared)
    if section is None:
        return None

    from hpc_trainer.launch.searches import search_kind  # a grid needs nothing of it

    name = _chain_name(shared)
    _check(section, name)
    words = _words_of_stages(overrides, section.stages)
    stages: list[Stage] = []
    planned = Planned()
    for number, stage in enumerate(section.stages):
        later = frozenset(other.name for other in section.stages[number:])
        planned = dataclasses.replace(planned, later=later)
        with _planning(planned):
            try:
                line = _line_of(stage, [*shared, *words[stage.name]], name)
                if search_kind(line) is not None:
                    raise ConfigError(
                        "a stage cannot be a search. Submit the search first, and leave it out of the stages; a stage "
                        "may follow it, with init_from=best:SWEEP or after=SWEEP."
                    )
                grid = freeze_grid(line, config_dirs=config_dirs, trust=trust)
            except ConfigError as error:
                raise ConfigError(
                    "\n".join(f"stage {stage.name}: {line}" for line in str(error).splitlines())
                ) from error
        stages.append(Stage(stage.name, grid, planned))
        planned = Planned(
            sweeps={**planned.sweeps, grid.sweep.folder: {spec.run_id: spec for spec in grid.specs}},
            names={**planned.names, stage.name: grid.sweep.name},
        )
    return Chain(name, tuple(stages))


@contextlib.contextmanager
def _planning(planned: Planned) -> Iterator[None]:
    token = PLANNED.set(planned)
    try:
        yield
    finally:
        PLANNED.reset(token)


def _key(word: str) -> str:
    return word.split("=", 1)[0].lstrip("+~").split("@")[0]


def _chain_name(words: Sequence[str]) -> str:
    """Return the name of the chain: `sweep_name`, else the name of the file with the stages."""
    named = {_key(in_full(word)): word.partition("=")[2].strip("'\"") for word in words}
    return named.get("sweep_name") or Path(named["sweep"]).name


def _check(section: SweepConfig, chain: str) -> None:
    """Check the names of stages, and that the file describes nothing else. Raises ConfigError."""
    others = [name for name in ("axes", "zip", "exclude", "blocks") if getattr(section, name)]
    if others:
        raise ConfigError(
            f"sweep.stages and sweep.{others[0]} describe two different things. Put axes into the overrides of a "
            "stage, as optim.lr=1e-3,1e-4."
        )
    seen: set[str] = set()
    for number, stage in enumerate(section.stages, 1):
        if not stage.name:
            raise ConfigError(
                f"stage {number} of sweep.stages has no name: its sweep is {chain}-NAME. Write name: NAME."
            )
        if not script_words.NAME.fits(stage.name) or not re.fullmatch(r"[A-Za-z0-9_-]+", stage.name):
            usable = re.sub(r"[^A-Za-z0-9_-]+", "-", stage.name).strip("-") or f"stage{number}"
            raise ConfigError(
                f"stage {number}: name={stage.name!r} is a part of a folder's name: letters, digits, _ and - only. Use "
                f"{usable}."
            )
        if stage.name in seen:
            raise ConfigError(f"two stages are named {stage.name}. Give one of them another name.")
        seen.add(stage.name)


def _words_of_stages(words: Sequence[str], stages: Sequence[SweepStage]) -> dict[str, list[str]]:
    """Return the arguments STAGE:OVERRIDE of the command line by stage. Raises ConfigError for an unknown stage."""
    own: dict[str, list[str]] = {stage.name: [] for stage in stages}
    for word in words:
        match = _OF_STAGE.fullmatch(word)
        if match is None:
            continue
        if match[1] not in own:
            raise ConfigError(
                f"{word}: there is no stage {match[1]}. {did_you_mean(match[1], own)}Stages: {', '.join(own)}."
            )
        own[match[1]].append(match[2])
    return own


def _line_of(stage: SweepStage, given: Sequence[str], chain: str) -> list[str]:
    """Return the overrides of a stage's grid: the stage's, less keys of the command line, then the command line's."""
    given = [word for word in given if _key(word) not in _OF_CHAIN]
    keys = {_key(in_full(word)) for word in given}
    own = [*stage.overrides, *([] if stage.hardware is None else [f"hardware={stage.hardware}"])]
    kept = [word for word in own if _key(in_full(word)) not in keys]
    return [*kept, *given, f"sweep_name={chain}-{stage.name}"]


def plan_chain(chain: Chain, *, retry_failed: bool = False, fresh: bool = False) -> list[SweepPlan]:
    """Return the plan of each stage; nothing is written."""
    plans = []
    for stage in chain.stages:
        with _planning(stage.planned):
            plans.append(plan_grid(stage.grid, retry_failed=retry_failed, fresh=fresh))
    return plans


def submit_chain(
    chain: Chain, *, retry_failed: bool = False, fresh: bool = False, command_line: Sequence[str] | None = None
) -> list[Submitted]:
    """Submit the stages in order; a repeated call does no harm.

    Raises:
        ConfigError: the plan of a stage has a problem; nothing was submitted.
    """
    plans = plan_chain(chain, retry_failed=retry_failed, fresh=fresh)
    problems = [
        f"stage {stage.name}: {problem}"
        for stage, plan in zip(chain.stages, plans, strict=True)
        for problem in plan.problems
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    done = []
    for stage in chain.stages:
        with _planning(stage.planned):
            done.append(submit_grid(stage.grid, retry_failed=retry_failed, fresh=fresh, command_line=command_line))
        write_chain(stage.grid.sweep, chain.name, [other.grid.sweep.name for other in chain.stages])
    return done
