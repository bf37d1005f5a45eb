"""`export` on the login node: a run's model in a folder, with its configuration, a card, and load.py, which loads it.

A process with torch fills a folder with a hidden name, which gets its own name when it is complete. One checkpoint can
be exported in several forms: in every format and quantization, or in those that a file of `sweep/` lists.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.own_files import config_dirs_of
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.deploy.exported import (
    CARD,
    CARD_TEXT,
    CONFIG,
    FORMATS,
    LOAD,
    QUANTIZED,
    check_format,
    options_text,
    prune_values,
)
from hpc_trainer.deploy.request import (
    MODEL,
    Which,
    check_trained_here,
    facts_of_run,
    new_data,
    notes_of,
    step_of,
    weights_request,
)
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.operate.show import Known
from hpc_trainer.record.chain import started
from hpc_trainer.record.checkpoint_folders import step_name
from hpc_trainer.record.files import fsync_folder, rename
from hpc_trainer.runtime.torch_process import ask

_TORCH_SIDE = "hpc_trainer.deploy.export_torch"
# Exports are passed on to others, so the site's environment and folders are left out, as in the resume contract.
_NOT_KEPT = frozenset({"cluster", "paths"})
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export. `weights` is `average` with `train.ema_decay`, else `raw`. `card` is card.json."""

    run_id: str
    step: int
    folder: str
    files: tuple[str, ...]
    weights: str
    num_tensors: int
    num_elements: int
    num_bytes: int
    card: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Request for an export. `output` None means a new folder in the current one.

    `measure`: measure latency and metrics of the file and of the original. `tolerance`: largest error of a quantized
    file's outputs, as a fraction of the largest output; None: the tolerance of the format (`TOLERANCES` in
    export_torch.py). `prune`: the weights that become zero, in the form of `prune_values`.
    """

    which: Which = field(default_factory=Which)
    to: str = "safetensors"
    quantize: str | None = None
    prune: str | None = None
    measure: bool = True
    tolerance: float | None = None
    output: Path | None = None


def export(run: Known, wanted: Wanted) -> Exported:
    """Write the folder of an export, completely or not at all.

    Raises:
        ConfigError: the request is not valid, the exported model's outputs would differ, or the folder exists already.
        RunStateError: the run has no such checkpoint.
        CheckpointError: the checkpoint is damaged, or has no such module.
    """
    check_format(wanted.to, wanted.quantize)
    if wanted.prune is not None:
        prune_values(wanted.prune)
    if wanted.tolerance is not None and (wanted.quantize is None or not wanted.tolerance > 0):
        raise ConfigError(
            f"--tolerance {wanted.tolerance:g} must be a share greater than 0, as 0.2, and is allowed only with "
            "--quantize: other files hold the same numbers as the model."
        )
    check_trained_here(run)
    paths = run.sweep.run(run.spec.run_id)
    config = started(run.spec.typed(), paths)
    if FORMATS[wanted.to].has_graph or wanted.quantize or wanted.prune:
        _check_known_model(config, wanted)
    for attempt in range(_TRIES):
        step = step_of(paths, config, wanted.which)
        folder = wanted.output or Path(f"{paths.run_id}-{step_name(step)}{_suffix(wanted)}")
        if os.path.lexists(folder):
            raise ConfigError(f"{folder} exists, and is not overwritten. Name another folder: --output FOLDER.")
        try:
            return _write(run, config, wanted, step, folder.absolute())
        except HpcTrainerError:
            # A running run deletes old checkpoints; a newer one then exists.
            if (paths.checkpoints / step_name(step)).exists() or attempt == _TRIES - 1:
                raise
    raise AssertionError


def _suffix(wanted: Wanted) -> str:
    """Return the suffix of the folder's name; empty for formats of weights only, as in earlier versions."""
    graph = f"-{wanted.to}" if FORMATS[wanted.to].has_graph else ""
    pruned = f"-pruned-{wanted.prune.replace(':', '-')}" if wanted.prune else ""
    return graph + (f"-{wanted.quantize}" if wanted.quantize else "") + pruned


def _check_known_model(config: TrainConfig, wanted: Wanted) -> None:
    """Raise ConfigError if only a loop of the user's own knows how the model is built."""
    if wanted.which.name != MODEL or config.train.main is not None:
        owner = config.train.main or "the run's own code"
        options = options_text(wanted.to, wanted.quantize, wanted.prune)
        raise ConfigError(
            f"{options} builds the model, and only {owner} knows how to build --object {wanted.which.name}. Use --to "
            "safetensors, and load that file where your code builds the model."
        )


