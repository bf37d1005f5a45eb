"""The interactive page in a real browser: nothing is asked for or executed, and table, filters and charts work."""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.observe.telemetry import Device, Host, Sample, append_samples
from hpc_trainer.operate.report.data import build_report, most_records
from hpc_trainer.operate.report.interactive import (
    ReportedSweep,
    asked_importance,
    render_interactive,
)
from hpc_trainer.operate.results import result_table
from hpc_trainer.record.files import write_json
from hpc_trainer.record.metrics import read_metrics, sampled_metrics
from hpc_trainer.record.reading import Faults
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.worker.importance import importances
from tests.unit.operate.browser import Tab, chromium, needs_chromium
from tests.unit.operate.test_report import _sweep as scaled_sweep
from tests.unit.record.builders import make_spec
from tests.unit.record.sweeps import SweepOnDisk

EVIL = '</script><img src=x onerror="window.pwned=1"><b>%{x}</b>&lt;i&gt;\'"\x00\ud800'
plotly = pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed: hpc_trainer[report]")
pytestmark = [plotly, pytest.mark.usefixtures("no_slurm")]


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_sweep(
    folder: Path, *overrides: str, num_runs: int = 12, lines: int = 40, evil: bool = False, name: str = "eval_loss"
) -> SweepOnDisk:
    """A sweep over two axes and seeds, of which every sixth run failed; with `evil` all texts are hostile."""
    chance = random.Random(0)
    rates = [1e-4, 1e-3, 1e-2, 1e-1]
    name = f"a.{EVIL}" if evil else name
    specs = [
        make_spec(
            *overrides,
            axes={"optim.lr": f"{rates[index % 4]:g}", "seed": str(index // 4), **({EVIL: EVIL} if evil else {})},
            seed=index // 4,
            optim__lr=rates[index % 4],
            train__num_steps=lines * 10,
        )
        for index in range(num_runs)
    ]
    sweep = SweepOnDisk(folder, specs)
    sweep.submit("500", executor="local")
    for index in range(num_runs):
        sweep.start(index, executor="local", resumed=0, node=EVIL if evil else f"n{index % 3}")
        far = abs(math.log10(rates[index % 4]) + 2)
        records = [
            {"step": 10 * at, "loss": far + 2 / at + 0.05 * chance.random(), "steps_per_s": 2.0, "samples_per_s": 128.0}
            for at in range(1, lines + 1)
        ]
        evals = [{"step": 10 * at, name: far + 1 / at} for at in range(lines // 4, lines + 1, lines // 4)]
        _write(sweep.run(index).metrics, sorted([*records, *evals], key=lambda record: record["step"]))
        if index % 6 == 5:
            error = {"type": "ValueError", "message": EVIL if evil else "bad sample", "rank": 0, "node": "n1"}
            sweep.end(index, state=RunState.FAILED, cause="exception", error={**error, "output": EVIL})
        else:
            sweep.end(index, state=RunState.COMPLETED, cause="done")
            sweep.done(index, **{name: far + 1 / lines})
    return sweep


def page_of(*sweeps: SweepOnDisk) -> str:
    most = most_records(sum(len(sweep.specs) for sweep in sweeps))
    statuses = [read_status(sweep.paths, is_look=True) for sweep in sweeps]
    reports = [build_report(status, most_points=most) for status in statuses]
    tables = [result_table(status, typed=True) for status in statuses]
    with asked_importance(tables) as asked:
        parts = zip(statuses, reports, tables, strict=True)
        return render_interactive([ReportedSweep(*part) for part in parts], asked.result, now=0.0)


def test_of_many_lines_some_are_parsed_and_evaluations_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"step": at, "loss": 1 / at, "lr": 0.1} for at in range(1, 1001)]
    records += [{"step": at, "eval_loss": 1.0} for at in range(100, 1001, 100)]
    _write(path, sorted(records, key=lambda record: record["step"]))
    sampled, gap = sampled_metrics(path, 100)
    assert gap == 10
    assert [record["step"] for record in sampled if "eval_loss" in record] == [*range(100, 1001, 100)]
    steps = [record["step"] for record in sampled if "loss" in record]
    assert (steps[0], steps[-1], len(steps), steps == sorted(steps)) == (1, 1000, 101, True)
    assert sampled_metrics(path, 1000) == (read_metrics(path), 1)
    with path.open("a") as file:
        file.write('{"step": "x"}\n{"step": 5, "lo')
    faults = Faults()
    assert sampled_metrics(path, 1000, faults)[0] == read_metrics(path)
    assert len(faults) == 1, "a torn end is no fault"
    assert sampled_metrics(tmp_path / "none", 10) == ([], 1)


def _data_of(page: str) -> dict[str, Any]:
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    assert packed is not None
    return dict(json.loads(gzip.decompress(base64.b64decode(packed[1]))))


@pytest.mark.parametrize(("mode", "best"), [("min", min), ("max", max)])
def test_the_direction_of_a_metric_is_that_of_the_runs_best_checkpoint(
    tmp_path: Path, mode: str, best: Callable[[list[float]], float]
) -> None:
    """The name `spikes` does not tell it, and `results` follows `checkpoint.best_mode`, too."""
    chosen = ("checkpoint.keep_best=spikes", f"checkpoint.best_mode={mode}")
    sweep = make_sweep(tmp_path / "spikes", *chosen, num_runs=2, lines=8, name="spikes")
    for index in range(2):
        metrics = json.loads(sweep.run(index).result.read_text())["metrics"]
        sweep.done(index, **metrics, eval_accuracy=0.5)
    table = result_table(read_status(sweep.paths, is_look=True), typed=True, best=True)
    data = _data_of(page_of(sweep))
    values = [record["spikes"] for record in read_metrics(sweep.run(0).metrics) if "spikes" in record]
    ups = {column["name"]: column["up"] for column in data["columns"]}
    assert data["metric"] == table.compared_by == "spikes"
    assert ups["spikes"] == ups["spikes.best"] == (best is min)
    assert data["runs"][0]["cells"]["spikes.best"] == best(values) == table.rows[0]["spikes.best"]
    first = table.sorted_by("spikes").rows[0]["run_id"]
    ends = {run["cells"]["run_id"]: run["cells"]["spikes"] for run in data["runs"]}
    assert ends[first] == best([*ends.values()])


def test_runs_of_several_sweeps_have_a_column_with_their_sweep(tmp_path: Path) -> None:
    first, second = (make_sweep(tmp_path / "runs" / name, num_runs=2, lines=8) for name in ("first", "second"))
    data = _data_of(page_of(first, second))
    assert [column["name"] for column in data["columns"] if column["shown"]][:2] == ["run_id", "sweep"]
    assert [run["cells"]["sweep"] for run in data["runs"]] == ["first", "first", "second", "second"]
    assert "sweep" not in [column["name"] for column in _data_of(page_of(first))["columns"]]


def test_the_forest_finds_the_axis_that_matters() -> None:
    chance = random.Random(0)
    rates = [10 ** chance.uniform(-4, -1) for _ in range(60)]
    words = [chance.choice(["adamw", "sgd", True, None]) for _ in rates]
    (rate, _), (word, _) = importances([rates, words], [math.log10(each) for each in rates])
    assert rate > 0.9
    assert word < 0.1


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@pytest.fixture
def clean_tab(tab: Tab) -> Tab:
    tab.console.clear()
    tab.requests.clear()
    return tab


CELLS = "[...document.querySelectorAll('.runs-table tbody tr')].map(row => Number(row.dataset.run))"
# Every run's colours: those of its marks beside the table and legends, of lines, and of points.
COLOURS = """(() => {
  const found = {}, add = (run, colour) => { (found[run] ??= new Set()).add(colour); };
  const probe = document.createElement('span');
  const plain = (colour) => { probe.style.color = colour; return probe.style.color; };
  for (const mark of document.querySelectorAll('.swatch')) add(mark.dataset.run, plain(mark.style.background));
  for (const plot of document.querySelectorAll('.js-plotly-plot')) for (const trace of plot.data) {
    if (trace.meta?.run !== undefined) add(trace.meta.run, plain(trace.line.color));
    if (trace.customdata && Array.isArray(trace.marker?.color))
      trace.customdata.forEach((run, at) => add(run, plain(trace.marker.color[at])));
  }
  return Object.fromEntries(Object.entries(found).map(([run, colours]) => [run, [...colours]]));
})()"""


def see_all(tab: Tab) -> None:
    """Scroll through the page, so that every chart is drawn."""
    tab.js("""(async () => { for (const figure of document.querySelectorAll('figure')) {
        figure.scrollIntoView();
        while (!figure.querySelector('.plot').dataset.fresh) await new Promise(done => setTimeout(done, 20));
    } window.scrollTo(0, 0); })()""")
    assert tab.js("document.querySelectorAll('.plot:not(.js-plotly-plot)').length") == 0


def click(tab: Tab, selector: str) -> None:
    tab.js(f"document.querySelector({json.dumps(selector)}).click()")


def type_into(tab: Tab, selector: str, text: str) -> None:
    """Focus an input and press keys, as a user does."""
    tab.js(f"document.querySelector({json.dumps(selector)}).focus()")
    tab.call("Input.insertText", text=text)


@needs_chromium
def test_a_user_sorts_filters_and_sees_equal_colours(clean_tab: Tab, tmp_path: Path) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    sweep = make_sweep(tmp_path / "runs" / "mine")
    page.write_text(page_of(sweep), encoding="utf-8")
    tab.open(page)
    assert tab.js("document.querySelector('h1').textContent") == "mine"
    assert tab.js(CELLS)[:3] == [2, 6, 10], "the best come first: optim.lr=0.01"
    click(tab, "[data-column='optim.lr']")
    rates = [float(sweep.specs[run].axes["optim.lr"]) for run in tab.js(CELLS)]
    assert rates == sorted(rates)
    assert tab.js("document.querySelector('[data-column=\"optim.lr\"]').closest('th').ariaSort") == "ascending"
    click(tab, "[data-column='optim.lr']")
    assert [float(sweep.specs[run].axes["optim.lr"]) for run in tab.js(CELLS)] == sorted(rates, reverse=True)
    type_into(tab, "[data-filter='optim.lr']", ">1e-3 <=1e-2")
    assert {sweep.specs[run].axes["optim.lr"] for run in tab.js(CELLS)} == {"0.01"}
    type_into(tab, "[data-filter='state']", "fail")
    assert tab.js(CELLS) == []
    click(tab, "#clear")
    assert len(tab.js(CELLS)) == 12
    tab.press("/", "Slash", 191, "/")
    assert tab.js("document.activeElement.id") == "search", "a key leads to the search"
    tab.call("Input.insertText", text="FAILED")
    assert sorted(tab.js(CELLS)) == [5, 11]
    click(tab, "#clear")
    click(tab, ".runs-table tbody tr:nth-child(2) input")
    see_all(tab)
    colours = tab.js(COLOURS)
    assert len(colours) == 12
    assert {run: len(found) for run, found in colours.items() if len(found) != 1} == {}
    assert len({found[0] for found in colours.values()}) == 12
    buttons = set(tab.js("[...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title)"))
    assert buttons == {"Download plot as a PNG", "Zoom", "Pan", "Autoscale", "Reset axes"}, "none sends data away"
    titles = tab.js("[...document.querySelectorAll('h2')].map(title => title.textContent)")
    assert titles == ["Runs", "Curves", "Parameters", "Failures", "Time and cost", "One run"]
    text = tab.js("document.body.textContent")
    for words in (
        "2 × FAILED",
        "The training raised an exception",
        "ValueError: bad sample",
        "Slice: optim.lr",
        "Importance",
    ):
        assert words in text
    # Hidden: the second row's run. Curves have one line for each other run.
    lines = "document.querySelector('#curves .js-plotly-plot').data.length"
    assert tab.js(lines) == 11
    tab.js("""(() => { const smooth = document.querySelector('#smooth');
        smooth.value = 0.9; smooth.oninput({target: smooth});
        document.querySelector('#curves').scrollIntoView(); })()""")
    tab.wait(f"{lines} === 22")  # each line smoothed, above its faint values
    tab.js("""(() => { const band = document.querySelectorAll('#curves select')[1];
        band.value = 'seed'; band.onchange({target: band}); })()""")
    tab.wait(f"{lines} === 12")  # four groups: two edges of the band, and the mean
    assert tab.js("document.documentElement.scrollWidth") <= 1200
    cut = "[...document.querySelectorAll('.wide')].filter(box => box.scrollWidth > box.clientWidth).length"
    assert tab.js(cut) == 0
    before = tab.js("getComputedStyle(document.body).backgroundColor")
    click(tab, "#theme")
    assert tab.js("getComputedStyle(document.body).backgroundColor") != before
    see_all(tab)
    assert {run: len(found) for run, found in tab.js(COLOURS).items() if len(found) != 1} == {}
    assert len(tab.call("Page.printToPDF")["data"]) > 20_000
    assert tab.console == []
    assert tab.requests == [page.as_uri()]


@needs_chromium
def test_a_drag_over_an_axis_filters_the_rows(clean_tab: Tab, tmp_path: Path) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    sweep = make_sweep(tmp_path / "runs" / "mine")
    page.write_text(page_of(sweep), encoding="utf-8")
    tab.open(page)
    see_all(tab)
    parallel = "document.querySelector('#parameters .plot')"
    names = tab.js(f"{parallel}.layout.xaxis.ticktext")

    def drag(name: str, bottom: float, top: float) -> None:
        """Drag over an axis, from and to these shares of its height."""
        tab.js(f"{parallel}.scrollIntoView({{block: 'center'}})")
        places = [
            tab.js(f"""(() => {{ const box = {parallel}, rect = box.getBoundingClientRect(), full = box._fullLayout;
                return [rect.x + full._size.l + full.xaxis.l2p({names.index(name)} + {shift}),
                        rect.y + full._size.t + full.yaxis.l2p({share})]; }})()""")
            for shift, share in ((-0.1, top), (0.1, bottom))
        ]
        for kind, (x, y) in zip(
            ("mousePressed", "mouseMoved", "mouseReleased"), (places[0], places[1], places[1]), strict=True
        ):
            tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    drag("optim.lr", 0.8, 1.04)
    tab.wait("document.querySelector('[data-filter=\"optim.lr\"]').value")
    low, high = map(float, tab.js("document.querySelector('[data-filter=\"optim.lr\"]').value").split(".."))
    rates = [float(spec.axes["optim.lr"]) for spec in sweep.specs]
    assert 0 < low < high == max(rates), "the axis is logarithmic, and its end belongs to the range"
    assert {rates[run] for run in tab.js(CELLS)} == {rate for rate in rates if low <= rate <= high} == {max(rates)}
    click(tab, "#clear")
    assert len(tab.js(CELLS)) == 12
    assert tab.console == []


def test_a_reload_has_the_same_filters_order_and_columns(clean_tab: Tab, tmp_path: Path) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    page.write_text(page_of(make_sweep(tmp_path / "runs" / "mine")), encoding="utf-8")
    tab.open(page)
    assert tab.js("location.hash") == "", "nothing to keep"
    type_into(tab, "[data-filter='optim.lr']", ">1e-3 <=1e-1")
    type_into(tab, "#search", "n1")
    click(tab, "[data-column='seed']")
    columns = "[...document.querySelectorAll('[data-column]')].map(head => head.dataset.column)"
    click(tab, "#columns input:checked")
    seen = [tab.js(CELLS), tab.js(columns), tab.js("document.querySelector('#search').value")]
    assert 0 < len(seen[0]) < 12
    tab.js("document.querySelector('nav a[href=\"#failures\"]').click()")
    tab.wait("location.hash.includes('filter')")
    tab.call("Page.reload")
    tab.wait("performance.getEntriesByType('navigation')[0].type === 'reload'")
    tab.wait("document.documentElement?.dataset.shown")
    assert [tab.js(CELLS), tab.js(columns), tab.js("document.querySelector('#search').value")] == seen
    assert tab.js("document.querySelector('[data-filter=\"optim.lr\"]').value") == ">1e-3 <=1e-1"
    click(tab, "#clear")
    assert len(tab.js(CELLS)) == 12
    assert "filter" not in tab.js("location.hash")
    tab.js("location.hash = 'filter.state=FAILED&sort=nonsense&column=none&filter.constructor=x'")
    tab.wait("document.querySelectorAll('.runs-table tbody tr').length === 2")
    assert tab.console == []


# Texts of the table of runs that have more than one line, of those that must not break.
BROKEN = """[...document.querySelectorAll('.runs-table :is(td.num, td.state)')].filter(cell => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map(box => box.top)).size > 1; }).map(cell => cell.textContent)"""


@needs_chromium
@pytest.mark.parametrize("width", [1200, 800])
def test_numbers_and_states_are_not_broken(clean_tab: Tab, tmp_path: Path, width: int) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    specs = [
        make_spec(axes={"optim.lr": rate, "optim.weight_decay": "0.1"}, optim__lr=float(rate))
        for rate in ("1e10", "1234567", "0.1")
    ]
    sweep = SweepOnDisk(tmp_path / "runs" / "rates", specs)
    for index in range(3):
        sweep.start(index, executor="local", resumed=0)
        sweep.end(index, state=RunState.COMPLETED, cause="done")
        sweep.done(index, eval_loss=0.123456789, eval_accuracy=0.987654321, eval_perplexity=123.456789)
    page.write_text(page_of(sweep), encoding="utf-8")
    tab.open(page, width=width)
    rates = "[...document.querySelectorAll('.runs-table tbody tr')].map(row => row.cells[2].textContent).sort()"
    assert tab.js(rates) == ["0.1", "1234567", "1e10"]
    assert tab.js(BROKEN) == []
    assert tab.js("document.documentElement.scrollWidth") <= width, "what is too wide scrolls in its own box"
    for asked in ("=10000000000|5", "=1e10", ">1e9"):
        type_into(tab, "[data-filter='optim.lr']", asked)
        assert tab.js(CELLS) == [0], asked
        click(tab, "#clear")


# Charts that are not drawn as a whole in their figure.
CUT = """[...document.querySelectorAll('figure .main-svg')].filter(svg => {
    const box = svg.getBoundingClientRect(), frame = svg.closest('figure').getBoundingClientRect();
    const drawn = svg.closest('.js-plotly-plot')._fullLayout;
    const shown = svg.hasAttribute('viewBox') ? svg.viewBox.baseVal : box;
    return box.left < frame.left || box.right > frame.right || box.bottom > frame.bottom || box.width < 100
        || shown.width + 1 < drawn.width || shown.height + 1 < drawn.height;
}).length"""


@needs_chromium
def test_paper_has_whole_charts_and_says_what_it_shows(clean_tab: Tab, tmp_path: Path) -> None:
    """Also charts that nobody has scrolled to are printed, at the width of the paper."""
    tab, page = clean_tab, tmp_path / "page.html"
    page.write_text(page_of(make_sweep(tmp_path / "runs" / "mine", num_runs=40)), encoding="utf-8")
    tab.open(page, dark=True)
    type_into(tab, "[data-filter='seed']", "<9")
    tab.call("Emulation.setEmulatedMedia", media="print")
    tab.js("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.js("document.querySelectorAll('.plot:not(.js-plotly-plot)').length") == 0
    for width in (718, 600, 1000):  # A4, A4 with wide margins, A4 across
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert tab.js(CUT) == 0, width
        assert tab.js("document.documentElement.scrollWidth") <= width
    assert tab.js("document.querySelector('p.onprint').innerText") == (
        "36 of 40 runs; the table has the first 25; seed: <9"
    )
    # Chromium leaves buttons out where it repeats the head of a table on the next page.
    heads = "[...document.querySelectorAll('.runs-table th span')].map(head => head.innerText.split(' ')[0])"
    assert tab.js(heads)[:3] == ["run_id", "optim.lr", "seed"]
    assert tab.js("document.querySelector('.runs-table th button').checkVisibility()") is False
    tab.call("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    tab.call("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    tab.js("window.dispatchEvent(new Event('afterprint'))")
    see_all(tab)
    tab.wait(f"{CUT} === 0")
    assert tab.js("document.querySelectorAll('.main-svg[viewBox]').length") == 0
    assert tab.js("document.documentElement.dataset.theme") == "dark"
    assert tab.console == []


@needs_chromium
def test_the_focus_stays_where_a_key_was_pressed(clean_tab: Tab, tmp_path: Path) -> None:
    """Enter sorts, shows all rows and opens a run; the next Tab goes on from there, not from the top of the page."""
    tab, page = clean_tab, tmp_path / "page.html"
    page.write_text(page_of(make_sweep(tmp_path / "runs" / "mine", num_runs=30)), encoding="utf-8")
    tab.open(page)

    def enter(selector: str) -> None:
        tab.js(f"document.querySelector({json.dumps(selector)}).focus()")
        tab.press("Enter", "Enter", 13, "\r")

    enter("[data-column='optim.lr']")
    assert tab.js("document.querySelector('[data-column=\"optim.lr\"]').closest('th').ariaSort") == "ascending"
    tab.press("Enter", "Enter", 13, "\r")
    assert tab.js("document.querySelector('[data-column=\"optim.lr\"]').closest('th').ariaSort") == "descending"
    assert tab.js("getComputedStyle(document.activeElement).outlineStyle") == "solid", "one sees where the focus is"
    tab.press("Tab", "Tab", 9)
    assert tab.js("document.activeElement.dataset.column") == "seed"
    enter("button.more")
    assert len(tab.js(CELLS)) == 30
    assert tab.js("document.activeElement.closest('tr').rowIndex") == 27, "two rows of the head, then the 26th run"
    enter(".runs-table tbody tr:nth-child(3) .id button")
    assert tab.js("document.activeElement.id") == "chosen-run"
    before = tab.js("document.activeElement.value")
    tab.press("ArrowDown", "ArrowDown", 40)
    tab.wait(f"document.querySelector('#chosen-run').value !== '{before}'")
    assert tab.console == []


# What a user chose outside the table, as the page's controls and charts show it.
CHOSEN = """({
  off: [...document.querySelectorAll('.runs-table tbody tr.off')].map(row => row.querySelector('.id').textContent),
  bar: [...document.querySelectorAll('#curves .bar :is(select, input), #parameters > .bar select')].map(
    control => control.type === 'checkbox' ? control.checked : control.value),
  pair: [...document.querySelectorAll('#pair select')].map(control => control.value),
  run: document.querySelector('#chosen-run').selectedOptions[0].textContent,
  axes: [...document.querySelectorAll('#curves .js-plotly-plot')].slice(0, 1).map(
    plot => [plot.layout.xaxis.type, plot.layout.yaxis.type, plot.data.length]),
})"""


@needs_chromium
def test_a_page_written_anew_has_the_unticked_rows_and_the_settings_of_the_curves(
    clean_tab: Tab, tmp_path: Path
) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    sweep = make_sweep(tmp_path / "runs" / "mine")
    page.write_text(page_of(sweep), encoding="utf-8")
    tab.open(page)
    at_first = tab.js(CHOSEN)
    for row in (2, 5):
        click(tab, f".runs-table tbody tr:nth-child({row}) input")
    click(tab, ".runs-table tbody tr:nth-child(4) .id button")
    tab.js("""(() => { const smooth = document.querySelector('#smooth');
        smooth.value = 0.9; smooth.oninput({target: smooth}); smooth.onchange({target: smooth});
        for (const box of document.querySelectorAll('#curves input[type=checkbox]')) box.click();
        const choose = (selector, at, value) => { const box = document.querySelectorAll(selector)[at];
            box.value = value; box.onchange({target: box}); };
        choose('#curves select', 0, '10'); choose('#curves select', 1, 'seed');
        choose('#parameters > .bar select', 0, 'eval_loss');
        choose('#pair select', 0, 'seed'); choose('#pair select', 1, 'optim.lr'); })()""")
    see_all(tab)
    seen = tab.js(CHOSEN)
    assert len(seen["off"]) == 2
    assert seen["axes"][0][:2] == ["log", "log"]
    assert (seen["pair"], seen["bar"][-1]) == (["seed", "optim.lr"], "eval_loss")
    # As `--watch` writes it when the grid has grown: runs have other places.
    write_json(sweep.paths.sweep, {"run_ids": [spec.run_id for spec in reversed(sweep.specs)]})
    page.write_text(page_of(sweep), encoding="utf-8")
    tab.call("Page.reload")
    tab.wait("performance.getEntriesByType('navigation')[0].type === 'reload'")
    tab.wait("document.documentElement?.dataset.shown")
    see_all(tab)
    again = tab.js(CHOSEN)
    assert (sorted(again.pop("off")), again) == (sorted(seen.pop("off")), seen)
    bad = "off=none&runs=7&smooth=x&log=z&band=none&metric=none&axis=none&axis=seed&run=none"
    tab.js(f"location.hash = '{bad}'")
    tab.wait("document.querySelectorAll('.runs-table tbody tr.off').length === 0")
    tab.wait("document.documentElement?.dataset.shown")
    assert tab.js(CHOSEN)["bar"] == at_first["bar"]
    assert tab.console == []


@needs_chromium
def test_hostile_texts_stay_texts(clean_tab: Tab, tmp_path: Path) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    text = page_of(make_sweep(tmp_path / "runs" / "evil", evil=True))
    page.write_text(text, encoding="utf-8")
    assert "onerror" not in text.partition('<script type="text/plain"')[0]
    assert text.count("</script>") == 4
    tab.open(page, dark=True)
    see_all(tab)
    for run in (0, 5):
        tab.js(f"document.querySelector('#chosen-run').onchange({{target: {{value: '{run}'}}}})")
    assert "onerror" in tab.js("document.body.textContent"), "the texts are shown"
    assert tab.js("window.pwned === undefined")
    assert tab.js("document.querySelectorAll('img[src=x], main b b, iframe, object').length") == 0
    # What a hostile text could do if it did execute is not allowed either.
    blocked = tab.js("""new Promise(done => {
        document.addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));
        const script = document.createElement('script');
        script.textContent = 'window.pwned = 2';
        document.body.append(script); })""")
    assert (blocked, tab.js("window.pwned === undefined")) == ("script-src-elem", True)
    assert tab.js("fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')") == "refused"
    assert tab.requests == [page.as_uri()]


@needs_chromium
@pytest.mark.parametrize(
    ("seconds", "unit", "length"), [(2.5, "seconds", 2.5), (90.0, "minutes", 1.5), (7200.0, "hours", 2.0)]
)
def test_times_are_in_a_unit_that_suits_them(
    seconds: float, unit: str, length: float, clean_tab: Tab, tmp_path: Path
) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    sweep = SweepOnDisk(tmp_path / "runs" / "short", [make_spec(axes={"seed": "0"})])
    sweep.submit("500", executor="local")
    sweep.start(executor="local", resumed=0, age_s=seconds)
    sweep.end(state=RunState.COMPLETED, cause="done")
    sweep.done(eval_loss=0.5)
    page.write_text(page_of(sweep), encoding="utf-8")
    tab.open(page)
    see_all(tab)
    plots = "[...document.querySelectorAll('#costs .js-plotly-plot')]"
    assert tab.js(f"{plots}[0].layout.yaxis.title.text") == f"core-{unit}"
    assert 0.9 * length <= tab.js(f"{plots}[0].data[0].y[0]") < 60, "the machine may have paused meanwhile"
    if tab.js(f"{plots}.length") > 1:
        assert tab.js(f"{plots}[1].layout.xaxis.title.text") == unit


@needs_chromium
@pytest.mark.long
def test_sweeps_are_compared_with_their_scaling_and_samples(clean_tab: Tab, tmp_path: Path) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    first = scaled_sweep(tmp_path / "first", [(1, 64), (2, 64), (4, 64)], [2.0, 4.0, 6.0])
    second = make_sweep(tmp_path / "runs" / "second", num_runs=4)
    samples = [
        Sample(attempt=0, rank=0, time=1e9 + at, elapsed_s=float(at), node="n1", step=at,
               device=Device(utilisation=0.5, power_w=300.0), host=Host(cpus=2.0, rss_bytes=2**30))
        for at in range(0, 600, 5)
    ]  # fmt: skip
    for index in range(3):
        (first.run(index).folder / "telemetry").mkdir()
        append_samples(first.run(index), samples)
    page.write_text(page_of(first, second), encoding="utf-8")
    tab.open(page)
    assert tab.js("document.querySelector('h1').textContent") == "scaling and second"
    assert len(tab.js(CELLS)) == 7
    see_all(tab)
    assert {len(found) for found in tab.js(COLOURS).values()} == {1}
    speedups = "[...document.querySelectorAll('#scaling .js-plotly-plot')].map(plot => plot.data[1].y)"
    assert tab.js(speedups) == [[1, 2, 3], [1, 1, pytest.approx(0.75)]]
    tab.js("document.querySelector('#chosen-run').onchange({target: {value: '1'}})")
    see_all(tab)
    titles = tab.js("[...document.querySelectorAll('#run figure h3')].map(title => title.textContent)")
    assert titles == ["GPU utilisation", "GPU power", "Busy cores", "Resident memory"]
    assert set(tab.js("document.querySelectorAll('#run .js-plotly-plot')[1].data[0].y")) == {300}
    assert (tab.console, tab.requests) == ([], [page.as_uri()])


@needs_chromium
@pytest.mark.long
def test_500_runs_of_2000_points(clean_tab: Tab, tmp_path: Path) -> None:
    tab, page = clean_tab, tmp_path / "page.html"
    text = page_of(make_sweep(tmp_path / "runs" / "many", num_runs=500, lines=2000))
    page.write_text(text, encoding="utf-8")
    assert len(text) <= 8e6
    tab.call("Performance.enable", timeDomain="threadTicks")
    tab.open(page)
    spent = {each["name"]: each["value"] for each in tab.call("Performance.getMetrics")["metrics"]}
    print(
        "bytes", len(text), "shown", tab.js("JSON.stringify(document.documentElement.dataset)"), spent["TaskDuration"]
    )
    assert spent["TaskDuration"] <= 2.0, "seconds of a core"
    type_into(tab, "[data-filter='optim.lr']", "=0.01")
    assert tab.js("document.querySelector('#runs [role=status]').textContent") == "125 of 500 runs"
    see_all(tab)
    assert (tab.console, tab.requests) == ([], [page.as_uri()])
