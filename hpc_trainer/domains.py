"""Registry of the domains: one line for each folder that may be deleted while everything else still works.

The core (config, slurm, record, training, worker, launch, operate) imports no domain. Where domains may take part, the
core calls `contributions` with the name of a hook. A domain's `__init__.py` lists what it contributes to each hook as
`module:object`; the module is imported when the hook is called for the first time.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

DOMAINS = (
    "deploy",
    "observe",
    "verify",
    "data",
    "doctor",
    "init_project",
    "hardware",
    "tidy",
    "notify",
    "search",
)
"""Folders of `hpc_trainer` that are domains. To remove a domain, delete its folder and its name here."""

HOOKS = {
    "verbs": "typer app with verbs of hpc-trainer (cli/main.py); imported at the start of each command line",
    "sweep_keys": "mapping from a key of `sweep` that no grid reads to what it is (config/compose/grid.py)",
    "grid_kinds": "kind of grid whose runs are not known at submit (cli/grid_verbs.py, `GridKind`; launch/searches.py)",
    "sweep_lines": "lines about a sweep for `status`, and their JSON (cli/run_verbs.py, `SweepLines`)",
    "features": "mapping from name to `Feature` (config/table/feature.py) of techniques that live in the domain",
    "samplers": "context manager around the work of a rank (worker/attempt.py, `working`)",
    "recorders": "recorder of a rank's last moments (worker/attempt.py, `Recorder`)",
    "ends": "function that is called at the end of a run that nothing restarts by itself (worker/line.py, `tell_end`)",
    "run_sources": "function that returns the `RunSource` of a pool, or None (worker/slot.py)",
    "search_ends": "function of a sweep: number of its trials by state, {} if some are left; None without a search",
    "search_goals": "function of a sweep: the `Goal` of its search (record/chain.py); None without a search",
    "best_of": "function of a sweep that returns the `BestRun` of its search (operate/results.py; api.py)",
    "submits": "function of a sweep and the runs that are about to be submitted, with its lock held (launch/grids.py)",
    "warnings": "problem of a running run, as one line for `status` (record/run_status.py)",
    "clues": "evidence and advice for `why` (operate/why.py, `Clues`)",
    "result_columns": "columns of `results` (operate/results.py, `Columns`)",
    "sweep_columns": "columns of `sweeps` (operate/show.py, `SweepColumns`)",
    "labels": "function that changes tags and note of a sweep and returns its `Labels` (operate/show.py; api.py)",
    "report_parts": "part of a sweep's report (operate/report/data.py, `ReportPart`)",
    "report_series": "charts of one run over minutes for the interactive report (operate/report/data.py, `Series`)",
    "report_options": "mapping from an option of `report` to a function of its value that returns a `ReportPart`",
    "page_parts": "section of a run's page (operate/run_page.py, `PagePart`)",
    "cluster_profile": "function that returns the keys of the smallest run on the cluster at hand (init_project/)",
    "live_figures": "figures of a running run for `status --watch` (cli/live.py)",
    "data_sets": "dataclass of a choice of `data=` (config/store.py; the methods are those of schema/data.py)",
}
"""Hooks to which a domain may contribute, each with the file that describes and calls it."""


@functools.cache
def contributions(hook: str) -> tuple[Any, ...]:
    """Import and return the objects that the domains contribute to a hook, in the order of `DOMAINS`.

    Raises:
        KeyError: there is no such hook.
    """
    assert HOOKS[hook]
    domains = [importlib.import_module(f"hpc_trainer.{domain}") for domain in DOMAINS]
    return tuple(_load(name) for domain in domains for name in domain.CONTRIBUTES.get(hook, ()))


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