def _write(run: Known, config: TrainConfig, wanted: Wanted, step: int, folder: Path) -> Exported:
    import yaml

    request = weights_request(run, config, wanted.which, step)
    if request["is_model"]:
        request |= new_data(config, facts_of_run(run.sweep.run(run.spec.run_id), config, step)).request()
    weights = "raw" if request["over"] is None else "average"
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        title = f"{run.spec.run_id}, step {step}, {'averaged' if weights == 'average' else weights} weights"
        answer = ask(_TORCH_SIDE, "export", {
            **request, "folder": str(temporary), "to": wanted.to, "quantize": wanted.quantize, "prune": wanted.prune,
            "measure": wanted.measure, "tolerance": wanted.tolerance, "title": title,
        })  # fmt: skip
        kept = {key: value for key, value in run.spec.config.items() if key not in _NOT_KEPT}
        (temporary / CONFIG).write_text(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True), encoding="utf-8")
        rename(temporary, folder)
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(
        run_id=run.spec.run_id, step=step, folder=str(folder),
        files=(FORMATS[wanted.to].file, CONFIG, LOAD, CARD, CARD_TEXT, *answer.pop("more_files")), weights=weights,
        **answer,
        notes=(*notes_of(config, step), *answer["card"]["notes"]),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AllExported:
    """Exports, each in a subfolder of `folder`, and the reasons for refused forms, by the form's name."""

    folder: str
    exports: tuple[Exported, ...]
    refused: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form of an exported checkpoint, with the fields of the options of `export`."""

    to: str
    quantize: str | None = None
    prune: str | None = None

    @property
    def name(self) -> str:
        """Name of the form's folder."""
        pruned = f"pruned-{self.prune.replace(':', '-')}" if self.prune else None
        return "-".join(filter(None, (self.to, self.quantize, pruned)))


EVERY = tuple(Form(to=to, quantize=kind) for to, format in FORMATS.items() for kind in (None, *format.quantized))
"""Each format with each number format that it can hold; nothing pruned."""


def forms_of(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> tuple[Form, ...]:
    """Return the forms that overrides list: `sweep=compress`, another file of the group, or `sweep.forms=[..]`.

    Raises:
        ConfigError: an override is of another section, there are no forms, or a form is not valid.
    """
    is_form = ("sweep=", "sweep.")
    other = next((override for override in overrides if not override.lstrip("+").startswith(is_form)), None)
    if other is not None:
        raise ConfigError(
            f"{other}: an export uses the run as it was trained; only the list of forms can be chosen, as "
            "sweep=compress or sweep.forms=[{to: onnx, prune: 0.5}]."
        )
    with Composer(config_dirs_of(config_dirs)) as composer:
        listed = composer.compose(list(overrides)).sweep.forms
    if not listed:
        raise ConfigError(f"{' '.join(overrides)} is a grid and lists no forms (sweep.forms). Use sweep=compress.")
    forms = []
    for entry in listed:
        try:
            form = Form(**{name: str(value) for name, value in entry.items()})
        except TypeError as error:
            raise ConfigError(
                f"sweep.forms has {dict(entry)}: {error}. A form needs the key `to`; quantize and prune are "
                "optional, as {to: onnx, quantize: int8, prune: channels:0.5}."
            ) from error
        if form.to not in FORMATS or form.quantize not in (None, *QUANTIZED):
            check_format(form.to, form.quantize)
        if form.prune is not None:
            prune_values(form.prune)
        forms.append(form)
    return tuple(dict.fromkeys(forms))


def export_all(run: Known, wanted: Wanted, tell: Callable[[str], None], forms: Sequence[Form] = EVERY) -> AllExported:
    """Export the forms one after the other; call `tell` with each form's name first.

    If the process is killed, only complete exports are left.

    Raises:
        ConfigError: the folder exists already, or no form is possible for the model.
        RunStateError, CheckpointError, DataError: the checkpoint or the data cannot be read.
    """
    check_trained_here(run)
    paths = run.sweep.run(run.spec.run_id)
    config = started(run.spec.typed(), paths)
    step = step_of(paths, config, wanted.which)
    folder = (wanted.output or Path(f"{paths.run_id}-{step_name(step)}-all")).absolute()
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists, and is not overwritten. Name another folder: --output FOLDER.")
    done: list[Exported] = []
    refused: dict[str, str] = {}
    which = dataclasses.replace(wanted.which, best=False, step=step)
    for form in forms:
        tell(form.name)
        one = dataclasses.replace(
            wanted, which=which, to=form.to, quantize=form.quantize, prune=form.prune, output=folder / form.name
        )
        try:
            done.append(export(run, one))
        except ConfigError as error:  # this form is not possible; others may be
            refused[form.name] = str(error)
    if not done:
        raise ConfigError("\n".join(refused.values()))
    return AllExported(folder=str(folder), exports=tuple(done), refused=refused)
