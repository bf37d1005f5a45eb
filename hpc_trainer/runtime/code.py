"""Code that a process runs: digests of its packages, and the git checkouts that it was imported from.

A digest covers the sources of a package and does not depend on their location. A checkout may belong to a team, so git
runs none of its programs; the revision is kept with the difference from it, as text that git can apply.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_trainer.record.redaction import Redaction, is_secret, secrets_among

# A package with more files holds data or half an environment. Its digest would take seconds on a shared file system.
_MAX_FILES = 2_000


def code_digests(packages: Iterable[str]) -> dict[str, str]:
    """Return a digest of the source code of each top-level package or module.

    A digest is the first 16 hex digits of a SHA-256 over the names and contents of all *.py files. It is the same for
    frozen code and for the working folder that the code was copied from. 2 MB of sources take 15 ms.
    """
    return {name: _code_digest(name) for name in packages}


def spec_of(name: str) -> ModuleSpec | None:
    """Return the spec by which Python would import a top-level package or module, without importing; None if absent."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _code_digest(name: str) -> str:
    spec = spec_of(name)
    if spec is None:
        return "not found"
    if not spec.submodule_search_locations:
        origin = Path(spec.origin or "")
        files = {origin.name: origin} if origin.is_file() else {}
    else:
        roots = [Path(location) for location in spec.submodule_search_locations]
        files = {str(path.relative_to(root)): path for root in roots for path in root.rglob("*.py")}
    if len(files) > _MAX_FILES:
        return f"more than {_MAX_FILES} files"
    digest = hashlib.sha256()
    for relative, path in sorted(files.items()):
        digest.update(f"{relative}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def run_git(
    folder: str | Path, *argv: str, timeout_s: float, more: Mapping[str, str] = MappingProxyType({}), given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Return the result of a git command in `folder`. Hooks and the monitor of the configuration are not run.

    Variables of git are removed: inside a git hook they would name the repository of that hook.

    Args:
        more: additional variables of the command.
        given: standard input of the command.

    Raises:
        OSError: there is no git here.
        TimeoutExpired: the command took longer than `timeout_s` seconds, and was killed.
    """
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environ |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **more}
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *argv]
    return subprocess.run(command, env=environ, input=given, capture_output=True, timeout=timeout_s, check=False)


def git_says(folder: str | Path, *argv: str) -> bytes | None:
    """Return the output of git; None if git is missing, fails, or takes longer than 10 s."""
    try:
        done = run_git(folder, *argv, timeout_s=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


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
    inside = (folder for folder in folders if _may_be_in_checkout(folder))
    tops = {top: None for folder in inside if (top := _git(folder, "rev-parse", "--show-toplevel"))}
    return [checkout for top in tops if (checkout := _checkout(top.rstrip("\n"), redaction, within))]


def _may_be_in_checkout(folder: str) -> bool:
    """Return False if no folder above has `.git`; this saves a process of git for each run of a pool."""
    path = Path(folder).resolve()
    return any(Path(folder, ".git").exists() for folder in (path, *path.parents))


def _checkout(top: str, redaction: Redaction, within: str) -> dict[str, Any] | None:
    revision = _git(top, "rev-parse", "HEAD")
    if revision is None:
        return None
    changed = _names(top, "diff", "--name-only", "--no-ext-diff", "-z", "HEAD", "--", within)
    left_out = secrets_among(changed)
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
