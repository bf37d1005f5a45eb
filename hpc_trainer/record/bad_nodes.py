"""Memory of nodes on which runs failed by the node's fault, over all sweeps of a user in one folder of sweeps.

`runs/.nodes-UID/` has one small file for each such failure; its name holds the node. The rank that failed writes it,
and so does `why` for failures that only Slurm reports. A listing of the folder answers how often a node failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.record.files import claim, make_folder_once, to_json
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.reading import Faults, as_text, as_time, list_folder, names_in, read_json, typed
from hpc_trainer.record.tracebacks import sign_of
from hpc_trainer.record.trust import check_trusted, is_ours

_DAYS = 30
_MOST_NAMED = 3
_MOST_KEPT = 5000
_IN_A_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _folder(runs_dir: Path) -> Path:
    return runs_dir / f".nodes-{os.getuid()}"


def keep_bad_node(sweep: SweepPaths, run_id: str, attempts: int, node: str, sign: str) -> None:
    """Remember that a run failed because of its node; the same failure is remembered once. Never raises.

    Args:
        attempts: number of attempts of the run so far, which distinguishes its failures.
        sign: name of the fault of the node, as in record/signs.py, or `node_fail`.
    """
    folder = _folder(sweep.folder.parent)
    key = hashlib.sha256(f"{sweep.name}/{run_id}/{attempts}".encode()).hexdigest()[:12]
    record = {"time": time.time(), "node": node, "sign": sign, "sweep": sweep.name, "run_id": run_id}
    with contextlib.suppress(OSError, HpcTrainerError):
        is_own = sweep.folder.stat().st_uid == os.getuid()  # a look at a colleague's sweep leaves no trace
        if is_own and _IN_A_NAME.fullmatch(node) and len(names_in(folder) or ()) < _MOST_KEPT:
            make_folder_once(folder, 0o700)  # whatever the umask: what others may write is not read
            check_trusted(folder)
            claim(folder / f"{node}+{key}.json", f"{to_json(record)}\n".encode(), mode=0o600)


def keep_if_of_node(paths: RunPaths, attempt: int, error: Mapping[str, Any]) -> None:
    """Remember the node of a failed rank if the last lines of the rank name a fault of the node. Never raises."""
    said = str(error.get("output", "")).splitlines()
    sign = sign_of([*said, f"{error.get('type', '')}: {error.get('message', '')}"])
    if sign is not None and sign.is_of_node and isinstance(error.get("node"), str):
        keep_bad_node(SweepPaths(paths.folder.parent), paths.run_id, attempt + 1, error["node"], sign.name)


def bad_node_lines(sweep: SweepPaths, node: str) -> list[str]:
    """Return a line on earlier failures of a node within 30 days, and how to leave the node out; [] if none.

    Args:
        sweep: the sweep at hand; the other sweeps in its folder count too.
        node: name of the node.
    """
    folder, faults = _folder(sweep.folder.parent), Faults()
    names = [name for name in list_folder(folder, faults) or () if name.startswith(f"{node}+")]
    records = [record for name in names if (record := _read(folder / name)) is not None]
    if len(records) < 2:
        return []
    records.sort(key=lambda record: -record["time"])
    runs = list(dict.fromkeys(f"{record['sweep']}/{record['run_id']}" for record in records))
    more = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
    signs = ", ".join(sorted({record["sign"] for record in records}))
    return [
        f"node {node} failed {len(records)} times within {_DAYS} days ({signs}): {', '.join(runs[:_MOST_NAMED])}{more}"
        f". hardware.exclude={node} leaves it out"
    ]


def _read(path: Path) -> dict[str, Any] | None:
    faults = Faults()
    try:
        record = read_json(path, faults) if is_ours(path, faults) else None
        values = typed(record or {}, {"time": as_time, "sign": as_text, "sweep": as_text, "run_id": as_text})
    except (KeyError, ValueError, HpcTrainerError):  # damaged, or another user may have written it
        return None
    return values if time.time() - values["time"] < _DAYS * 86400 else None
