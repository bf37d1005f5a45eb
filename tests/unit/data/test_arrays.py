"""Arrays of files: the same rows from .npy, .npz and .parquet, for each task; what does not fit is named by row."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from hpc_trainer.config.rules.data_rules import data_problems
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.task import CustomTaskConfig, MultiLabelConfig, RegressionConfig, TaskConfig
from hpc_trainer.data import files
from hpc_trainer.data.arrays import ArraysConfig
from hpc_trainer.data.arrays import dataset as arrays
from hpc_trainer.data.files import num_held_out, part_of
from hpc_trainer.datasets import MapDataset
from hpc_trainer.errors import HpcTrainerError
from hpc_trainer.training.data.protocol import SPLITS
from tests.unit.record.builders import make_config

INPUTS = np.arange(60, dtype=np.float64).reshape(20, 3)
CLASSES = np.arange(20) % 4
CLASSIFY = TaskConfig()


def save(path: Path, inputs: Any = INPUTS, targets: Any = CLASSES, **more: Any) -> str:
    """As the name says: a folder, .npz or .parquet."""
    named = {"inputs": np.asarray(inputs), "targets": np.asarray(targets), **more}
    if path.suffix == ".npz":
        np.savez(path, **named)
    elif path.suffix == ".parquet":
        parquet.write_table(pa.table({name: each.tolist() for name, each in named.items()}), path)
    else:
        path.mkdir()
        for name, each in named.items():
            np.save(path / f"{name}.npy", each, allow_pickle=True)
    return str(path)


def build(path: str, split: Any = "train", task: TaskConfig = CLASSIFY, **values: Any) -> arrays.Arrays:
    return arrays.build(ArraysConfig(path=path, **values), split, task)


@pytest.mark.parametrize("name", ["folder", "a.npz", "a.parquet"])
def test_each_row_is_in_one_part_with_its_target(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name)
    seen = []
    for split in SPLITS:
        data = build(path, split, eval_fraction=0.25)
        assert isinstance(data, MapDataset)
        assert (data.input_shape, data.num_classes, len(data)) == ((3,), 4, 15 if split == "train" else 5)
        inputs, targets = data.__getitems__(range(len(data)))
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
        rows = (inputs[:, 0] / 3).long()
        assert targets.tolist() == CLASSES[rows].tolist()
        assert inputs.tolist() == INPUTS[rows].tolist()
        seen += rows.tolist()
    assert sorted(seen) == list(range(20))
    assert seen[15:] != sorted(range(20))[15:]  # no end of the file, but a shuffle


def test_a_part_is_the_same_everywhere() -> None:
    assert part_of(20, 0.25, "eval").tolist() == [2, 3, 11, 13, 15]
    rows = part_of(100_000, 0.1, "train")
    assert (len(rows), rows.dtype) == (90_000, np.uint32)
    assert part_of(3, 0.001, "eval").size == 1


@pytest.mark.parametrize("num_rows", [2, 1000, 20_000])
def test_parts_are_those_of_all_words_at_once(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_ROWS_AT_ONCE", 777)
    words = np.random.PCG64(0).random_raw(num_rows)
    for fraction in (0.001, 0.1, 0.5, 0.99):
        held_out = np.sort(np.argsort(words, kind="stable")[: num_held_out(num_rows, fraction)])
        assert np.array_equal(part_of(num_rows, fraction, "eval"), held_out)
        assert np.array_equal(part_of(num_rows, fraction, "train"), np.setdiff1d(np.arange(num_rows), held_out))


def test_a_file_of_its_own_for_evaluation(tmp_path: Path) -> None:
    path, held_out = save(tmp_path / "a"), save(tmp_path / "b.npz", INPUTS[:5] + 100, CLASSES[:5])
    assert len(build(path, eval_path=held_out)) == 20
    data = build(path, "eval", eval_path=held_out)
    assert (len(data), data.num_classes) == (5, 4)
    assert data.__getitems__([4])[0].tolist() == [[112.0, 113.0, 114.0]]


def test_images_keep_their_shape_and_bytes_may_be_scaled(tmp_path: Path) -> None:
    pictures = np.arange(20 * 12, dtype=np.uint8).reshape(20, 1, 3, 4)
    data = build(save(tmp_path / "a", pictures), input_scale=1 / 255)
    assert data.input_shape == (1, 3, 4)
    row = int(part_of(20, 0.1, "train")[0])
    assert data.__getitems__([0])[0].equal(torch.from_numpy(pictures[[row]].astype(np.float32)) * np.float32(1 / 255))


def test_numbers_labels_and_what_a_task_of_ones_own_takes(tmp_path: Path) -> None:
    numbers = build(save(tmp_path / "a", targets=INPUTS[:, :2]), task=RegressionConfig())
    assert (numbers.num_classes, numbers.__getitems__([0, 1])[1].dtype) == (2, torch.float32)
    alone = build(save(tmp_path / "b", targets=CLASSES), task=RegressionConfig())
    assert (alone.num_classes, alone.__getitems__([0, 1])[1].shape) == (1, (2,))
    labels = build(save(tmp_path / "c", targets=INPUTS > 7), task=MultiLabelConfig())
    assert (labels.num_classes, labels.__getitems__(range(18))[1].unique().tolist()) == (3, [0.0, 1.0])
    own = CustomTaskConfig(_target_="a.b")
    assert build(str(tmp_path / "a"), task=own).__getitems__([0])[1].dtype == torch.float32
    assert build(str(tmp_path / "b"), task=own).__getitems__([0])[1].dtype == torch.int64


def test_padding_counts_nothing_and_is_no_class(tmp_path: Path) -> None:
    padded = np.where(CLASSES == 1, -100, CLASSES)
    data = build(save(tmp_path / "a", targets=padded))
    assert (data.num_classes, data.all_targets_count) == (4, False)
    assert build(save(tmp_path / "b")).all_targets_count


def test_a_pickled_copy_holds_no_rows_and_reads_the_same(tmp_path: Path) -> None:
    data = build(save(tmp_path / "a", np.zeros((2000, 50)) + np.arange(50), np.arange(2000) % 3))
    expected = data.__getitems__([5])
    state = pickle.dumps(data)
    assert len(state) < 10_000  # row numbers of the part
    assert all(one.equal(other) for one, other in zip(pickle.loads(state).__getitems__([5]), expected, strict=True))


def test_the_fingerprint_is_that_of_content_not_of_place(tmp_path: Path) -> None:
    prints = [build(save(tmp_path / name)).fingerprint() for name in "ab"]
    assert prints[0] == prints[1]
    changed = INPUTS.copy()
    changed[7, 1] += 1
    others = [
        build(save(tmp_path / "c", changed)).fingerprint(),
        build(str(tmp_path / "a"), "eval").fingerprint(),
        build(str(tmp_path / "a"), input_scale=0.5).fingerprint(),
        build(str(tmp_path / "a"), task=RegressionConfig()).fingerprint(),
    ]
    assert len({*prints, *others}) == 5


def _with(values: np.ndarray, row: Any, value: Any) -> np.ndarray:
    changed = values.astype(np.float64 if isinstance(value, float) else values.dtype)
    changed[row] = value
    return changed


Case = tuple[dict[str, Any], dict[str, Any], TaskConfig, str]
PLANNED: dict[str, Case] = {
    "rows": ({"targets": CLASSES[:19]}, {}, CLASSIFY, "inputs has 20 rows and targets 19; each input needs a target"),
    "empty": ({"inputs": INPUTS[:0], "targets": CLASSES[:0]}, {}, CLASSIFY, "inputs has shape [0, 3]"),
    "one": ({"inputs": INPUTS[:1], "targets": CLASSES[:1]}, {}, CLASSIFY, "has 1 rows: with data.eval_fraction=0.1"),
    "flat": ({"inputs": CLASSES}, {}, CLASSIFY, "must be [rows, ...]. For one number a row save it as [20, 1]"),
    "objects": ({"inputs": np.full((20, 1), None)}, {}, CLASSIFY, "inputs has dtype object, which only unpickling"),
    "texts": ({"targets": np.full(20, "cat")}, {}, CLASSIFY, "targets has dtype <U3, and must be numbers"),
    "floats": ({"targets": INPUTS[:, 0]}, {}, CLASSIFY, "Save them as int64, or use task=regression"),
    "name": (
        {},
        {"targets": "target"},
        CLASSIFY,
        "no array of this name. Did you mean targets? Valid: inputs, targets.",
    ),
    "both": ({}, {"eval_path": "?", "eval_fraction": 0.2}, CLASSIFY, "data.eval_fraction=0.2 has no effect with"),
    "part": ({}, {"eval_path": "?"}, CLASSIFY, "there is no such file"),
}
READ: dict[str, Case] = {
    "nan": ({"inputs": _with(INPUTS, (7, 1), np.nan)}, {}, CLASSIFY, "inputs has a value in row 7 that is not finite"),
    "large": (
        {"inputs": _with(INPUTS, (7, 1), 1e300)},
        {},
        CLASSIFY,
        "row 7 that is not finite (NaN, or too large for",
    ),
    "class": (
        {},
        {"num_classes": 3},
        CLASSIFY,
        "targets has 3 in row 3, and classes are 0 to 2. Correct it, or use data.num",
    ),
    "negative": ({"targets": _with(CLASSES, 9, -1)}, {}, CLASSIFY, "targets has -1 in row 9, and classes are 0 to 3."),
    "single": ({"targets": CLASSES * 0}, {}, CLASSIFY, "all of targets is one class"),
    "label": ({}, {}, MultiLabelConfig(), "targets has 2 in row 2, and labels are 0 or 1 each"),
    "target": (
        {"targets": _with(CLASSES, 4, np.inf)},
        {},
        RegressionConfig(),
        "targets has a value in row 4 that is not",
    ),
}


def _problems(tmp_path: Path, case: Case, name: str) -> tuple[list[str], str]:
    """What plan says, and what the run."""
    contents, values, task, _ = case
    values = {key: str(tmp_path / "no") if value == "?" else value for key, value in values.items()}
    data = ArraysConfig(path=save(tmp_path / name, **contents), **values)
    try:
        for split in SPLITS:
            arrays.build(data, split, task)
    except HpcTrainerError as error:
        return list(data_problems(data, task)), str(error)
    return list(data_problems(data, task)), ""


@pytest.mark.parametrize("name", PLANNED)
def test_headers_are_looked_at_by_plan(tmp_path: Path, name: str) -> None:
    (problem,), raised = _problems(tmp_path, PLANNED[name], name)
    assert PLANNED[name][-1] in problem
    assert raised == problem


@pytest.mark.parametrize("name", READ)
def test_values_are_looked_at_before_the_first_step(tmp_path: Path, name: str) -> None:
    problems, raised = _problems(tmp_path, READ[name], name)
    assert problems == []
    assert READ[name][-1] in raised
    assert str(tmp_path / name) in raised


def test_of_large_inputs_each_batch_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHECKED_AT_START", 100)
    data = build(save(tmp_path / "a", _with(INPUTS, (7, 1), np.nan)))
    rows = part_of(20, 0.1, "train").tolist()
    data.__getitems__([0, 1])
    with pytest.raises(HpcTrainerError, match="inputs has a value in row 7"):
        data.__getitems__([0, rows.index(7)])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for name, content, said in (
        ("a.npz", b"", "cannot be read: File is not a zip file"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.npy", b"", "is one array. Name the folder that has inputs and targets"),
        ("a.txt", b"", "must be .npz, .parquet or a folder of .npy files"),
        ("none.npz", None, "No such file"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        (problem,) = data_problems(ArraysConfig(path=str(path)), CLASSIFY)
        assert said in problem
        assert str(path) in problem
    (problem,) = data_problems(ArraysConfig(), CLASSIFY)
    assert problem.startswith("data=arrays needs data.path")


def test_columns_of_lists_have_one_length_and_no_gap(tmp_path: Path) -> None:
    for name, column, said in (
        ("a", [[1.0, 2.0], [3.0]], "inputs has 1 values in row 1, and 2 in row 0"),
        ("b", [[1.0, 2.0], None], "inputs has no value in row 1"),
        ("c", [[1.0, 2.0], [3.0, None]], "inputs has no value in row 3"),
    ):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.table({"inputs": column, "targets": [0, 1]}), path)
        with pytest.raises(HpcTrainerError, match=said.replace("[", r"\[")):
            build(str(path))


def test_without_pyarrow_plan_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.parquet")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = data_problems(ArraysConfig(path=path), CLASSIFY)
    assert problem == f"{path} needs the package pyarrow: pip install 'hpc_trainer[tables]'"


def test_plan_knows_samples_and_tasks(tmp_path: Path) -> None:
    data = ArraysConfig(path=save(tmp_path / "a"))
    config = make_config(data=data, train__global_batch_size=19)
    (problem,) = find_problems(config)
    assert "must be at most the 18 training samples of data=arrays" in problem
    config = make_config(data=data, task=RegressionConfig(), train__global_batch_size=2)
    assert list(find_problems(config)) == []
