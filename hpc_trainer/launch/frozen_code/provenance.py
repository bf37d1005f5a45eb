"""Record of the code that a sweep was submitted from: the frozen copy, and the working folder's git revision."""

from __future__ import annotations

import hashlib
from typing import Any

from hpc_trainer import __version__
from hpc_trainer.launch.frozen_code.snapshot import Snapshot
from hpc_trainer.runtime.environment.git import git_says


def code_revision(code: Snapshot | None = None) -> dict[str, Any]:
    """Return the `hpc_trainer` version, git revision, digest of the uncommitted difference, and the frozen code.

    Revision and difference are None outside a checkout. The frozen code's record has its digest, source folders and
    omitted links; it is None if nothing was frozen.
    """
    revision = git_says(".", "rev-parse", "HEAD")
    diff = git_says(".", "diff", "--no-ext-diff", "--no-textconv", "HEAD") if revision else None
    return {
        "hpc_trainer": __version__,
        "git_revision": revision.decode().strip() if revision else None,
        "git_diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
        "snapshot": None if code is None else code.provenance(),
    }
