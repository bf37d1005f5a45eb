"""Task that no command can start again: from a notebook, a test, or an imported module.

The task is pickled with Hydra's state, in a file that only the user may read or write. The run checks owner and mode of
the file and of its folder before it reads the file. Nothing else in this package reads a pickle, and a training of the
shared loop does not import this module.

    python -m hpc_trainer.hydra_apps.pickled NAME      in a run, as its program
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from hydra.core.singleton import Singleton
from hydra.core.utils import run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.hydra_apps.returns import tell_return
from hpc_trainer.launch.hydra_app import NUMBER, OUTPUT, PICKLE
from hpc_trainer.record.files import make_folder, whole_file
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.trust import check_place, check_trusted


def start_of_pickled(task: TaskFunction) -> tuple[str, ...]:
    """Return the command of a pickled task: its name and a digest of its code, on which the run's id depends."""
    name = getattr(task, "__name__", type(task).__name__)
    digest = hashlib.sha256(cloudpickle.dumps(task)).hexdigest()[:8]
    return ("python", "-m", __name__, f"{name}-{digest}")


def pickle_of(task: TaskFunction, context: HydraContext, configs: Mapping[int, DictConfig]) -> tuple[str, bytes]:
    """Return name and content of the file for a batch of points; `configs`: number of a point -> its configuration."""
    state = {"task": task, "context": context, "configs": dict(configs), "singletons": Singleton.get_state()}
    content = cloudpickle.dumps(state)
    return f"{hashlib.sha256(content).hexdigest()[:16]}.pickle", content


def store(sweep: SweepPaths, name: str, content: bytes) -> None:
    """Write the file into the sweep's folder atomically, readable only by the user."""
    make_folder(sweep.folder)
    check_place(sweep.folder)
    sweep.pickles.mkdir(mode=0o700, exist_ok=True)
    check_trusted(sweep.pickles)
    with whole_file(sweep.pickles / name) as file:
        os.fchmod(file.fileno(), 0o600)  # also in a sweep that the group may read
        file.write(content)


def main() -> None:
    """Run the task of this run as Hydra's own launcher would."""
    output = Path(os.environ["HPC_TRAINER_RUN_DIR"])
    run = (
        output if output.name == os.environ["HPC_TRAINER_RUN_ID"] else output.parent
    )  # runs of earlier versions have no output folder of their own
    folder = SweepPaths(run.parent).pickles
    path = folder / Path(os.environ[PICKLE]).name
    try:
        for place in (folder, path):
            check_trusted(place)
    except HpcTrainerError as error:
        sys.exit(f"the pickled task is not read: {error}")
    state: dict[str, Any] = cloudpickle.loads(path.read_bytes())
    Singleton.set_state(state["singletons"])
    config = state["configs"][int(os.environ[NUMBER])]
    if OUTPUT not in os.environ:  # the app names no output folder, so the run's is used
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir, config.hydra.sweep.subdir = str(output.parent), output.name
    done = run_job(
        hydra_context=state["context"], task_function=state["task"], config=config, job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )  # fmt: skip
    tell_return(done.return_value)


if __name__ == "__main__":
    main()
