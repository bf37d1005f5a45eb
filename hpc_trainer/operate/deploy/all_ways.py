"""Export of one checkpoint in several forms: every legal combination of formats, or the list of `sweep/`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.errors import ConfigError
from hpc_trainer.operate.deploy.checkpoint import check_trained_here, step_of
from hpc_trainer.operate.deploy.export import Exported, Wanted, export
from hpc_trainer.operate.show import Known
from hpc_trainer.runs.checkpoint_folders import step_name
from hpc_trainer.runs.exported import FORMATS, QUANTIZED, check_format, prune_values


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


EVERY = tuple(Form(to=to, quantize=kind) for to, each in FORMATS.items() for kind in (None, *each.quantized))
"""Each format with each number format that it can hold; nothing pruned."""


def forms_of(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> tuple[Form, ...]:
    """Return the forms that `sweep=compress`, another file of the group, or `sweep.forms=[..]` lists.

    Raises:
        ConfigError: an override is of another section, there are no forms, or a form is not valid.
    """
    other = next((word for word in words if not word.lstrip("+").startswith(("sweep=", "sweep."))), None)
    if other is not None:
        raise ConfigError(
            f"{other}: a run is exported as it is, and only the list of forms is chosen here: sweep=compress, or "
            "sweep.forms=[{to: onnx, prune: 0.5}]."
        )
    with Composer(config_dirs) as composer:
        listed = composer.compose(list(words)).sweep.forms
    if not listed:
        raise ConfigError(f"{' '.join(words)} lists no forms of a model (sweep.forms), but a grid. Use sweep=compress.")
    forms = []
    for entry in listed:
        try:
            form = Form(**{name: str(value) for name, value in entry.items()})
        except TypeError as error:
            raise ConfigError(
                f"sweep.forms has {dict(entry)}, and a form has to, and may have quantize and prune: {error}. Write it "
                "as {to: onnx, quantize: int8, prune: channels:0.5}."
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
    paths, config = run.sweep.run(run.spec.run_id), run.spec.typed()
    step = step_of(paths, config, wanted.which)
    folder = (wanted.output or Path(f"{paths.run_id}-{step_name(step)}-all")).absolute()
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} is there already, and is left as it is. Name another folder: --output FOLDER.")
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
        except ConfigError as error:  # not possible in this form; other forms may be
            refused[form.name] = str(error)
    if not done:
        raise ConfigError("\n".join(refused.values()))
    return AllExported(folder=str(folder), exports=tuple(done), refused=refused)
