"""`top`: what the screen shows, and what its keys do; textual's pilot presses them."""

from __future__ import annotations

import asyncio
import html
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_trainer.cli import top_views
from hpc_trainer.cli.main import main
from hpc_trainer.errors import ConfigError
from hpc_trainer.record.reading import is_there
from hpc_trainer.record.states import CANCEL, HOLD
from hpc_trainer.record.status import read_status
from tests.unit.operate.test_report_interactive import make_sweep
from tests.unit.record.sweeps import SweepOnDisk

pytestmark = pytest.mark.usefixtures("no_slurm")
pytest.importorskip("textual", reason="textual is not installed: pip install 'hpc_trainer[top]'")

from hpc_trainer.cli.top import TopApp, run_top  # noqa: E402

PATIENCE_S = 120.0
EVIL = "[bold red]x[/]\x1b]0;owned\x07"


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    """Twelve runs: two failed, and the last one waits."""
    sweep = make_sweep(tmp_path / "runs" / "mine")
    make_sweep(tmp_path / "runs" / "other", num_runs=2)
    for name in ("DONE", "result.json"):
        (sweep.run(0).folder / name).unlink()
    for path in sweep.run(0).logs.iterdir():
        path.unlink()
    (sweep.run(5).logs / "attempt-000.rank-0.log").write_text(f"one line\n{EVIL}\n")
    return sweep


def play(sweep: SweepOnDisk, steps: Callable) -> None:
    """Run the screen without a terminal, and the steps of a user."""

    async def run() -> None:
        app = TopApp(sweep.paths.folder.parent, sweep.paths)
        async with app.run_test(size=(130, 44)) as pilot:

            async def wait(condition: Callable[[], object], what: str) -> None:
                end = time.monotonic() + PATIENCE_S
                while not condition():
                    assert time.monotonic() < end, (what, app.export_screenshot())
                    await pilot.pause(0.1)

            await wait(lambda: app.runs.row_count == len(sweep.specs), "the runs")
            await steps(app, pilot, wait)

    asyncio.run(run())


def text_of(app: object, name: str) -> str:
    return str(app.query_one(name).render())


def test_a_user_sees_runs_curves_log_and_explanation(sweep: SweepOnDisk) -> None:
    async def steps(app, pilot, wait) -> None:
        assert "2 FAILED" in text_of(app, "#head")
        assert [option.id for option in app.query_one("#sweeps").options] in (["other", "mine"], ["mine", "other"])
        assert app.run_id == sweep.specs[5].run_id, "what failed comes first: nothing runs"
        await wait(lambda: "loss: " in text_of(app, "#text-curves"), "a curve")
        assert any(0x2800 < ord(letter) < 0x2900 for letter in text_of(app, "#text-curves"))
        await pilot.press("2")
        await wait(lambda: "one line" in text_of(app, "#text-log"), "the log")
        assert "[bold red]x[/]" in text_of(app, "#text-log"), "text of users is no markup"
        assert "\x1b" not in text_of(app, "#text-log")
        await pilot.press("3")
        await wait(lambda: "raised an exception" in text_of(app, "#text-why"), "why")
        await pilot.press("down")
        await wait(lambda: sweep.specs[11].run_id in text_of(app, "#text-why"), "why of the next run")

    play(sweep, steps)


def test_keys_ask_and_then_run_the_verb(sweep: SweepOnDisk) -> None:
    run = sweep.run(0)

    async def steps(app, pilot, wait) -> None:
        while app.run_id != run.run_id:
            await pilot.press("down")
        await pilot.press("h")
        await wait(lambda: len(app.screen_stack) == 2, "a question")
        await pilot.press("n")
        await pilot.press("c")
        await wait(lambda: len(app.screen_stack) == 2, "a question")
        assert f"cancel {run.run_id}?" in str(app.screen.query_one("Static").render())
        assert not is_there(run.marker(CANCEL))
        await pilot.press("y")
        await wait(lambda: is_there(run.marker(CANCEL)), "the marker")
        await wait(lambda: "1 CANCELLED" in text_of(app, "#head"), "a new look")

    play(sweep, steps)
    assert not is_there(run.marker(HOLD))


