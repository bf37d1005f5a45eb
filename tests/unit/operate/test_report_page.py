"""The page: one file that asks for nothing, whose text cannot become markup, and whose charts show the figures."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from hpc_trainer.config.schema.output import BestMode, CheckpointConfig
from hpc_trainer.operate.report.charts import Line, line_chart, nice_ticks, number, percent
from hpc_trainer.operate.report.data import Report, RunReport, find_scaling
from hpc_trainer.operate.report.page import render_page

VOID = {"meta", "wbr"}
EVIL = "<script>alert('x')</script>\"'&\x00\ud800\x1b]0;owned\x07\x9b31m"


def _run(**changes: Any) -> RunReport:
    run = RunReport(
        run_id="mlp-digits-lr0.001-s0-abc", hardware="cpu_x1", ranks=1, gpu_type=None, global_batch_size=64,
        axes={"hardware": "cpu_x1", "optim.lr": "1e-3"}, state="COMPLETED", cause="done", step=100, num_steps=100,
        attempts=1, gpu_hours=0.5, metrics={"eval_loss": 0.25},
        speed={"steps_per_s": 2.0, "samples_per_s": 128.0, "step_time_s": 0.5}, num_windows=8,
        curves={"loss": [(10, 2.0), (20, 1.0)], "eval_loss": [(20, 0.25)]},
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def _report(*runs: RunReport, notes: tuple[str, ...] = ()) -> Report:
    return Report(
        sweep="mine", counts={"COMPLETED": len(runs)}, runs=list(runs), scaling=find_scaling(runs), notes=list(notes)
    )


class Page(HTMLParser):
    """Tags with their attributes; every tag that opens closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def _scaled() -> list[RunReport]:
    return [
        _run(run_id=f"r{ranks}", ranks=ranks, hardware=f"gpu_x{ranks}", axes={"hardware": f"gpu_x{ranks}"},
             speed={"steps_per_s": speed, "tokens_per_s": 1000 * speed, "step_time_s": 1 / speed, "mfu": 0.4})
        for ranks, speed in ((1, 2.0), (2, 3.9), (8, 12.0))
    ]  # fmt: skip


def test_the_page_says_what_there_is() -> None:
    page = Page(render_page(_report(*_scaled(), notes=("squeue did not answer",)), now=0.0))
    for words in ("mine", "3 COMPLETED", "1970-01-01 00:00:00 UTC", "squeue did not answer", "Strong scaling",
                  "gpu_x8", "12k tokens/s", "6.00", "75%", "40%", "0.25", "eval_loss", "100/100"):  # fmt: skip
        assert words in page.text, words
    tags = [tag for tag, _ in page.tags]
    charts = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert [each["aria-label"] for each in charts] == ["speed-up", "parallel efficiency", "loss", "eval_loss"]
    assert tags.count("polyline") == 4 + 3  # two studies' lines with their ideals, three loss curves


def test_advice_stands_above_the_charts_with_the_command_that_follows_it() -> None:
    report = dataclasses.replace(_report(_run()), advice=["1 run(s), as mlp: wait. a=1: 2x"], next="plan 'b=[1,2]' a=1")
    page = Page(render_page(report))
    advice, command, charts = (
        page.text.index(words) for words in ("1 run(s), as mlp", "hpc-trainer plan 'b=[1,2]' a=1", "Curves")
    )
    assert advice < command < charts
    assert "Next:" not in Page(render_page(_report(_run()))).text


def test_the_page_asks_for_nothing() -> None:
    text = render_page(_report(*_scaled()))
    page = Page(text)
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "a", "form"} == set()
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not [name for _, attributes in page.tags for name in attributes if name in ("src", "href", "xlink:href")]
    assert "http" not in re.sub(r'http-equiv="Content-Security-Policy"', "", text)
    assert "default-src 'none'" in text
    assert "@media (prefers-color-scheme:dark)" in text
    assert "url(" not in text
    assert "@import" not in text


