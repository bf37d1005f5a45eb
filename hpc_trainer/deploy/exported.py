"""Folder of an export: formats of the model's file, names of the files, and the card, which is read with checks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_trainer.config.packages import check_installed
from hpc_trainer.config.user_files import open_given, read_given
from hpc_trainer.errors import ConfigError, RunStateError, valid
from hpc_trainer.record.files import sha256_of
from hpc_trainer.record.trust import check_trusted

CARD, CARD_TEXT, CONFIG, LOAD = "card.json", "card.md", "config.yaml", "load.py"
CARD_FORMAT = 1
SWEEP_KEYS = {"forms": "lists the forms in which `export` writes one trained run, and is not a grid of runs"}
_LONGEST_CARD = 4 * 2**20  # bytes, mostly for names of classes


@dataclass(frozen=True, slots=True)
class Format:
    """Format of the model's file."""

    file: str
    has_graph: bool
    """True if the file holds the computation besides the weights: running it does not need the model's class."""
    needs: tuple[str, ...] = ()
    """Packages that the format needs besides torch."""
    quantized: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Kind of quantization that the format supports -> packages that this kind needs besides `needs`."""


_BY_TORCHAO = {"dynamic_int8": ("torchao",), "int8": ("torchao",)}
FORMATS = {
    "safetensors": Format("model.safetensors", has_graph=False),
    "torch": Format("model.pt", has_graph=False, quantized=_BY_TORCHAO),
    "torch_export": Format("model.pt2", has_graph=True, quantized=_BY_TORCHAO),
    "onnx": Format(
        "model.onnx", has_graph=True, needs=("onnx", "onnxscript", "onnxruntime"),
        quantized={"dynamic_int8": (), "int8": ("torchao",), "int4": ()},
    ),
}  # fmt: skip
QUANTIZED = ("dynamic_int8", "int8", "int4")


def check_format(to: str, quantize: str | None) -> None:
    """Check that a format exists, supports a quantization, and has its packages.

    Raises:
        ConfigError: there is no such format, it does not support the quantization, or a package is missing.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to {to}: there is no such format. {valid(to, FORMATS)}")
    if quantize is not None and quantize not in QUANTIZED:
        raise ConfigError(f"--quantize {quantize}: there is no such kind. {valid(quantize, QUANTIZED)}")
    if quantize is not None and quantize not in FORMATS[to].quantized:
        raise ConfigError(f"--to {to} --quantize {quantize}: {_why_not(to, quantize)}")
    check_packages(f"--to {to}{f' --quantize {quantize}' if quantize else ''}", to, quantize)


_SHARE = re.compile(r"(?:(channels):)?(0?\.\d+)")
_N_M = re.compile(r"([1-9]\d?):([1-9]\d?)")


def prune_values(prune: str) -> dict[str, Any]:
    """Return the keys of section `prune` for a value of `--prune`, such as 0.5, channels:0.5 or 2:4.

    Raises:
        ConfigError: the value has none of these forms.
    """
    share, n_m = _SHARE.fullmatch(prune), _N_M.fullmatch(prune)
    if share is not None and float(share[2]) > 0:
        return {"method": share[1] or "unstructured", "sparsity": float(share[2])}
    if n_m is not None and int(n_m[1]) < int(n_m[2]):
        return {"method": "n_m", "n": int(n_m[1]), "m": int(n_m[2])}
    near = "channels:0.5" if prune.startswith("channels") else "2:4" if ":" in prune else "0.5"
    raise ConfigError(
        f"--prune {prune} must be the share of weights that become zero, greater than 0 and less than 1 (0.5), the "
        "share of channels that are removed (channels:0.5), or how many weights stay of each group (2:4). "
        f"Use --prune {near}."
    )


def options_text(to: str, quantize: str | None, prune: str | None) -> str:
    """Return the options that select a form of a model, as the user types them."""
    return f"--to {to}{f' --quantize {quantize}' if quantize else ''}{f' --prune {prune}' if prune else ''}"


def check_packages(what: str, to: str, quantize: str | None) -> None:
    """Check that the packages for files of a format are installed.

    Args:
        what: the option that needs them, for the message.
        to: the format.
        quantize: the kind of quantization; None for none.

    Raises:
        ConfigError: a package is missing.
    """
    kind = FORMATS[to]
    needed = (*kind.needs, *(kind.quantized[quantize] if quantize else ()))
    check_installed(what, *needed)


def needed_package(card: Mapping[str, Any]) -> str | None:
    """Return the user's package that load.py of an export imports; None if it imports only PyTorch or hpc_trainer."""
    has_class = not FORMATS[card["to"]].has_graph and card["built_for"] is not None
    package = str(card["model"]["class"]).partition(".")[0]
    return package if has_class and package not in ("hpc_trainer", "torch") else None


def _why_not(to: str, quantize: str) -> str:
    if quantize == "int4":
        return (
            "torch packs 4-bit numbers only on GPUs; on a CPU each would take a byte. Use --to onnx "
            f"--quantize int4, or --to {to if FORMATS[to].quantized else 'torch'} --quantize int8."
        )
    return (
        "the format holds only plain tensors, and quantized weights are torchao's own. Use --to torch "
        f"--quantize {quantize}, or --to onnx."
    )


def read_card(folder: Path) -> dict[str, Any]:
    """Return the card of the export in `folder`, after checking the SHA-256 of the file that the card describes.

    Raises:
        RunStateError: there is no card, it cannot be read, or the file was changed.
        UntrustedFileError: another user owns a file that is read, or others may write to it.
    """
    for name in (".", CARD, CONFIG):
        check_trusted(folder / name if name != "." else folder)
    try:
        card: Any = json.loads(read_given(folder / CARD, _LONGEST_CARD))
        name, kind, quantize, digest = card["file"], FORMATS.get(card["to"]), card["quantize"], card["sha256"]
        is_ours = (
            card["format"] == CARD_FORMAT
            and kind is not None
            and name == kind.file
            and (quantize is None or quantize in kind.quantized)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunStateError(
            f"{folder / CARD} is not a card of `hpc-trainer export`: {error!r}. Export the run again."
        ) from error
    if not is_ours:
        raise RunStateError(
            f"{folder / CARD} was written by another version of hpc_trainer, or changed. Export the run again."
        )
    check_trusted(folder / name)
    try:
        open_given(folder / name).close()  # a pipe has no end
    except OSError as error:
        raise RunStateError(f"{folder / name} cannot be read: {error}. Export the run again.") from error
    if sha256_of(folder / name) != digest:
        raise RunStateError(
            f"{folder / name} is not the file that {CARD} describes: the SHA-256 differs. Export the run again."
        )
    return card  # type: ignore[no-any-return]
