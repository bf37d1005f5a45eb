"""The table of domains. The layers know a domain only through this table and the hooks that its `Domain` declares.

A domain is a folder of this package that covers one concern, from its verbs to its work on ranks. It stands above all
layers and may import them; no file of a layer or of another domain imports it. Its `__init__.py` declares `DOMAIN`,
without slow imports. Its other modules are imported when a hook is first needed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAMES = ("deploy",)
"""Folders of the domains. Without its name here and its folder, a domain is gone and everything else works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Hooks of one domain. A hook that is a module is named within the domain's folder; "" for none."""

    name: str
    verbs: str = ""
    """Module with `verbs`, a typer app. Each command line imports it at its start, so its own imports are late."""
    report: str = ""
    """Module with `report_section(value)`, which returns a `Section` for `hpc-trainer report`."""
    report_option: str = ""
    """Option of `report` whose value `report_section` gets, without dashes."""
    sweep_keys: Mapping[str, str] = field(default_factory=dict)
    """Key of the section `sweep` that only the domain's verbs read -> what it is: a grid of runs refuses the key."""

    def module(self, name: str) -> Any:
        """Import and return a module of the domain's folder."""
        return importlib.import_module(f"hpc_trainer.{self.name}.{name}")


@functools.cache
def domains() -> tuple[Domain, ...]:
    """Return the domains of this installation, in the order of `NAMES`."""
    return tuple(importlib.import_module(f"hpc_trainer.{name}").DOMAIN for name in NAMES)