def test_text_cannot_become_markup() -> None:
    evil = _run(
        run_id=EVIL, hardware=EVIL, axes={EVIL: EVIL, "hardware": EVIL}, state=EVIL, cause=EVIL,
        metrics={EVIL: EVIL, "deep": {"a": EVIL}}, curves={EVIL: [(1, 1.0), (2, 2.0)], "loss": [(1, 1.0)]},
    )  # fmt: skip
    other = dataclasses.replace(evil, ranks=2, run_id=EVIL + "2")
    report = dataclasses.replace(
        _report(evil, other, notes=(EVIL,)), sweep=EVIL, counts={EVIL: 1}, advice=[EVIL], next=EVIL
    )
    text = render_page(report)
    page = Page(text)
    assert report.scaling
    assert "<script" not in text
    assert {tag for tag, _ in page.tags} & {"script"} == set()
    known = {"class", "id", "viewbox", "role", "aria-label", "x1", "x2", "y1", "y2", "x", "y", "dy", "points", "cx",
             "cy", "r", "transform", "charset", "name", "content", "http-equiv", "lang", "colspan"}  # fmt: skip
    assert {name for _, attributes in page.tags for name in attributes} <= known
    text.encode("utf-8")
    assert "alert('x')" in page.text
    assert not {"\x00", "\x07", "\x1b", "\x9b"} & set(text), "whoever prints the page has a terminal"


def test_an_empty_sweep_is_a_page_too() -> None:
    page = Page(render_page(_report()))
    assert "no runs" not in page.text or "0 COMPLETED" in page.text
    assert "Curves" not in page.text


def test_many_runs_are_drawn_best_first_and_the_rest_grey() -> None:
    runs = [
        _run(run_id=f"r{index}", axes={"seed": str(index)}, curves={"loss": [(1, 9.0), (2, 1.0 + index)]}, speed={})
        for index in reversed(range(80))
    ]
    text = render_page(_report(*runs))
    page = Page(text)
    assert "loss: 60 of 80 runs" in page.text
    assert "52 more" in page.text
    kinds = [attributes["class"] for tag, attributes in page.tags if tag == "polyline"]
    assert kinds == ["rest"] * 52 + [f"c{index}" for index in range(8)]
    legend = re.findall(r"</svg>(seed=\d+)</li>", text)
    assert legend == [f"seed={index}" for index in range(8)]


def test_the_higher_accuracy_is_the_better() -> None:
    runs = [_run(axes={"seed": str(each)}, curves={"eval_accuracy": [(1, each / 10)]}) for each in (3, 9, 6)]
    assert re.findall(r"</svg>(seed=\d+)</li>", render_page(_report(*runs))) == ["seed=9", "seed=6", "seed=3"]


@pytest.mark.parametrize(("name", "kept", "first"), [
    ("eval_perplexity", CheckpointConfig(), "seed=3"),
    ("spikes", CheckpointConfig(), "seed=9"),
    ("spikes", CheckpointConfig(keep_best="spikes", best_mode=BestMode.min), "seed=3"),
    ("eval_loss", CheckpointConfig(keep_best="eval_loss", best_mode=BestMode.max), "seed=9"),
])  # fmt: skip
def test_a_metric_is_best_first_as_the_runs_choose_their_best_checkpoint(
    name: str, kept: CheckpointConfig, first: str
) -> None:
    runs = [_run(axes={"seed": str(each)}, curves={name: [(1, each / 10)]}) for each in (6, 3, 9)]
    page = render_page(dataclasses.replace(_report(*runs), kept=kept))
    assert re.findall(r"</svg>(seed=\d+)</li>", page)[0] == first


# --- charts ---


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.93, 0.99, [0.92, 0.94, 0.96, 0.98, 1.0]), (3, 3, [3]),
     (0, 0, [0]), (-5, 5, [-6, -4, -2, 0, 2, 4, 6])],
)  # fmt: skip
def test_ticks_are_round_and_hold_all_values(low: float, high: float, ticks: list[float]) -> None:
    found = nice_ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert found == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 5e-324), (-1.7e308, 1.7e308), (1e-14, 3e-14), (1.0, 1.0 + 2e-16), (-1e300, 1e-300), (2e-308, 3e-308)],
)
def test_any_numbers_can_be_drawn(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks == sorted(set(ticks))
    line = Line(name="x", points=[(0, low), (1, high)], colour=0)
    assert "nan" not in line_chart("x", [line], x_label="step", y_label="x")


def test_words_of_numbers() -> None:
    assert [number(each) for each in (0.12345, 12, 1234, 5e6, 2.5e9)] == ["0.123", "12", "1.23k", "5M", "2.5G"]
    assert [percent(each) for each in (0.0002, 0.6033, 1.0)] == ["0%", "60.3%", "100%"]


def test_a_line_is_where_its_values_are() -> None:
    line = Line(name="a", points=[(0, 0.0), (10, 10.0)], colour=0)
    svg = line_chart("t", [line], x_label="x", y_label="y")
    (points,) = re.findall(r'points="([^"]*)"', svg)
    (x0, y0), (x1, y1) = (tuple(map(float, each.split(","))) for each in points.split())
    assert (x0, x1) == (62, 546)
    assert (y0, y1) == (274, 14)  # upward
    assert line_chart("t", [dataclasses.replace(line, points=[])], x_label="x", y_label="y") == ""


def test_on_logarithmic_axes_ideal_scaling_is_a_straight_line() -> None:
    line = Line(name="ideal", points=[(1, 1.0), (2, 2.0), (8, 8.0)], colour=None, is_ideal=True)
    svg = line_chart("t", [line], x_label="x", y_label="y", is_log=True, x_ticks=(1, 2, 8))
    (points,) = re.findall(r'points="([^"]*)"', svg)
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, each.split(","))) for each in points.split())
    assert (x1 - x0) / (x2 - x0) == pytest.approx(1 / 3, abs=1e-3)
    assert (y1 - y0) / (y2 - y0) == pytest.approx(1 / 3, abs=1e-3)


