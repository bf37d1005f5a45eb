"""The keys of `top` on real runs of the local queue: retry, hold and release; textual's pilot presses them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hpc_trainer.record.layout import SweepPaths
from tests.integration.conftest import LocalDriver

pytest.importorskip("textual", reason="textual is not installed: pip install 'hpc_trainer[top]'")

from hpc_trainer.cli.top import TopApp

PATIENCE_S = 120.0
WORDS = ("cluster=local", "monitor.heartbeat_every_s=0", "snapshot=off")
Wait = Callable[[Callable[[], object], str], Awaitable[None]]


def _play(local: LocalDriver, sweep: str, steps: Callable[[TopApp, Any, Wait], Awaitable[None]]) -> None:
    """Run the screen on a sweep without a terminal, and the steps of a user."""

    async def run() -> None:
        app = TopApp(local.runs, SweepPaths(local.runs / sweep))
        async with app.run_test(size=(130, 44)) as pilot:

            async def wait(condition: Callable[[], object], what: str) -> None:
                end = time.monotonic() + PATIENCE_S
                while not condition():
                    assert time.monotonic() < end, (what, app.export_screenshot(), local.logs())
                    await pilot.pause(0.5)

            await wait(lambda: app.runs.row_count, "the runs")
            await steps(app, pilot, wait)

    asyncio.run(run())


def _head(app: TopApp) -> str:
    return str(app.query_one("#head").render())


async def _answer(app: TopApp, pilot: Any, wait: Wait, key: str, question: str) -> None:
    """Press the key of a verb, and `y` at its question."""
    await pilot.press(key)
    await wait(lambda: len(app.screen_stack) == 2, "a question")
    assert question in str(app.screen.query_one("Static").render())
    await pilot.press("y")


@pytest.mark.long
def test_r_submits_a_failed_run_again(local: LocalDriver) -> None:
    mended = local.folder / "mended"
    local.run("submit", *WORDS, "--command", f"test -e {mended}", "sweep_name=flaky", "--wait", check=False)
    (run,) = local.json("status", "flaky")["runs"]
    assert (run["state"], run["attempt"]) == ("FAILED", 1)
    mended.touch()

    async def steps(app: TopApp, pilot: Any, wait: Wait) -> None:
        assert "1 FAILED" in _head(app)
        await _answer(app, pilot, wait, "r", f"retry {run['run_id']}?")
        await wait(lambda: "1 COMPLETED" in _head(app), "the end of the second attempt")

    _play(local, "flaky", steps)
    (run,) = local.json("status", "flaky")["runs"]
    assert (run["state"], run["attempt"]) == ("COMPLETED", 2)


@pytest.mark.long
def test_h_and_u_hold_and_release_a_run_that_waits(local: LocalDriver) -> None:
    """The first run works until `go` is there, and the second one waits for its place."""
    go = local.folder / "go"
    command = f"until test -e {go}; do sleep 0.2; done"
    axis = ("+params.number=1,2", "cluster.array_parallelism=1")
    local.run("submit", *WORDS, *axis, "--command", f"sh -c '{command}' sh {{params.number}}", "sweep_name=waits")
    first, second = (run["run_id"] for run in local.json("status", "waits")["runs"])
    hold = SweepPaths(local.runs / "waits").run(second).marker("HOLD")

    async def steps(app: TopApp, pilot: Any, wait: Wait) -> None:
        await wait(lambda: "1 RUNNING" in _head(app), "the first run")
        while app.run_id != second:
            await pilot.press("down")
        await _answer(app, pilot, wait, "h", f"hold {second}?")
        await wait(lambda: "1 HELD" in _head(app), "the hold")
        assert hold.exists()
        go.touch()
        await wait(lambda: "1 COMPLETED" in _head(app), "the end of the first run")
        assert "1 HELD" in _head(app), "it does not start, although its place is free"
        while app.run_id != second:
            await pilot.press("down")
        await _answer(app, pilot, wait, "u", f"release {second}?")
        await wait(lambda: "2 COMPLETED" in _head(app), "the end of the released run")

    try:
        _play(local, "waits", steps)
    finally:
        go.touch()
    runs = {run["run_id"]: run for run in local.json("status", "waits")["runs"]}
    assert [runs[run_id]["attempt"] for run_id in (first, second)] == [1, 1]
    assert not hold.exists()
