"""Tables: statistics of training rows alone, unknown categories, missing values by policy; errors name the column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from hpc_trainer.config.rules.data_rules import data_problems
from hpc_trainer.config.schema.task import MultiLabelConfig, RegressionConfig, TaskConfig
from hpc_trainer.data.files import part_of
from hpc_trainer.data.tables import Encoding, Missing, TableConfig
from hpc_trainer.data.tables import dataset as table
from hpc_trainer.datasets import MapDataset
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.training.data.protocol import SPLITS

NUMBERS = RegressionConfig()
CLASSES = TaskConfig()
ROWS = {
    "rooms": [float(each) for each in range(20)],
    "town": [("Ulm", "Bonn", "Jena")[each % 3] for each in range(20)],
    "old": [each % 2 == 0 for each in range(20)],
    "price": [each * 10.0 for each in range(20)],
}


def save(path: Path, **columns: Any) -> str:
    found = pa.table({**ROWS, **columns})
    if path.suffix == ".csv":
        csv.write_csv(found, path)
    else:
        parquet.write_table(found, path)
    return str(path)


def build(path: str, split: Any = "train", task: TaskConfig = NUMBERS, **values: Any) -> table.Table:
    return table.build(TableConfig(path=path, **{"target": "price", **values}), split, task)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_numbers_are_standardised_and_categories_one_hot(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name)
    rows = part_of(20, 0.25, "train")
    mean, std = rows.mean(), rows.std()
    for split in SPLITS:
        data = build(path, split, eval_fraction=0.25)
        assert isinstance(data, MapDataset)
        mine = part_of(20, 0.25, split)
        inputs, targets = data.__getitems__(range(len(data)))
        assert data.input_names == [
            "rooms", "town=Bonn", "town=Jena", "town=Ulm", "town=?", "old=false", "old=true", "old=?",
        ]  # fmt: skip
        assert (data.input_shape, data.num_classes, inputs.dtype) == ((8,), 1, torch.float32)
        assert inputs[:, 0].tolist() == pytest.approx((mine - mean) / std, rel=1e-6)
        assert targets.tolist() == [row * 10.0 for row in mine.tolist()]
        towns = [data.input_names[1 + at] for at in inputs[:, 1:5].argmax(1).tolist()]
        assert towns == [f"town={ROWS['town'][row]}" for row in mine.tolist()]
        assert inputs[:, 1:].sum(1).tolist() == [2.0] * len(mine)


def test_what_no_training_row_has_is_unknown(tmp_path: Path) -> None:
    path = save(tmp_path / "a.csv")
    held_out = save(tmp_path / "b.csv", town=["Kiel"] * 20)
    inputs, _ = build(path, "eval", eval_path=held_out).__getitems__([0, 19])
    assert inputs[:, 1:5].tolist() == [[0.0, 0.0, 0.0, 1.0]] * 2
    assert inputs[:, 0].tolist() == build(path, eval_path=held_out).__getitems__([0, 19])[0][:, 0].tolist()


def test_categories_as_one_input(tmp_path: Path) -> None:
    data = build(save(tmp_path / "a.csv"), encoding=Encoding.ordinal, numeric=[], categorical=["town"])
    first = int(part_of(20, 0.1, "train")[0])
    number = sorted(set(ROWS["town"])).index(ROWS["town"][first])
    assert data.input_names == ["town"]
    assert data.__getitems__([0])[0].tolist() == [[pytest.approx(number / 3)]]


def test_missing_values_become_the_mean_where_one_says_so(tmp_path: Path) -> None:
    rooms, town = list(ROWS["rooms"]), list(ROWS["town"])
    rooms[4] = float("nan")
    town[5] = None
    for name in ("a.parquet", "a.csv"):
        path = save(tmp_path / name, rooms=rooms, town=town)
        data = build(path, missing=Missing.mean)
        rows = part_of(20, 0.1, "train").tolist()
        inputs, _ = data.__getitems__([rows.index(4), rows.index(5)])
        assert inputs[0, 0] == 0.0
        assert inputs[1, 1:5].tolist() == [0.0, 0.0, 0.0, 1.0]
        known = np.array([rooms[row] for row in rows if row != 4])
        assert inputs[1, 0] == pytest.approx((5 - known.mean()) / known.std(), rel=1e-6)


def test_classes_have_names(tmp_path: Path) -> None:
    data = build(save(tmp_path / "a.csv"), task=CLASSES, target="town")
    assert (data.classes, data.num_classes) == (["Bonn", "Jena", "Ulm"], 3)
    rows = part_of(20, 0.1, "train").tolist()
    _, targets = data.__getitems__(range(18))
    assert targets.dtype == torch.int64
    assert [data.classes[each] for each in targets.tolist()] == [ROWS["town"][row] for row in rows]
    numbers = build(
        save(tmp_path / "b.parquet", kind=[each % 4 + 8 for each in range(20)]), task=CLASSES, target="kind"
    )
    assert numbers.classes == ["8", "9", "10", "11"]


def test_numbers_that_turn_into_fractions_late_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("rooms,price\n" + "1,10\n" * 300_000 + "1.5,20\n")
    data = build(str(path))
    assert data.input_names == ["rooms"]


def test_the_fingerprint_is_that_of_content_and_of_how_it_is_read(tmp_path: Path) -> None:
    one, other = save(tmp_path / "a.csv"), save(tmp_path / "b.csv")
    assert build(one).fingerprint() == build(other).fingerprint()
    others = {
        build(save(tmp_path / "c.csv", rooms=[0.5] * 20)).fingerprint(),
        build(one, "eval").fingerprint(),
        build(one, numeric=[]).fingerprint(),
        build(one, task=CLASSES).fingerprint(),
        build(one, encoding=Encoding.ordinal).fingerprint(),
    }
    assert len({build(one).fingerprint(), *others}) == 6


Case = tuple[dict[str, Any], dict[str, Any], TaskConfig, str]
PLANNED: dict[str, Case] = {
    "target": ({}, {"target": "prize"}, NUMBERS, "data.target=prize: "),
    "near": (
        {},
        {"target": "prize"},
        NUMBERS,
        "has no such column. Did you mean price? Valid: rooms, town, old, price.",
    ),
    "numeric": ({}, {"numeric": ["room"]}, NUMBERS, "data.numeric=room: "),
    "text": ({}, {"numeric": ["town"]}, NUMBERS, "data.numeric names town, which is string in"),
    "twice": ({}, {"numeric": ["price"]}, NUMBERS, "name price twice"),
    "date": (
        {"day": pa.array([0] * 20, pa.date32())},
        {},
        NUMBERS,
        "column day is date32[day], which is neither number",
    ),
    "nothing": ({}, {"numeric": [], "categorical": []}, NUMBERS, "has no column besides data.target=price"),
    "words": ({}, {"target": "town"}, NUMBERS, "data.target=town is string in"),
    "labels": ({}, {}, MultiLabelConfig(), "data.target=price is one column in"),
    "both": ({}, {"eval_path": "a.csv", "eval_fraction": 0.3}, NUMBERS, "data.eval_fraction=0.3 has no effect with"),
}
NAN = [0.0] * 7 + [float("nan")] * 2 + [1.0] * 11
READ: dict[str, Case] = {
    "nan": (
        {"rooms": NAN},
        {},
        NUMBERS,
        "column rooms has no value in row 7 (the first is 0; NaN counts as no value), one of 2.",
    ),
    "no target": ({"price": NAN}, {"missing": Missing.mean}, NUMBERS, "column price has no value in row 7"),
    "no text": ({"town": ["a"] * 19 + [None]}, {}, NUMBERS, "column town has no value in row 19"),
    "infinite": ({"rooms": [float("inf")] * 20}, {}, NUMBERS, "column rooms is infinite in row 0"),
    "new class": ({}, {}, CLASSES, "training row has. Classes are"),
    "parts": ({"price": [0.5, 1.5] * 10}, {}, CLASSES, "column price has 0.5, and classes are whole numbers or texts"),
    "one class": ({}, {"target": "same"}, CLASSES, "all training rows have same=x; a classification needs two"),
}


def _case(tmp_path: Path, case: Case, suffix: str) -> tuple[list[str], str]:
    """What plan says, and what the run."""
    columns, values, task, _ = case
    path = save(tmp_path / f"a.{suffix}", **columns, **({"same": ["x"] * 20} if "same" in values.values() else {}))
    data = TableConfig(path=path, **{"target": "price", **values})
    try:
        for split in SPLITS:
            table.build(data, split, task)
    except HpcTrainerError as error:
        return list(data_problems(data, task)), str(error)
    return list(data_problems(data, task)), ""


@pytest.mark.parametrize("name", PLANNED)
def test_columns_are_looked_at_by_plan(tmp_path: Path, name: str) -> None:
    for suffix in ("parquet", "csv"):
        (problem,), raised = _case(tmp_path, PLANNED[name], suffix)
        assert PLANNED[name][-1] in problem
        assert raised == problem


@pytest.mark.parametrize("name", READ)
def test_values_are_looked_at_before_the_first_step(tmp_path: Path, name: str) -> None:
    for suffix in ("parquet", "csv"):
        problems, raised = _case(tmp_path, READ[name], suffix)
        assert problems == []
        assert READ[name][-1] in raised
        assert f"{tmp_path}/a.{suffix}" in raised


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content, said in (
        ("a.csv", b"", "cannot be read: Empty CSV file"),
        ("b.csv", b"a,a,price\n1,2,3\n", "has several columns named 'a'"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.txt", b"", "must be a file .csv or .parquet"),
        ("none.csv", None, "cannot be read"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        (problem,) = data_problems(TableConfig(path=str(path)), NUMBERS)
        assert said in problem
        assert str(path) in problem
    (tmp_path / "c.csv").write_text("a,price\n" + "1,2\n" * 300_000 + "word,3\n")
    with pytest.raises(
        HpcTrainerError, match=r"c\.csv does not match the types at the start .* Row #300002: .* 'word'"
    ):
        build(str(tmp_path / "c.csv"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = data_problems(TableConfig(path=str(tmp_path / "c.csv")), NUMBERS)
    assert problem.endswith("needs the package pyarrow: pip install 'hpc_trainer[tables]'")


def test_an_id_is_no_category(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGEST_ONE_HOT", 2)
    with pytest.raises(HpcTrainerError, match=r"column town has 3 categories, and at most 2 .* data.encoding=ordinal"):
        build(save(tmp_path / "a.csv"))
