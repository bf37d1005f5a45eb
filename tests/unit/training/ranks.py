"""Starts the ranks of a test and hears what each of them said."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests import warm

_ROOT = Path(__file__).parents[3]
_AFTERWARDS_S = 60  # to see how the others end, once one has failed

RankEnd: TypeAlias = "tuple[int | None, str]"
"""(exit code, output) of a rank; None if it had to be killed."""


def child_environment() -> dict[str, str]:
    """Programs are scripts, and import from `tests` as tests do."""
    return {**os.environ, "PYTHONPATH": str(_ROOT)}


def two_ranks_say(child: Path, folder: Path, timeout_s: float = 120) -> list[dict[str, Any]]:
    """Runs `child` as rank 0 and rank 1.

    Returns what they wrote to said-<rank>.json in `folder`.
    """
    words, environment = [sys.executable, str(child)], child_environment()
    ranks = [warm.Popen([*words, str(rank), str(folder)], env=environment) for rank in range(2)]
    try:
        assert [rank.wait(timeout=timeout_s) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]


def run_child(program: Path, folder: Path, *words: str) -> None:
    """Runs `program`, which starts ranks by itself."""
    env = {**child_environment(), "PYTHONWARNINGS": "ignore"}
    done = warm.run([sys.executable, str(program), str(folder), *words], text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr[-6000:]


def has_long(request: pytest.FixtureRequest) -> bool:
    """True if any long test of the file that asks was chosen."""
    return any(item.get_closest_marker("long") for item in request.session.items if item.path == request.path)


def said_by(kinds: Mapping[str, tuple[int, Any]], folder: Path) -> dict[str, list[Any]]:
    """What each rank of the kinds that were played wrote to KIND-RANK.json; `kinds`: with how many ranks."""
    return {
        kind: [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(world_size)]
        for kind, (world_size, _) in kinds.items()
        if (folder / f"{kind}-0.json").exists()
    }


def play_jobs(
    folder: Path, world_size: int, tag: str, jobs: list[dict[str, Any]], child: Path | None = None
) -> list[RankEnd]:
    """Runs world_child.py, or `child`, as every rank, with PLAY=`tag`, until all have ended.

    Once one has failed, the others may wait for it in a collective: they have a minute.
    """
    environment = {**child_environment(), "PLAY": tag}
    words = [sys.executable, str(child or Path(__file__).with_name("world_child.py"))]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context((folder / f"output-{tag}-{rank}.txt").open("w+")) for rank in range(world_size)]
        ranks = [
            stack.enter_context(
                warm.Popen(
                    [*words, str(rank), str(world_size), str(folder), json.dumps(jobs)],
                    env=environment, stdout=output, stderr=subprocess.STDOUT,
                )
            )
            for rank, output in enumerate(outputs)
        ]  # fmt: skip
        for rank in ranks:
            stack.callback(rank.kill)
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.1)
        deadline = time.monotonic() + _AFTERWARDS_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [(rank.poll(), Path(output.name).read_text()) for rank, output in zip(ranks, outputs, strict=True)]
