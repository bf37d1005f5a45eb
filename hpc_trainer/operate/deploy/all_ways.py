"""One checkpoint in every format and every number format that it can have."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.deploy.checkpoint import check_trained_here, step_of
from hpc_trainer.operate.deploy.export import Exported, Wanted, export
from hpc_trainer.operate.show import Known
from hpc_trainer.runs.checkpoint_folders import step_name
from hpc_trainer.runs.exported import FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class AllExported:
    """The exports, each in a folder of `folder`, and why there is none of the others: by name."""

    folder: str
    exports: tuple[Exported, ...]
    refused: dict[str, str]


def export_all(run: Known, wanted: Wanted, tell: Callable[[str], None]) -> AllExported:
    """Exports one after the other, and tells of each before it begins. Killed in between, whole ones are there.

    Raises:
        ConfigError: the folder is there already, or the model can have none of the forms.
        RunStateError, CheckpointError, DataError: what they are made of cannot be read.
    """
    check_trained_here(run)
    paths, config = run.sweep.run(run.spec.run_id), run.spec.typed()
    step = step_of(paths, config, wanted.which)
    folder = (wanted.output or Path(f"{paths.run_id}-{step_name(step)}-all")).absolute()
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} is there already, and is left as it is. Name another folder: --output FOLDER.")
    done: list[Exported] = []
    refused: dict[str, str] = {}
    which = dataclasses.replace(wanted.which, best=False, step=step)
    for to, kind in ((to, kind) for to, each in FORMATS.items() for kind in (None, *each.quantized)):
        name = to + (f"-{kind}" if kind else "")
        tell(name)
        try:
            done.append(
                export(run, dataclasses.replace(wanted, which=which, to=to, quantize=kind, output=folder / name))
            )
        except ConfigError as error:  # this model in this form; the others may be
            refused[name] = str(error)
    if not done:
        raise ConfigError("\n".join(refused.values()))
    return AllExported(folder=str(folder), exports=tuple(done), refused=refused)
