"""Optional packages: the extra that installs each, and the message if one is missing."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from typing import Any

from hpc_trainer.config.schema.output import TrackerName
from hpc_trainer.errors import ConfigError

EXTRAS = {
    "PIL": "images", "kornia": "images",
    "pyarrow": "tables",
    "tokenizers": "text",
    "datasets": "hub", "peft": "hub", "transformers": "hub",
    "onnx": "export", "onnxruntime": "export", "onnxscript": "export",
    "torchao": "quantize",
    "pynvml": "nvidia", "amdsmi": "amd",
    "prometheus_client": "prometheus",
    "plotly": "report", "textual": "top",
}  # fmt: skip
"""Import name of a package -> the extra of pyproject.toml."""


def missing(what: str, *packages: str) -> str | None:
    """Return a message that `what` lacks packages, with the command that installs them; None if all are present.

    No package is imported: some take seconds.
    """
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if not absent:
        return None
    extras = ",".join(dict.fromkeys(EXTRAS[package] for package in absent))
    return f"{what} needs the package {' and '.join(absent)}: pip install 'hpc_trainer[{extras}]'"


def check_installed(what: str, *packages: str) -> None:
    """Check that this Python has all packages that `what` needs.

    Raises:
        ConfigError: a package is missing.
    """
    problem = missing(what, *packages)
    if problem is not None:
        raise ConfigError(problem)


def optional(module: str, what: str) -> Any:
    """Import and return a module of an optional package, which `plan` of other choices need not import.

    Raises:
        ConfigError: the package is missing.
    """
    check_installed(what, module.partition(".")[0])
    return importlib.import_module(module)


def import_torchao() -> None:
    """Import torchao's tensors and operations, without its log lines about libraries of other machines.

    Where Python keeps no bytecode of torchao yet, compiling torchao warns of its invalid escapes (0.18): an error under
    `-W error`.
    """
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "invalid escape sequence|.* is an invalid escape sequence")
            import torchao.quantization.qat  # noqa: F401
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def missing_package(name: TrackerName) -> str | None:
    """Return what to install if this Python lacks the package of a tracker; None if it has the package."""
    if name is TrackerName.none:
        return None
    spec = importlib.util.find_spec(name.value)
    if spec is not None and spec.origin is not None:  # else it is a folder of that name, as both trackers leave behind
        return None
    return f"tracker={name.value} needs a package: pip install 'hpc_trainer[{name.value}]'"
