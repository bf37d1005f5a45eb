"""`hpc-trainer top`: sweeps and runs on the whole screen; imported only if textual (extra `top`) is installed.

A thread reads one sweep as often as `status --watch` does. A key that changes something asks for confirmation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import DataTable, Footer, OptionList, Static, TabbedContent, TabPane
from textual.widgets.option_list import Option

from hpc_trainer.cli import top_views
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.operate.find import configured_runs_dir, find_sweep
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.status import SweepStatus


def run_top(name: str | None, runs_dir: Path | None) -> None:
    """Show the screen until the user leaves it.

    Raises:
        ConfigError: standard output is not a terminal.
        RunStateError: there is no such sweep.
    """
    folder = configured_runs_dir(runs_dir).absolute()
    sweep = find_sweep(folder, name)
    if not sys.stdout.isatty():
        raise ConfigError("top needs a terminal. In a pipe use: hpc-trainer status --watch")
    TopApp(folder, sweep).run()


TABS = {"1": "curves", "2": "log", "3": "why"}
"""Tabs of a run's details, by the key that opens them."""


class Question(ModalScreen[bool]):
    """Question that is answered with y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no"),
    ]
    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Static { width: 60; max-width: 90%; padding: 1 2; border: thick $warning; background: $surface; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(f"{self._text}\n\ny: yes    n: no", markup=False)

    def action_answer(self, is_yes: bool) -> None:
        self.dismiss(is_yes)


class TopApp(App[None]):
    """Sweeps on the left, runs on the right, and below them the curves, the log and the explanation of one run."""

    TITLE = "hpc-trainer top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #sweeps { width: 20%; min-width: 12; max-width: 26; border-right: solid $primary; }
    #head { height: 1; padding: 0 1; }
    #runs { height: 1fr; }
    #details { height: 1fr; border-top: solid $primary; }
    TabPane { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("c", "verb('cancel')", "cancel"),
        Binding("r", "verb('retry')", "retry"),
        Binding("h", "verb('hold')", "hold"),
        Binding("u", "verb('release')", "release"),
        Binding("a", "toggle_all", "run / sweep"),
        # The titles of the tabs show these keys: a terminal of 80 columns has no place for them at the bottom.
        *(Binding(key, f"tab('{name}')", name, show=False) for key, name in TABS.items()),
        Binding("f5", "look", "read now"),
    ]

    def __init__(self, folder: Path, sweep: SweepPaths) -> None:
        super().__init__()
        self.folder, self.sweep = folder, sweep
        self.status: SweepStatus | None = None
        self.is_whole = False
        self._rows: dict[str, tuple[str, ...]] = {}
        self._shown: dict[str, str] = {}  # the run of each tab's text
        self._next_look: Timer | None = None

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield OptionList(id="sweeps")
            with Vertical():
                yield Static("", id="head", markup=False)
                table: DataTable[Text] = DataTable(id="runs", cursor_type="row")
                yield table
                with TabbedContent(id="details", initial="curves"):
                    for key, name in TABS.items():
                        with TabPane(f"{key} {name}", id=name), VerticalScroll():
                            yield Static("", id=f"text-{name}", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.runs.add_columns(*top_views.COLUMNS)
        self.list_sweeps()
        self.set_interval(60.0, self.list_sweeps)
        self.runs.focus()
        self.action_look()

    @property
    def runs(self) -> DataTable[Text]:
        """The table of runs."""
        return self.query_one("#runs", DataTable)

    @property
    def run_id(self) -> str | None:
        """The run under the cursor."""
        if not self.runs.row_count:
            return None
        return self.runs.coordinate_to_cell_key(self.runs.cursor_coordinate).row_key.value

    # --- looks ---

    def list_sweeps(self) -> None:
        """Fill the list of sweeps; the one that is shown stays chosen."""
        box = self.query_one("#sweeps", OptionList)
        try:
            sweeps = top_views.sweep_names(self.folder)
        except (HpcTrainerError, OSError) as error:
            self.notify(str(error), markup=False, severity="warning")
            return
        names = [sweep.name for sweep in sweeps]
        if names == [option.id for option in box.options]:
            return
        box.clear_options()
        box.add_options([Option(Text(name), id=name) for name in names])
        if self.sweep.name in names:
            box.highlighted = names.index(self.sweep.name)

    @on(OptionList.OptionSelected, "#sweeps")
    def choose_sweep(self, event: OptionList.OptionSelected) -> None:
        """Show another sweep."""
        if event.option.id is not None and event.option.id != self.sweep.name:
            self.sweep = SweepPaths(self.folder / event.option.id)
            self.status, self._rows = None, {}
            self.runs.clear()
            self.action_look()
        self.runs.focus()

    def action_look(self) -> None:
        """Read the sweep now, without waiting for a read that is under way."""
        if self._next_look is not None:
            self._next_look.stop()
        self.read(self.sweep)

    @work(thread=True, exclusive=True, group="look")
    def read(self, sweep: SweepPaths) -> None:
        """Read a sweep in a thread, and show it."""
        outcome = top_views.look(sweep)
        rows = [] if isinstance(outcome, str) else top_views.rows_of(outcome)
        self.call_from_thread(self.show, sweep, outcome, rows)

    def show(self, sweep: SweepPaths, outcome: SweepStatus | str, rows: list[top_views.Row]) -> None:
        """Show the status that was read, unless another sweep was chosen meanwhile, and schedule the next read."""
        if sweep.folder != self.sweep.folder:
            return
        head = self.query_one("#head", Static)
        if isinstance(outcome, str):
            head.update(outcome)
        else:
            self.status = outcome
            head.update(top_views.head_of(outcome))
            self._show_rows(rows)
            self.show_details()
        if self._next_look is not None:
            self._next_look.stop()
        self._next_look = self.set_timer(top_views.next_pause_s(self.status), self.action_look)

    def _show_rows(self, rows: list[top_views.Row]) -> None:
        """Change the cells that differ; if the list of runs changed, fill the table anew and keep the cursor."""
        texts = {row.run_id: tuple(cell.plain for cell in row.cells) for row in rows}
        if list(texts) != list(self._rows):
            before = self.run_id
            self.runs.clear()
            for row in rows:
                self.runs.add_row(*row.cells, key=row.run_id)
            if before in texts:
                self.runs.move_cursor(row=list(texts).index(before))
        else:
            columns = list(self.runs.columns)
            for row in rows:
                for column, cell, was in zip(columns, row.cells, self._rows[row.run_id], strict=True):
                    if cell.plain != was:
                        self.runs.update_cell(row.run_id, column, cell, update_width=True)
        self._rows = texts

    @on(DataTable.RowHighlighted, "#runs")
    @on(TabbedContent.TabActivated)
    def show_details(self) -> None:
        """Start reading the content of the open tab for the run under the cursor."""
        if self.status is not None and self.run_id in self.status.specs:
            tab = self.query_one("#details", TabbedContent).active
            size = self.query_one("#details").size
            self.read_details(self.status, self.run_id, tab, size.width - 4, size.height - 4)

    @work(thread=True, exclusive=True, group="details")
    def read_details(self, status: SweepStatus, run_id: str, tab: str, width: int, height: int) -> None:
        """Read the curves, the log or the explanation of a run in a thread, and show it."""
        run = status.run(run_id)
        try:
            if tab == "log":
                text = top_views.log_text(status, run)
            elif tab == "why":
                text = top_views.why_text(status, run)
            else:
                text = top_views.curves_text(status, run, width, height)
        except (HpcTrainerError, OSError) as error:
            text = Text(str(error))
        self.call_from_thread(self.show_text, run_id, tab, text)

    def show_text(self, run_id: str, tab: str, text: Text) -> None:
        """Show a text in its tab, if the cursor is still on its run. A log shows its end, unless a user scrolled up."""
        if run_id != self.run_id:
            return
        box = self.query_one(f"#text-{tab}", Static)
        is_new = self._shown.get(tab) != run_id
        self._shown[tab] = run_id
        around = box.parent
        assert isinstance(around, VerticalScroll)
        follows = tab == "log" and (is_new or around.is_vertical_scroll_end)
        box.update(text)
        if follows:
            around.scroll_end(animate=False)
        elif is_new:
            around.scroll_home(animate=False)

    def action_tab(self, name: str) -> None:
        """Open a tab."""
        self.query_one("#details", TabbedContent).active = name

    # --- verbs ---

    def action_toggle_all(self) -> None:
        """Switch the verbs' keys between the whole sweep and the run under the cursor."""
        self.is_whole = not self.is_whole
        self.notify(
            "Keys now act on the whole sweep." if self.is_whole else "Keys now act on the run under the cursor."
        )

    def action_verb(self, verb: str) -> None:
        """Ask for confirmation, then run the verb."""
        run_id = None if self.is_whole else self.run_id
        if run_id is None and not self.is_whole:
            return
        sweep = self.sweep
        name = f"the whole sweep {sweep.name}" if run_id is None else run_id

        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self.do_verb(verb, sweep, run_id)

        self.push_screen(Question(f"{verb} {name}?"), answered)

    @work(thread=True, group="verbs")
    def do_verb(self, verb: str, sweep: SweepPaths, run_id: str | None) -> None:
        """Run a verb in a process, show its output, and read the sweep again."""
        said = top_views.do_verb(verb, sweep, run_id)
        self.call_from_thread(self.notify, said, title=verb, markup=False, timeout=10)
        self.call_from_thread(self.action_look)
