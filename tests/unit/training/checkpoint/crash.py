"""What a power cut may leave of a recorded sequence of file operations.

The model is what POSIX promises and no more. The bytes of a file last once it was fsync'ed after they were written;
before, any part of them may be there, or zeros. A name that was made, renamed or removed lasts once its folder was
fsync'ed; before, each such change may have come to the disk or not, in any order. A rename is one change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class Node:
    """A file (`data`) or a folder (`names`)."""

    data: bytes | None = None
    names: dict[str, Node] = field(default_factory=dict)


@dataclass
class Change:
    """One change of a folder's names: `old` goes, `new` becomes `node`."""

    folder: Node
    old: str | None
    new: str | None
    node: Node | None
    lasts: bool = False


@dataclass
class Write:
    node: Node
    data: bytes
    lasts: bool = False


def read(folder: Path) -> Node:
    """A folder as it is on the disk."""
    return Node(
        names={path.name: read(path) if path.is_dir() else Node(path.read_bytes()) for path in folder.iterdir()}
    )


def replay(root: Node, folder: Path, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Change | Write]:
    """What the calls do to `root` (the folder before them), and which of it lasts when they are done."""
    now: dict[Path, Node] = {}

    def enter(node: Node, path: Path) -> None:
        now[path] = node
        for name, each in node.names.items():
            enter(each, path / name)

    enter(root, folder)
    done: list[Change | Write] = []
    for name, (path, *rest) in calls:
        if name in ("mkdir", "create"):
            if path in now:
                continue  # mkdir of what is there
            now[path] = Node() if name == "mkdir" else Node(b"")
            done.append(Change(now[path.parent], None, path.name, now[path]))
        elif name == "write":
            done.append(Write(now[path], rest[0]))
        elif name == "rename":
            moved = {inner: node for inner, node in now.items() if inner == path or path in inner.parents}
            for inner, node in moved.items():
                del now[inner]
                now[rest[0] / inner.relative_to(path)] = node
            done.append(Change(now[path.parent], path.name, rest[0].name, now[rest[0]]))
        elif name in ("unlink", "rmdir"):
            done.append(Change(now[path.parent], path.name, None, None))
            del now[path]
        elif name in ("fsync", "fsync_folder"):
            for each in done:
                if (each.node if isinstance(each, Write) else each.folder) is now[path]:
                    each.lasts = True
    return done


def leave(root: Node, done: list[Change | Write], target: Path, rng: random.Random, share: float) -> None:
    """Writes into `target` what a power cut may leave: all that lasts, and each other thing with odds `share`."""
    names: dict[int, dict[str, Node]] = {}
    data: dict[int, bytes] = {}

    def enter(node: Node) -> None:
        names[id(node)] = dict(node.names)
        data[id(node)] = node.data or b""
        for each in node.names.values():
            enter(each)

    enter(root)
    for each in done:
        is_there = each.lasts or rng.random() < share
        if isinstance(each, Write):
            kept = each.data if is_there else rng.choice((b"", bytes(len(each.data)), each.data[: len(each.data) // 2]))
            data[id(each.node)] = data.get(id(each.node), b"") + kept
        elif is_there:
            entries = names.setdefault(id(each.folder), {})
            if each.old is not None:
                entries.pop(each.old, None)
            if each.new is not None and each.node is not None:
                entries[each.new] = each.node

    def put(node: Node, path: Path) -> None:
        if node.data is not None:
            path.write_bytes(data.get(id(node), b""))
            path.chmod(0o640)
            return
        path.mkdir(mode=0o750)
        for name, each in names.get(id(node), {}).items():
            put(each, path / name)

    put(root, target)
