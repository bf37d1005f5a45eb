"""A run's weights in a folder of their own: one file, the configuration, and ten lines that load it."""

from __future__ import annotations

import enum
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpc_trainer import errors
from hpc_trainer.config.rules.retention import best_is_max
from hpc_trainer.config.schema.hf_model import CONFIG_FILE, HfConfig
from hpc_trainer.config.schema.model import CustomModelConfig
from hpc_trainer.config.schema.parallel import Sync
from hpc_trainer.config.schema.task import CustomTaskConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError
from hpc_trainer.operate.show import Known
from hpc_trainer.runs.checkpoint_folders import committed, step_name
from hpc_trainer.runs.files import fsync_folder
from hpc_trainer.runs.layout import RunPaths
from hpc_trainer.runs.metrics_log import scores_in
from hpc_trainer.runtime.start import start_words
from hpc_trainer.training.checkpoint.retention import Retention

FORMATS = {"safetensors": "model.safetensors", "torch": "model.pt"}
MODEL = "model"
# Of features/averaged_weights: its name in a checkpoint, and what its names begin with.
_AVERAGE = ("ema", "module.")
# As the resume contract: weights are handed on, and the site's environment and folders are nobody's business.
_NOT_KEPT = frozenset({"cluster", "paths"})
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. `weights`: average, if they are those of `train.ema_decay`, else raw."""

    run_id: str
    step: int
    folder: str
    files: tuple[str, ...]
    weights: str
    num_tensors: int
    num_elements: int
    num_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which weights, and where to. `step`: None is the newest checkpoint; `best`: by `checkpoint.keep_best`.

    `raw`: the weights that training goes on from, of a run that averages them. `name`: the module, as a loop of a
    person's own has called it. `output`: None is a folder in the current one.
    """

    to: str = "safetensors"
    best: bool = False
    step: int | None = None
    raw: bool = False
    name: str = MODEL
    output: Path | None = None


def export(run: Known, wanted: Wanted) -> Exported:
    """Writes the folder, whole or not at all.

    Raises:
        ConfigError: what is wanted cannot be, or the folder is there already.
        RunStateError: the run has no such checkpoint.
        CheckpointError: the checkpoint is damaged, or has no such module.
    """
    paths, config = run.sweep.run(run.spec.run_id), run.spec.typed()
    if wanted.to not in FORMATS:
        raise ConfigError(f"--to {wanted.to}: there is no such format. Use {' or '.join(FORMATS)}.")
    if run.spec.is_program:
        raise RunStateError(f"{paths.run_id} is a program of yours: what it saved is in {paths.own_checkpoints}.")
    for attempt in range(_TRIES):
        step = _step(paths, config, wanted)
        folder = wanted.output or Path(f"{paths.run_id}-{step_name(step)}")
        if os.path.lexists(folder):
            raise ConfigError(f"{folder} is there already, and is left as it is. Name another folder: --output FOLDER.")
        try:
            return _write(paths, config, run.spec.config, wanted, step, folder.absolute())
        except HpcTrainerError:
            # A run that trains deletes old checkpoints: then there is a newer one.
            if (paths.checkpoints / step_name(step)).exists() or attempt == _TRIES - 1:
                raise
    raise AssertionError


def _step(paths: RunPaths, config: TrainConfig, wanted: Wanted) -> int:
    steps = [step for step, _ in committed(paths.checkpoints)]
    if not steps:
        raise RunStateError(
            f"{paths.run_id} has no checkpoint yet. Look: hpc-trainer status {paths.folder.parent.name}"
        )
    if wanted.best and wanted.step is not None:
        raise ConfigError("--best and --step name two checkpoints. Use one of them.")
    if wanted.step is not None:
        if wanted.step not in steps:
            raise ConfigError(f"--step {wanted.step}: there is no such checkpoint. There are: {_listed(steps)}.")
        return wanted.step
    if not wanted.best:
        return steps[0]
    metric = config.checkpoint.keep_best
    if metric is None:
        raise ConfigError(
            "--best takes the checkpoint that checkpoint.keep_best=METRIC keeps, and this run has none. Leave it out "
            f"for the newest, or use --step: {_listed(steps)}."
        )
    scores = scores_in(paths.metrics, metric)
    best = Retention(best_is_max=best_is_max(config.checkpoint)).best({s: scores[s] for s in steps if s in scores})
    if best is None:
        raise RunStateError(f"no checkpoint of {paths.run_id} has a value of {metric}. Use --step: {_listed(steps)}.")
    return best


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps)))


