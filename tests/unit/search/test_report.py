"""Report of a search: its charts have the numbers of its trials, on both pages, and a browser draws them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hpc_trainer
from hpc_trainer.errors import RunStateError
from hpc_trainer.operate.report.data import Report, build_report
from hpc_trainer.operate.report.write import PageOptions, write_page
from hpc_trainer.record.status import read_status
from hpc_trainer.search.report import report_part
from hpc_trainer.search.verbs import best
from tests.unit.operate.browser import chromium, needs_chromium
from tests.unit.search.searches import LR, SearchOnDisk

DECAY = "optim.weight_decay=interval(0,0.1)"
needs_plotly = pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed: hpc_trainer[report]")


def make_search(folder: Path) -> SearchOnDisk:
    """A search by ASHA: of 17 trials some are complete, 1 failed, 1 is at work, and the others are paused."""
    words = ("search=asha", "search.trials=17", "search.eta=2", "search.rungs=[4,16]", "search.metric=eval_loss")
    search = SearchOnDisk(folder, *words, axes=(LR, DECAY))
    for number in range(17):
        chosen = search.next()
        assert chosen is not None
        while not chosen.is_new:  # a promoted one
            trial = search.known()[chosen.number]
            if trial.until == 16:
                search.pauses(chosen.spec.run_id, 16, value_of(chosen.number) / 2)
            else:
                search.completes(chosen.spec.run_id, value_of(chosen.number) / 4)
            chosen = search.next()
            assert chosen is not None
        if number == 3:
            search.fails(chosen.spec.run_id)
        elif number == 16:
            search.begins(chosen.spec.run_id)
        else:
            search.pauses(chosen.spec.run_id, 4, value_of(number))
    return search


def value_of(number: int) -> float:
    return 1 + (7 * number % 17) / 10


def report_of(search: SearchOnDisk) -> Report:
    return build_report(read_status(search.paths, is_look=True))


def test_the_charts_have_the_numbers_of_the_trials(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    trials = search.known()
    report = report_of(search)
    history, rungs = report.panels
    assert report.ranked_by == ("eval_loss", True)
    complete = [trial for trial in trials if trial.value is not None]
    drawn = {dots.name: dots for dots in history.dots}
    assert list(drawn["complete"].run_ids) == [trial.run_id for trial in complete]
    paused = drawn["paused, the value at its rung"]
    assert dict(zip(paused.run_ids, (value for _, value in paused.points), strict=True)) == {
        trial.run_id: trial.at_rungs[max(trial.at_rungs)] for trial in trials if trial.state.value == "PAUSED"
    }
    assert history.line is not None
    values = [value for _, value in history.line[1]]
    assert values == sorted(values, reverse=True), "the best so far never gets worse"
    assert values[-1] == min(trial.value for trial in complete if trial.value is not None)
    assert history.line[1][-1][0] == 16
    heights = {bars.name: list(bars.heights) for bars in rungs.bars}
    assert rungs.categories == ["drawn", "step 4", "step 16", "step 64"]
    at_4 = sum(4 in trial.at_rungs for trial in trials)
    at_16 = sum(16 in trial.at_rungs for trial in trials)
    assert (heights["failed or cancelled"][0], heights["at work"][0]) == (1, 1)
    assert [heights["went on"][at] + heights["paused"][at] for at in (1, 2)] == [at_4, at_16] == [15, at_16]
    assert heights["paused"][1] == sum(trial.state.value == "PAUSED" and trial.until == 4 for trial in trials)
    assert heights.get("complete", [0, 0, 0, 0])[3] == len(complete) > 0


def test_a_grid_has_no_charts_of_a_search(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    search.paths.search.unlink()
    part = report_part(read_status(search.paths, is_look=True))
    assert (part.panels, part.ranked_by, part.notes) == ((), None, [])


def test_a_damaged_file_of_the_search_is_a_note(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    search.paths.search.write_text("{")
    part = report_part(read_status(search.paths, is_look=True))
    assert part.panels == ()
    assert "cannot be read" in part.notes[0]


def test_the_plain_page_draws_history_rungs_and_parameters(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    page = tmp_path / "report.html"
    status = read_status(search.paths, is_look=True)
    write_page([status], page, PageOptions(plain=True))
    text = page.read_text()
    labels = re.findall(r'role="img" aria-label="([^"]*)"', text)
    for title in ("History", "Rungs", "Parallel coordinates", "Slice: optim.lr", "Slice: optim.weight_decay"):
        assert title in labels
    assert "step 4: " in text
    rates = [float(run.spec.axes["optim.lr"]) for run in status.runs]
    slice_ = text.partition('aria-label="Slice: optim.lr"')[2].partition("</svg>")[0]
    places = [float(x) for x in re.findall(r'cx="([\d.]+)"', slice_)]
    with_value = 15
    assert len(places) == with_value
    assert max(places) - min(places) > 100, "dots lie apart on a logarithmic axis"
    assert all(math.isfinite(rate) for rate in rates)
    assert "<script" not in text


@needs_chromium
@needs_plotly
def test_a_browser_draws_them(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    page = tmp_path / "report.html"
    write_page([read_status(search.paths, is_look=True)], page, PageOptions())
    with chromium() as tab:
        tab.open(page)
        tab.js("""(async () => {
            for (const figure of document.querySelectorAll('#of-search figure, #parameters figure')) {
            figure.scrollIntoView();
            while (!figure.querySelector('.plot').dataset.fresh) await new Promise(done => setTimeout(done, 50));
        } })()""")
        titles = tab.js("[...document.querySelectorAll('figure h3')].map(title => title.textContent)")
        assert titles[:2] == ["History", "Rungs"]
        assert {"Parallel coordinates", "Two axes", "Slice: optim.lr", "Slice: optim.weight_decay"} <= set(titles)
        plots = "[...document.querySelectorAll('#of-search .js-plotly-plot')]"
        assert tab.js(f"{plots}.map(plot => plot.data.length)") == [3, 5]
        pair = "[...document.querySelectorAll('#parameters figure')].find(one => one.querySelector('#pair'))"
        kinds = tab.js(f"{pair}.querySelector('.plot').data.map(trace => trace.type)")
        assert kinds == ["contour", "scatter"]
        counted = tab.js(f"{pair}.querySelector('.plot').data[1].x.length")
        assert counted == 15
        assert tab.js("document.querySelector('.tile:nth-child(2)').textContent").startswith("best eval_loss")
        assert (tab.console, tab.requests) == ([], [page.as_uri()])


def test_python_gets_the_best_trial_and_the_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = make_search(tmp_path)
    found = hpc_trainer.best("search", runs_dir=tmp_path)
    trials = search.known()
    values = {trial.number: trial.value for trial in trials if trial.value is not None}
    assert (found.sweep, found.metric, found.rung) == ("search", "eval_loss", None)
    assert (found.trial, found.value) == min(values.items(), key=lambda pair: pair[1])
    assert dict(found.params) == dict(trials[found.trial].params)
    assert found.run_id in found._repr_html_()
    best("search", runs_dir=tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out) == dataclasses.asdict(found)
    again = hpc_trainer.plan(*found.again)
    assert {spec.axes["seed"] for spec in again.grid.specs} == {"0", "1", "2"}
    assert {spec.typed().optim.lr for spec in again.grid.specs} == {found.params["optim.lr"]}
    rows = as_rows(hpc_trainer.results("search", runs_dir=tmp_path))
    assert {row["run_id"]: row["trial"] for row in rows} == {trial.run_id: trial.number for trial in trials}
    assert {row["state"] for row in rows} == {"COMPLETED", "FAILED", "PAUSED", "RUNNING"}
    with pytest.raises(RunStateError, match="there is no sweep none"):
        hpc_trainer.best("none", runs_dir=tmp_path)


def as_rows(found: Any) -> list[dict[str, Any]]:
    return list(found.to_dict("records")) if hasattr(found, "to_dict") else list(found)
