"""The page of one run: what is on it, and that nothing of what others wrote is more than text."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hpc_trainer.cli.main import main
from hpc_trainer.observe.flight import Flight, FlightSpan, write_flight
from hpc_trainer.observe.hang import LANES_STYLE, lanes, last_moments
from hpc_trainer.observe.telemetry_views import Chart, render_telemetry
from hpc_trainer.operate.report.charts import Line
from hpc_trainer.operate.run_page import Log, PagePart, RunPage, render_run_page
from hpc_trainer.operate.why import Why
from hpc_trainer.record.states import RunState
from tests.unit.observe.inside.flights import END, entered, flight
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\'&amp;"</svg></pre></style>'


class Outline(HTMLParser):
    """The tags of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def _why(**changes: Any) -> Why:
    values: dict[str, Any] = {
        "run_id": "mlp-s0-0123456789", "state": RunState.FAILED, "diagnosis": "stuck", "verdict": "It hung.",
        "cause": "stuck",
        "pending_reason": None, "frame": "train.py:7 in load", "evidence": ["step 40 of 99"], "advice": ["look at it"],
        "timeline": ["attempt 0 began"], **changes,
    }  # fmt: skip
    return Why(**values)


def _chart(title: str, unit: str, points: list[tuple[float, float]]) -> Chart:
    line = Line(name=title, points=points, colour=0)
    return Chart(run_id=title, title=title, unit=unit, format_value=str, lines=[line], more=0)


def _parts(flights: Mapping[int, Flight], chart: Chart) -> list[PagePart]:
    """Return the parts of a page that the domain makes of these records and this chart."""
    return [
        PagePart(before_logs=last_moments(flights), style=LANES_STYLE), PagePart(after_logs=render_telemetry([chart])),
    ]  # fmt: skip


def _hostile_page() -> str:
    bad = HOSTILE
    why = _why(
        run_id=bad, verdict=bad, cause=bad, frame=bad, evidence=[bad], advice=[bad], timeline=[bad],
    )  # fmt: skip
    strange = flight(
        0, 812, is_open=True, node=bad, why=bad, frame=bad, error=bad, stack=(bad,),
        spans=(FlightSpan(kind=bad, begin=END - 9, end=None, step=3),),
        collectives=(entered(812, name=bad, group=bad, shape=bad, during=bad, is_open=True),),
    )  # fmt: skip
    return render_run_page(
        RunPage(
            why=why,
            parts=_parts({0: strange, 1: flight(1, 811)}, _chart(bad, bad, [(0.0, 1.0), (1.0, 2.0)])),
            logs=[Log(name=bad, lines=[bad])],
            curves={bad: [(1, 2.0), (2, 3.0)]},
            notes=[bad],
        )
    )


