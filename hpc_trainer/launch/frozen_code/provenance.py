"""Which code a sweep was submitted from: the frozen copy, and the git revision of the working folder."""

from __future__ import annotations

import hashlib
from typing import Any

from hpc_trainer import __version__
from hpc_trainer.launch.frozen_code.snapshot import Snapshot
from hpc_trainer.runtime.environment.git import git_says


def code_revision(code: Snapshot | None = None) -> dict[str, Any]:
    """`hpc_trainer` version, git revision and digest of the uncommitted difference; None outside a checkout.

    With it what was frozen: digest, folders that it was taken from, links that were left out; None if nothing was.
    """
    revision = git_says(".", "rev-parse", "HEAD")
    diff = git_says(".", "diff", "--no-ext-diff", "--no-textconv", "HEAD") if revision else None
    return {
        "hpc_trainer": __version__,
        "git_revision": revision.decode().strip() if revision else None,
        "git_diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
        "snapshot": None if code is None else code.provenance(),
    }
