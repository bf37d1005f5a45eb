"""Public names of the data sets: `data._target_` in configurations and frozen runs, and imports in a user's own code.

The modules themselves are elsewhere (`_HOMES`). A name of this package is another name of the same module, which is
imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HOMES = {
    "digits": "hpc_trainer.training.data.digits",
    "own": "hpc_trainer.training.data.own",
    "preprocessing": "hpc_trainer.training.data.preprocessing",
    "problem": "hpc_trainer.data.files",
    "protocol": "hpc_trainer.training.data.protocol",
    "images.dataset": "hpc_trainer.data.images.dataset",
    "images.pictures": "hpc_trainer.data.images.pictures",
    "images.shard_index": "hpc_trainer.data.images.index",
    "records.arrays": "hpc_trainer.data.arrays.dataset",
    "records.hf_dataset": "hpc_trainer.data.hf.dataset",
    "records.table": "hpc_trainer.data.tables.dataset",
    "records.token_files": "hpc_trainer.data.tokens.files",
    "records.tokens": "hpc_trainer.data.tokens.dataset",
    "synthetic_images": "hpc_trainer.data.generated.dataset",
    "synthetic_tokens": "hpc_trainer.data.generated.dataset",
    "text_bytes": "hpc_trainer.data.text.dataset",
}
"""Module behind each name of this package."""
_FOLDERS = frozenset({"images", "records"})


class _Names(MetaPathFinder, Loader):
    """Finder and loader of the names in this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        package, _, name = fullname.partition(f"{__name__}.")
        if package or not (name in _HOMES or name in _FOLDERS):
            return None
        return ModuleSpec(fullname, self, is_package=name in _FOLDERS)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that Python has made for a name by the module that the name means."""
        home = _HOMES.get(module.__name__.removeprefix(f"{__name__}."))
        if home is not None:
            sys.modules[module.__name__] = importlib.import_module(home)


sys.meta_path.append(_Names())


def __getattr__(name: str) -> Any:
    """Return `MapDataset` or `Split`, which stand for a data set and its part in a user's annotations."""
    if name not in ("MapDataset", "Split"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES["protocol"]), name)