def test_what_others_wrote_is_text() -> None:
    page = _hostile_page()
    outline = Outline(page)
    names = {tag for tag, _ in outline.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a"}
    assert not [key for _, attributes in outline.tags for key in attributes if key.startswith(("on", "href", "src"))]
    assert outline.text.count(HOSTILE) >= 10
    assert "default-src 'none'" in page
    assert re.findall(r"(?:https?:)?//[a-z]|url\(|@import", page) == []
    for drawing in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(drawing)


def test_all_that_is_known_is_on_it() -> None:
    page = render_run_page(
        RunPage(
            why=_why(),
            parts=_parts(
                {0: flight(0, 812, is_open=True, stack=("here",)), 1: flight(1, 811, kind="data_wait")},
                _chart("GPU power", "W", [(0.0, 300.0), (1.0, 310.0)]),
            ),
            logs=[Log(name="attempt-000.rank-0.log", lines=["hello"])], curves={"loss": [(1, 2.0), (2, 1.0)]},
        ),
        now=END,
    )  # fmt: skip
    text = Outline(page).text
    for words in (
        "It hung.", "train.py:7 in load", "step 40 of 99", "look at it", "attempt 0 began", "What the ranks did last",
        "data wait", "in all_reduce 812 for 312 s", "float[1048576]", "4.19 MB", "here", "hello", "GPU power", "loss",
        "2023-11-14 22:13:20 UTC",
    ):  # fmt: skip
        assert words in text, words


def test_of_a_run_that_is_new_there_is_little() -> None:
    text = Outline(render_run_page(RunPage(why=_why(frame=None, timeline=[])))).text
    assert "What the ranks did last" not in text
    assert "Story" not in text


def test_lanes_lie_on_one_axis() -> None:
    found = {0: flight(0, 812, is_open=True), 1: flight(1, 811, kind="data_wait", time=END - 156)}
    drawing = ElementTree.fromstring(re.match(r"<svg.*?</svg>", lanes(found), re.DOTALL)[0])  # type: ignore[index]
    bars = {
        (bar.get("class"), float(bar.get("y", 0))): (float(bar.get("x", 0)), float(bar.get("width", 0)))
        for bar in drawing.iter("rect")
    }
    (step, wait) = (bars["k-step", 8.0], bars["k-data_wait", 52.0])
    assert step[0] == pytest.approx(wait[0])
    assert wait[1] == pytest.approx(step[1] / 2, rel=0.01), "it was written when half of the time had passed"
    assert step[0] + step[1] == pytest.approx(1160 - 16, abs=0.2)
    assert "k-start_up" not in {name for name, _ in bars}, "long before"
    many = lanes({rank: flight(rank, 812, is_open=True) for rank in range(512)})
    assert many.count('class="name end"') == 32


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-trainer", *argv])
        try:
            main()
            code: Any = 0
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        return (code or 0), out.out, out.err

    return run


@pytest.mark.usefixtures("no_slurm")
def test_the_command_writes_it_of_one_run(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    sweep = SweepOnDisk(tmp_path / "runs" / "s", make_specs(2))
    paths = sweep.run(0)
    for index in (0, 1):
        sweep.start(index, resumed=0)
        sweep.end(index, state=RunState.FAILED, cause="stuck", step=40)
    write_flight(paths, flight(0, 812, is_open=True, world=2))
    write_flight(paths, flight(1, 811, kind="data_wait", world=2))
    paths.log(0, 0).write_text(f"line\n{HOSTILE}\n")
    os.mkfifo(paths.log(0, 1))  # nobody waits for it
    (paths.folder / "telemetry").mkdir()
    samples = [
        {"time": END + 60 * minute, "step": minute, "device": None, "host": {"cpus": 1.5, "rss_bytes": 2e9}}
        for minute in range(500)
    ]
    (paths.folder / "telemetry" / "attempt-000.rank-1.jsonl").write_text("\n".join(map(json.dumps, samples)) + "\n{")
    run_id, page = sweep.specs[0].run_id, tmp_path / "page.html"
    code, out, _ = cli("why", run_id, "--html", str(page))
    assert code == 0
    assert "rank 1 on node01 never entered the 812th collective" in out
    assert "--all-ranks" not in out, "the rank is known"
    assert out.rstrip().endswith(f"Page: {page}")
    text = Outline(page.read_text()).text
    assert HOSTILE in text
    assert text.index("GPUs and hosts") < text.index("Busy cores") < text.index("Resident memory"), "as in the report"
    assert "rank 1 on node01 never entered the 812th collective" in text
    assert page.stat().st_mode & 0o777 == 0o600
    code, out, _ = cli("why", run_id, "--html", str(page), "--json")
    assert (code, json.loads(out)["evidence"][0][:18]) == (0, "rank 1 on node01 n")
    sweep.beat(step=90, attempt=0)  # long after the records: it went on
    assert "never entered" not in cli("why", run_id)[1]
    sweep.start(0, attempt=1)
    assert "never entered" not in cli("why", run_id)[1]
    for words, says in ((("s", "--html", str(page)), "2 are named"), ((run_id, "--html", "/nowhere/x"), "no folder")):
        code, _, err = cli("why", *words)
        assert (code, says in err) == (2, True), err
