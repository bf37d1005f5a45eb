"""Git checkouts that code was imported from: the revision, and the difference from it as text that git can apply."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpc_trainer.runs.monitoring.redaction import Redaction
from hpc_trainer.runs.monitoring.secret_names import is_secret
from hpc_trainer.runtime.code_digests import spec_of
from hpc_trainer.runtime.environment.git import git_says

LONGEST_DIFF = 1_000_000
"""Largest difference, in bytes, that is kept as text; of a longer one only the digest is kept."""
_NEW_FILES = "*.py"
"""Pattern of the untracked files that are kept. Of the others the names are listed."""
_MOST_NAMES = 100


def places_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the folder that holds each top-level package or module, without importing; those not found are omitted."""
    folders = {}
    for name in packages:
        spec = spec_of(name)
        if spec is None:
            continue
        inside = list(spec.submodule_search_locations or ())
        if inside:
            folders[name] = str(Path(inside[0]).parent)
        elif spec.has_location and spec.origin:
            folders[name] = str(Path(spec.origin).parent)
    return folders


def checkouts_of(folders: Iterable[str], redaction: Redaction, within: str = ":/") -> list[dict[str, Any]]:
    """Return the checkouts that contain these folders, each once; folders outside any checkout are omitted.

    Args:
        within: pathspec that limits the differences.
    """
    tops = {top: None for folder in folders if (top := _git(folder, "rev-parse", "--show-toplevel"))}
    return [checkout for top in tops if (checkout := _checkout(top.rstrip("\n"), redaction, within))]


def _checkout(top: str, redaction: Redaction, within: str) -> dict[str, Any] | None:
    revision = _git(top, "rev-parse", "HEAD")
    if revision is None:
        return None
    changed = _names(top, "diff", "--name-only", "--no-ext-diff", "-z", "HEAD", "--", within)
    left_out = [file for file in changed if is_secret(file)]
    but = [f":(exclude,literal,top){file}" for file in left_out]
    diff = _git(top, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD", "--", within, *but) or ""
    untracked = _names(top, "ls-files", "--others", "--exclude-standard", "-z", "--", within)
    kept = [file for file in untracked if Path(file).match(_NEW_FILES) and not is_secret(file)]
    for name in kept:
        diff += _as_new(top, name)
    others = sorted(set(untracked) - set(kept))[:_MOST_NAMES]
    remote = _git(top, "config", "--get", "remote.origin.url")
    before = redaction.count
    text = redaction.code(diff) if len(diff) <= LONGEST_DIFF else None
    redacted = redaction.count - before
    return {
        "top": top,
        "revision": revision.strip(),
        "remote": redaction.text(remote.strip()) if remote else None,
        "diff": text,
        "diff_sha256": hashlib.sha256(diff.encode(errors="surrogateescape")).hexdigest() if diff else None,
        "diff_redacted": redacted,
        "left_out": left_out,
        "untracked": [redaction.text(file) for file in others],
    }


def _names(top: str, *argv: str) -> list[str]:
    return [name for name in (_git(top, *argv) or "").split("\0") if name]


def _as_new(top: str, name: str) -> str:
    """Return the difference by which git would add an untracked file; "" if it is a link, too large or no text."""
    try:
        path = Path(top, name)
        if path.is_symlink() or path.stat().st_size > LONGEST_DIFF:
            return ""
        text = path.read_text(encoding="utf-8")
        mode = "100755" if os.access(path, os.X_OK) else "100644"
    except (OSError, UnicodeDecodeError):
        return ""
    head = f"diff --git a/{name} b/{name}\nnew file mode {mode}\n"
    if not text:
        return head
    lines = text.split("\n")
    last = [] if text.endswith("\n") else ["\\ No newline at end of file"]
    lines = lines[:-1] if text.endswith("\n") else lines
    body = "\n".join([*(f"+{line}" for line in lines), *last])
    return f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{body}\n"


def _git(folder: str, *argv: str) -> str | None:
    # The index is not refreshed: a lock on the index would stop the user's own git.
    said = git_says(folder, "-c", "diff.autoRefreshIndex=false", *argv)
    return None if said is None else said.decode(errors="surrogateescape")