def _write(
    paths: RunPaths, config: TrainConfig, plain: Mapping[str, Any], wanted: Wanted, step: int, folder: Path
) -> Exported:
    import yaml

    is_average = config.train.ema_decay is not None and not wanted.raw
    file = FORMATS[wanted.to]
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        told = _ask(
            checkpoints=str(paths.checkpoints), step=step, target=str(temporary / file), name=wanted.name,
            over=_AVERAGE if is_average else None,
        )  # fmt: skip
        kept = {key: value for key, value in plain.items() if key not in _NOT_KEPT}
        (temporary / "config.yaml").write_text(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))
        title = f"{paths.run_id}, step {step}, {'averaged' if is_average else 'raw'} weights"
        facts = (told["made_with"] or {}).get("dataset") if wanted.name == MODEL else None
        (temporary / "load.py").write_text(_snippet(title, config, file, facts))
        more: tuple[str, ...] = ()
        if isinstance(config.model, HfConfig) and facts:
            described = config.model.file_for(tuple(facts["input_shape"]), facts["num_classes"])
            more = (CONFIG_FILE,)
            (temporary / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n")
        temporary.rename(folder)
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    apart = config.parallel.sync is not Sync.every_step and step != config.train.num_steps
    return Exported(
        run_id=paths.run_id, step=step, folder=str(folder), files=(file, "config.yaml", "load.py", *more),
        weights="average" if is_average else "raw", num_tensors=told["num_tensors"],
        num_elements=told["num_elements"], num_bytes=told["num_bytes"],
        notes=("With parallel.sync ranks differ between two averages: these are rank 0's.",) if apart else (),
    )  # fmt: skip


def _ask(**asked: Any) -> dict[str, Any]:
    """What the process with torch has done. Raises the error that it met."""
    command = [sys.executable, *start_words("hpc_trainer.worker.take_out")]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        said = ": ".join([f"exit code {done.returncode}", *done.stderr.strip().splitlines()[-1:]])
        raise RunStateError(f"the weights were not read: {said}")
    told: dict[str, Any] = json.loads(lines[-1])
    if "error" not in told:
        return told
    kind = getattr(errors, told["error"], None)
    if kind is None:
        raise OSError(f"{told['error']}: {told['message']}")
    raise kind(told["message"])


def _snippet(title: str, config: TrainConfig, file: str, facts: Any) -> str:
    """Python that loads the file into the model; into a dictionary, where nobody knows how the model is built.

    Args:
        facts: what the checkpoint says of the data set.
    """
    reader, read = "from safetensors.torch import load_file", f'load_file(here / "{file}")'
    if file.endswith(".pt"):
        reader, read = "import torch", f'torch.load(here / "{file}", weights_only=True)'
    if (
        config.train.main is not None
        or not isinstance(facts, dict)
        or not {"input_shape", "num_classes"} <= facts.keys()
    ):
        return (
            f'"""{title}."""\n\nfrom pathlib import Path\n\n{reader}\n\nhere = Path(__file__).parent\n'
            f"weights = {read}\n# Build the model as {config.train.main or 'the run'} does, then: "
            "model.load_state_dict(weights)\n"
        )
    module, _, name = config.model._target_.rpartition(".")
    model = config.model
    kind = type(model)
    # A task of one's own takes data without a shape, which a checkpoint holds as [].
    has_shape = facts["input_shape"] or not isinstance(config.task, CustomTaskConfig)
    shape = {"input_shape": tuple(facts["input_shape"])} if has_shape else {}
    if facts["num_classes"] is not None:
        shape["num_classes"] = facts["num_classes"]
    imports = [reader, f"from {module} import {name}"]
    standard = "from pathlib import Path"
    if isinstance(model, CustomModelConfig):
        where = f"\n\nRun it where {module.partition('.')[0]} can be imported."
        built = f"model = {name}(**{model.kwargs!r})"
        if shape:
            standard, built = f"import inspect\n{standard}", _built_own(name, shape, model.kwargs)
    else:
        where, names = "", [each.name for each in fields(kind) if each.name not in ("name", "_target_")]
        values = {key: getattr(model, key) for key in names}
        words = {type(value).__name__ for value in values.values() if isinstance(value, enum.Enum)}
        imports.append(f"from {kind.__module__} import {', '.join(sorted({kind.__name__, *words}))}")
        listed = ", ".join(f"{key}={_written(value)}" for key, value in values.items())
        known = ", ".join(f"{key}={value!r}" for key, value in shape.items())
        built = f"model = {name}({kind.__name__}({listed}), {known})"
    return (
        f'"""{title}.{where}"""\n\n{standard}\n\n' + "\n".join(sorted(imports)) + "\n\n"
        f"here = Path(__file__).parent\n{built}\nmodel.load_state_dict({read})\nmodel.eval()\n"
    )


def _written(value: Any) -> str:
    """As Python reads it."""
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def _built_own(name: str, shape: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str:
    """A class is given what it has arguments for, as in the run; one sees them only where it can be imported."""
    return (
        f"shape = {shape!r}\n"
        f"arguments = inspect.signature({name}).parameters\n"
        "takes_all = any(each.kind is each.VAR_KEYWORD for each in arguments.values())\n"
        "given = {name: value for name, value in shape.items() if takes_all or name in arguments}\n"
        f"model = {name}(**given, **{kwargs!r})"
    )