def test_flat_lines_and_single_points_are_drawn() -> None:
    assert "polyline" in line_chart("t", [Line(name="a", points=[(1, 3), (2, 3)], colour=0)], x_label="x", y_label="y")
    assert "circle" in line_chart("t", [Line(name="a", points=[(5, 3)], colour=0)], x_label="x", y_label="y")


def _ticks(points: list[tuple[float, float]], **options: Any) -> tuple[list[str], list[str]]:
    """The labels of a chart's two axes: upward, across."""
    svg = line_chart("t", [Line(name="a", points=points, colour=0)], x_label="step", y_label="", **options)
    up, across = (re.findall(rf'class="tick {kind}"[^>]*>([^<]*)<', svg) for kind in ("end", "mid"))
    return up, across


def test_a_constant_has_one_tick_that_says_it() -> None:
    assert _ticks([(10, 0.98889), (20, 0.98889)]) == (["0.9889"], ["10", "12", "14", "16", "18", "20"])
    assert _ticks([(10, 0.0), (20, 0.0)], from_zero=True)[0] == ["0"]
    assert _ticks([(300, -2.5)]) == (["-2.5"], ["300"])
    (x, y), *_ = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', line_chart(
        "t", [Line(name="a", points=[(300, 0.0)], colour=0)], x_label="x", y_label="y"
    ))  # fmt: skip
    assert (float(x), float(y)) == (304, 274), "in the middle, and 0 at the bottom"


def test_labels_of_values_close_together_differ() -> None:
    up, across = _ticks([(1, 0.98889), (2, 0.98891)])
    assert up == ["0.98889", "0.988895", "0.9889", "0.988905", "0.98891"]
    assert across == ["1", "2"], "between two steps there is none"
    up, across = _ticks([(1_000_000, 1.0), (1_000_003, 2.0)])
    assert across == ["1M", "1.000001M", "1.000002M", "1.000003M"]


def _colour(figure: str, name: str) -> str | None:
    found = re.search(rf'<polyline class="(\w+)"[^>]*><title>{re.escape(name)}</title>', figure)
    return found and found.group(1)


def test_a_run_has_one_colour_in_all_charts() -> None:
    """Nine runs in one order by loss and in the other by eval_accuracy; eight have colours, the same everywhere."""
    runs = [
        _run(
            run_id=f"r{index}", axes={"seed": str(index)},
            curves={"loss": [(1, 2.0), (2, 1 + index)], "eval_accuracy": [(1, 0.1), (2, 0.1 * index)]},
        )
        for index in range(9)
    ]  # fmt: skip
    loss, accuracy = re.findall(r"<figure>.*?</figure>", render_page(_report(*runs)), flags=re.DOTALL)
    for run in runs:
        name = f"seed={run.axes['seed']}"
        assert _colour(loss, name) == _colour(accuracy, name), name
    assert _colour(accuracy, "seed=8") == "c0", "the best by what `results` sorts by"
    assert _colour(loss, "seed=0") == "rest"


def test_the_line_of_a_scaling_study_has_no_runs_colour() -> None:
    (figure, *_) = re.findall(r"<figure>.*?</figure>", render_page(_report(*_scaled())), flags=re.DOTALL)
    assert _colour(figure, "speed-up") == "ink"


def test_a_cause_is_below_its_run_and_cut_by_no_column() -> None:
    cause = "Slurm: OUT_OF_MEMORY (0:125) " * 20
    page = render_page(_report(_run(state="FAILED", cause=cause, step=60, metrics_step=50)))
    rows = re.findall(r"<tr>(.*?)</tr>", page[page.index("<h2>Runs</h2>") :], flags=re.DOTALL)
    head, _, below = rows
    assert f'colspan="{head.count("<th")}"' in below
    assert cause.strip() in below
    assert "metrics of step 50" in below
