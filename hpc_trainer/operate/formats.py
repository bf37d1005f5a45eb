"""A table of results as CSV, Markdown, LaTeX, HTML, Parquet and a pandas frame."""

from __future__ import annotations

import csv
import html
import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_trainer.errors import ConfigError, visible
from hpc_trainer.operate.results import STD, ResultTable

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip
_MARKDOWN = re.compile(r"([\\`*_<>|\[\]])")


def shown_columns(table: ResultTable) -> list[str]:
    """Return the columns of a table for reading, in which a deviation follows its mean in one column."""
    columns = table.columns
    return [column for column in columns if not (column.endswith(STD) and column.removesuffix(STD) in columns)]


def shown_cell(row: Mapping[str, Any], column: str) -> str:
    """Return a value with four digits, `0.912 ± 0.004` for a mean, and `-` if the row has none."""
    value = row.get(column)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    deviation = row.get(f"{column}{STD}")
    return text if deviation is None else f"{text} ± {deviation:.2g}"


def csv_text(table: ResultTable) -> str:
    """Return the table as CSV with all digits; a missing value is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = table.columns
    writer.writerow(columns)
    for row in table.rows:
        writer.writerow([_plain(row.get(column)) for column in columns])
    return out.getvalue()


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def markdown_text(table: ResultTable) -> str:
    """Return the table in Markdown, numbers to the right."""
    columns = shown_columns(table)
    sides = ["---:" if _is_of_numbers(table.rows, column) else "---" for column in columns]
    rows = [[_MARKDOWN.sub(r"\\\1", _line(shown_cell(row, column))) for column in columns] for row in table.rows]
    head = [_MARKDOWN.sub(r"\\\1", _line(column)) for column in columns]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, sides, *rows))


def latex_text(table: ResultTable) -> str:
    """Return a LaTeX tabular with the rules of booktabs, numbers to the right."""
    columns = shown_columns(table)
    sides = "".join("r" if _is_of_numbers(table.rows, column) else "l" for column in columns)
    rows = [" & ".join(_latex(shown_cell(row, column)) for column in columns) for row in table.rows]
    head = " & ".join(map(_latex, columns))
    lines = [rf"\begin{{tabular}}{{{sides}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    return "\n".join([*lines, *(rf"{row} \\" for row in rows), r"\bottomrule", r"\end{tabular}", ""])


def _latex(text: str) -> str:
    mean, sign, deviation = text.partition(" ± ")
    if sign:
        return rf"${mean} \pm {deviation}$"
    return "".join(_LATEX.get(letter, letter) for letter in _line(text))


def html_text(table: ResultTable) -> str:
    """Return the table as an HTML element, for notebooks."""
    columns = shown_columns(table)
    head = "".join(f"<th>{html.escape(visible(column))}</th>" for column in columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(visible(shown_cell(row, column)))}</td>' for column in columns)}</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _line(text: str) -> str:
    return visible(text).replace("\n", " ")


def _is_of_numbers(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    values = [row[column] for row in rows if row.get(column) is not None]
    return bool(values) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def has_pandas() -> bool:
    """Return True if pandas is installed."""
    return importlib.util.find_spec("pandas") is not None


def frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """Return the rows as a pandas.DataFrame with these columns; a value that a row lacks is NaN or None.

    Raises:
        ConfigError: pandas is not installed.
    """
    if not has_pandas():
        raise ConfigError("This needs pandas, which is not installed: pip install 'hpc_trainer[pandas]'.")
    import pandas as pd

    return pd.DataFrame({column: [row.get(column) for row in rows] for column in columns})


def write_parquet(table: ResultTable, path: Path) -> None:
    """Write the table as one Parquet file; columns with numbers and texts are written as texts.

    Raises:
        ConfigError: pandas or pyarrow is not installed, or there is no such folder.
    """
    missing = [name for name in ("pandas", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--parquet needs {' and '.join(missing)}, which is not installed: "
            "pip install 'hpc_trainer[pandas,tables]'. --csv needs neither."
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--parquet={path}: there is no folder {path.absolute().parent}. Make it, or name another.")
    table_frame = frame(table.rows, table.columns)
    for column in table.columns:
        kinds = {type(value) for value in (row.get(column) for row in table.rows) if value is not None}
        if str in kinds and len(kinds) > 1:
            table_frame[column] = [None if row.get(column) is None else _plain(row[column]) for row in table.rows]
    table_frame.to_parquet(path, index=False)