def test_a_log_shows_its_end_until_a_user_scrolls_up(sweep: SweepOnDisk) -> None:
    log = sweep.run(5).logs / "attempt-000.rank-0.log"
    log.write_text("".join(f"line {number}\n" for number in range(150)))

    async def steps(app, pilot, wait) -> None:
        box = app.query_one("#text-log").parent
        await pilot.press("2")
        await wait(lambda: "line 149" in text_of(app, "#text-log"), "the log")
        await wait(lambda: box.max_scroll_y > 0 and box.is_vertical_scroll_end, "its end in view")
        with log.open("a") as file:
            file.write("line 150\n")
        await pilot.press("f5")
        await wait(lambda: "line 150" in text_of(app, "#text-log"), "the new line")
        await wait(lambda: box.is_vertical_scroll_end, "the new end in view")
        box.scroll_home(animate=False)
        with log.open("a") as file:
            file.write("line 151\n")
        await pilot.press("f5")
        await wait(lambda: "line 151" in text_of(app, "#text-log"), "the next line")
        await pilot.pause(0.3)
        assert box.scroll_y == 0, "what a user reads stays in view"

    play(sweep, steps)


def test_80_columns_show_all_keys(sweep: SweepOnDisk) -> None:
    async def run() -> str:
        app = TopApp(sweep.paths.folder.parent, sweep.paths)
        async with app.run_test(size=(80, 24)) as pilot:
            end = time.monotonic() + PATIENCE_S
            while "quit" not in app.export_screenshot() and time.monotonic() < end:
                await pilot.pause(0.1)
            return html.unescape(app.export_screenshot()).replace("\xa0", " ")

    shown = re.sub(r"<[^>]*>", "", asyncio.run(run()))
    keys = ("quit", "cancel", "retry", "hold", "release", "run / sweep", "read now", "1 curves", "2 log", "3 why")
    assert [words for words in keys if words not in shown] == []


def test_a_sweep_that_is_deleted_is_said_to_be_gone(sweep: SweepOnDisk) -> None:
    async def steps(app, pilot, wait) -> None:
        shutil.rmtree(sweep.paths.folder)
        await pilot.press("f5")
        await wait(lambda: "there is no sweep mine" in text_of(app, "#head"), "a sentence")
        for key in ("2", "3", "1", "down"):
            await pilot.press(key)
            await pilot.pause(0.3)
        await pilot.press("r")
        await wait(lambda: len(app.screen_stack) == 2, "a question")
        await pilot.press("y")
        await wait(lambda: any("there is no" in note.message for note in app._notifications), "what the verb says")

    play(sweep, steps)


def test_it_looks_as_rarely_as_watch(sweep: SweepOnDisk) -> None:
    status = read_status(sweep.paths)
    assert top_views.next_pause_s(None) == 10.0
    assert top_views.next_pause_s(status) >= 2.0


def test_without_textual_a_message_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "textual" else object())
    monkeypatch.setattr("sys.argv", ["hpc-trainer", "top"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert "status --watch, needs the package textual: pip install 'hpc_trainer[top]'" in errors


def test_a_pipe_gets_no_screen(sweep: SweepOnDisk, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="top needs a terminal"):
        run_top("mine", sweep.paths.folder.parent)


def test_a_plot_fills_its_lines() -> None:
    lines = top_views._plot("loss", [(0, 3.0), (10, 1.0), (20, 2.0)], 30, 5)
    assert lines[0].rstrip() == "loss: 2, from 1 to 3"
    assert [len(line) for line in lines] == [30] * 6
    heads = [top_views._plot("loss", [(0, 3.0), (10, 2.0)], width, 5)[0].rstrip() for width in (50, 30, 12)]
    assert heads == ["loss: 2, from 2 to 3, step 0 to 10", "loss: 2, from 2 to 3", "loss: 2"], "no half words"
    assert lines[1][0] != chr(0x2800), "the highest value is at the top left"
    assert lines[5].strip(chr(0x2800)), "the least is at the bottom"
    assert len(top_views._plot("x", [(1, 1.0)], 10, 3)) == 4
