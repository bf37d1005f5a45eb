"""Transfer to W&B: at once, or, with WANDB_MODE=offline, as folders for `wandb sync`."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

from hpc_trainer.config.schema.tracker import TrackerConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.sync.logged import Done, Logged
from hpc_trainer.runs.files import write_json
from hpc_trainer.runs.modes import make_folder
from hpc_trainer.runs.reading import read_json
from hpc_trainer.runs.shared_folder import is_there, rename
from hpc_trainer.runs.states import RunState

_ENDED_BADLY = (RunState.FAILED, RunState.OUT_OF_MEMORY, RunState.TIMEOUT, RunState.NODE_FAIL, RunState.CANCELLED)
_WHOLE = "whole.json"
# No facts about this machine or process: the training ran in another one.
_SETTINGS = {
    "console": "off", "silent": True, "disable_git": True, "disable_code": True, "program": "hpc-trainer",
    "x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True, "x_save_requirements": False,
}  # fmt: skip


class ToWandb:
    """Destination that keeps one W&B run for each run.

    W&B appends all data, also data that it has already. So an online sync sends only the steps after the last one that
    the server reports, and a folder for `wandb sync` holds no step of an earlier folder.
    """

    def __init__(self, config: TrackerConfig) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb: Any = importlib.import_module("wandb")
        settings = self._wandb.setup().settings
        self.is_offline = settings.mode in ("offline", "dryrun")
        if not self.is_offline and not self._wandb.login(prompt=False, verify=False):
            self.close()
            raise ConfigError(
                f"W&B has no API key for {settings.base_url} here. Run: wandb login. Without the internet: "
                "WANDB_MODE=offline hpc-trainer sync"
            )
        self._config = config
        self.where = f"{'offline' if self.is_offline else settings.base_url}:{config.entity or ''}"

    def send(self, logged: Logged, sent: int | None) -> Done:
        """Send the steps after the last one that W&B has."""
        work = logged.paths.wandb_work
        self.settle(logged, sent)
        shutil.rmtree(work, ignore_errors=True)  # the rest of a killed sync
        make_folder(work)
        run = self._wandb.init(
            entity=self._config.entity, project=self._config.project or logged.sweep, group=logged.sweep,
            id=logged.key, name=logged.paths.run_id, config={**logged.config, "hpc_trainer": dict(logged.tags)},
            resume="allow", reinit="create_new", dir=str(work), settings=self._wandb.Settings(**_SETTINGS),
        )  # fmt: skip
        first = (-1 if sent is None else sent) + 1 if self.is_offline else run.starting_step
        new = [step for step in logged.steps if step.step >= first]
        for step in new:
            run.log({**step.values, "_timestamp": step.time}, step=step.step)
        run.summary["state"] = logged.state.value
        folder, url = Path(run.settings.sync_dir), run.url
        run.finish(exit_code=int(logged.state in _ENDED_BADLY))
        if self.is_offline:
            write_json(work / _WHOLE, {"step": logged.last_step})
            return Done(len(new), str(logged.paths.wandb / folder.name))
        shutil.rmtree(work, ignore_errors=True)
        # The server now has the steps of the offline folders; `wandb sync` would add them once more.
        shutil.rmtree(logged.paths.wandb, ignore_errors=True)
        return Done(len(new), url)

    def settle(self, logged: Logged, sent: int | None) -> None:
        """Move a complete folder to its place once its steps are recorded as sent; a kill in between loses no step."""
        work, place = logged.paths.wandb_work, logged.paths.wandb
        whole = read_json(work / _WHOLE)
        if whole is None or sent is None or (whole["step"] or 0) > sent:
            return
        make_folder(place)
        for folder in (work / "wandb").glob("offline-run-*"):
            name = folder.name
            while is_there(place / name):  # two syncs in one second
                name += "-next"
            rename(folder, place / name)
        shutil.rmtree(work, ignore_errors=True)

    def close(self) -> None:
        """End W&B's own process."""
        self._wandb.teardown()
