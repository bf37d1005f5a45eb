"""Folders of save_to_disk: images, numbers and tokens by column; what cannot be is told from their JSON."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_trainer.config.rules.data_rules import data_problems
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.task import MultiLabelConfig, RegressionConfig, TaskConfig
from hpc_trainer.data.files import part_of
from hpc_trainer.data.hf import HfDatasetConfig
from hpc_trainer.data.hf import dataset as hf_dataset
from hpc_trainer.datasets import MapDataset
from hpc_trainer.errors import DataError, HpcTrainerError
from tests.unit.record.builders import make_config

with warnings.catch_warnings():  # of what it imports in turn
    warnings.simplefilter("ignore")
    import datasets

CLASSES = TaskConfig()
COUNT = 12


def _png(number: int, size: tuple[int, int] = (5, 4)) -> bytes:
    pixels = np.full((size[1], size[0], 3), number, dtype=np.uint8)
    pixels[0, 0] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def contents(**columns: Any) -> dict[str, Any]:
    return {
        "image": [{"bytes": _png(each), "path": None} for each in range(COUNT)],
        "label": [each % 3 for each in range(COUNT)],
        "row": [[float(each), 1.0] for each in range(COUNT)],
        "price": [each * 0.5 for each in range(COUNT)],
        "tokens": [list(range(each + 1)) for each in range(COUNT)],
        "flags": [[each % 2, 1] for each in range(COUNT)],
        "text": ["word"] * COUNT,
        **columns,
    }


def save(folder: Path, *, splits: tuple[str, ...] = (), names: int = 3, **columns: Any) -> str:
    features = datasets.Features({
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog", "emu"][:names]),
        "row": datasets.Sequence(datasets.Value("float32")),
        "price": datasets.Value("float32"),
        "tokens": datasets.Sequence(datasets.Value("int32")),
        "flags": datasets.Sequence(datasets.Value("int8")),
        "text": datasets.Value("string"),
    })  # fmt: skip
    found = datasets.Dataset.from_dict(contents(**columns), features=features)
    (datasets.DatasetDict(dict.fromkeys(splits, found)) if splits else found).save_to_disk(str(folder))
    return str(folder)


def build(path: str, split: Any = "train", task: TaskConfig = CLASSES, **values: Any) -> hf_dataset.HfDataset:
    return hf_dataset.build(HfDatasetConfig(path=path, **values), split, task)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("hf") / "one")


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("hf") / "many", splits=("train", "test"))


def _stored(image: Image.Image, **more: Any) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG", **more)
    return {"bytes": file.getvalue(), "path": None}


def test_a_picture_is_turned_as_its_camera_has_noted_it(tmp_path: Path) -> None:
    """As those of data=image_folder, and as the library itself shows it."""
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    pixels = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    path = save(tmp_path / "turned", image=[_stored(Image.fromarray(pixels), exif=exif)] * COUNT)
    inputs, _ = build(path).__getitems__([0])
    assert torch.equal(inputs[0], torch.from_numpy(np.rot90(pixels, -1).transpose(2, 0, 1) / np.float32(255)))


def test_a_picture_of_16_bits_is_refused_and_not_clipped_to_white(tmp_path: Path) -> None:
    deep = _stored(Image.fromarray(np.full((4, 5), 3000, dtype=np.uint16)))
    path = save(tmp_path / "deep", image=[deep] * COUNT)
    with pytest.raises(DataError, match=r"image of row \d+ cannot be decoded: .*more than 8 bits a channel"):
        build(path, num_channels=1)


def test_images_are_decoded_and_classes_have_names(folder: str) -> None:
    data = build(folder)
    assert isinstance(data, MapDataset)
    assert (data.input_shape, data.num_classes, data.classes, len(data)) == ((3, 4, 5), 3, ["cat", "dog", "emu"], 11)
    rows = part_of(COUNT, 0.1, "train").tolist()
    inputs, targets = data.__getitems__(range(11))
    assert inputs[:, :, 1, 1].tolist() == [[row / 255] * 3 for row in rows] or torch.allclose(
        inputs[:, 0, 1, 1] * 255, torch.tensor(rows, dtype=torch.float32)
    )
    assert inputs[:, :, 0, 0].unique().tolist() == [1.0]
    assert targets.tolist() == [row % 3 for row in rows]
    assert build(folder, "eval").__getitems__([0])[1].tolist() == [part_of(COUNT, 0.1, "eval").tolist()[0] % 3]


def test_images_may_be_resized_and_grey(splits: str) -> None:
    data = build(splits, "eval", eval_split="test", image_size=8, num_channels=1)
    assert (data.input_shape, len(data)) == ((1, 8, 8), COUNT)
    assert data.__getitems__([3])[0].shape == (1, 1, 8, 8)


def test_numbers_lists_and_labels(folder: str) -> None:
    rows = part_of(COUNT, 0.1, "train").tolist()
    data = build(folder, task=RegressionConfig(), input="row", target="price")
    inputs, targets = data.__getitems__([2, 0])
    assert (data.input_shape, data.num_classes) == ((2,), 1)
    assert inputs.tolist() == [[float(rows[2]), 1.0], [float(rows[0]), 1.0]]
    assert targets.tolist() == [rows[2] * 0.5, rows[0] * 0.5]
    labels = build(folder, task=MultiLabelConfig(), input="price", target="flags")
    assert (labels.input_shape, labels.num_classes) == ((1,), 2)
    assert labels.__getitems__([1])[1].tolist() == [[float(rows[1] % 2), 1.0]]


def test_lists_of_tokens_are_cut_and_padded(folder: str) -> None:
    data = build(folder, input="tokens", seq_len=4, vocab_size=20)
    rows = part_of(COUNT, 0.1, "train").tolist()
    inputs, targets = data.__getitems__([rows.index(1), rows.index(2), rows.index(9)])
    assert inputs.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 3]]
    assert targets.tolist() == [[1, -100, -100, -100], [1, 2, -100, -100], [1, 2, 3, 4]]
    assert (data.num_classes, data.all_targets_count) == (20, False)
    with pytest.raises(DataError, match=rf"tokens of row {rows[0]} has tokens|of row \d+ has tokens 0 to \d+, and"):
        build(folder, input="tokens", seq_len=4, vocab_size=3).__getitems__(range(11))


def test_a_pickled_copy_reads_the_same(folder: str) -> None:
    data = build(folder)
    state = pickle.dumps(data)
    assert len(state) < 4000
    assert pickle.loads(state).__getitems__([1])[0].equal(data.__getitems__([1])[0])


def test_the_fingerprint_is_that_of_content(folder: str, tmp_path: Path) -> None:
    same, other = save(tmp_path / "a"), save(tmp_path / "b", price=[1.0] * COUNT)
    assert build(folder).fingerprint() == build(same).fingerprint()
    prints = {build(folder).fingerprint(), build(other).fingerprint(), build(folder, "eval").fingerprint()}
    assert len({*prints, build(folder, num_channels=1).fingerprint()}) == 4


def test_labels_out_of_range_and_broken_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(HpcTrainerError, match=r"label is -1 in row 4 .*, and classes are 0 to 2"):
        build(save(tmp_path / "a", label=[0] * 4 + [-1] * 8))
    images = contents()["image"]
    images[5] = {"bytes": images[5]["bytes"][:40], "path": None}
    images[6] = {"bytes": _png(6, (9, 9)), "path": None}
    path = save(tmp_path / "b", image=images)
    rows = part_of(COUNT, 0.1, "train").tolist()
    with pytest.raises(DataError, match=r"image of row 5 cannot be decoded"):
        build(path).__getitems__([rows.index(5)])
    with pytest.raises(
        DataError, match=r"image of row 6 is 9 x 9 pixels, and the first one 5 x 4. Use data.image_size"
    ):
        build(path).__getitems__([rows.index(6)])
    prices = [float("nan") if each == rows[3] else 0.5 for each in range(COUNT)]
    data = build(save(tmp_path / "c", price=prices, row=[[1.0]] * 6 + [[1.0, 2.0]] * 6), input="price")
    with pytest.raises(DataError, match=f"price is missing or not finite in row {rows[3]}"):
        data.__getitems__([2, 3])
    with pytest.raises(DataError, match="row has rows of different shapes"):
        build(str(tmp_path / "c"), input="row").__getitems__(range(11))


PLANNED: list[tuple[dict[str, Any], TaskConfig, str]] = [
    ({"input": "img"}, CLASSES, "Did you mean image? Valid: image, label, row, price, tokens, flags, text."),
    ({"input": "text"}, CLASSES, "data.input=text is string in"),
    ({"target": "price"}, CLASSES, "data.target=price is float32 in"),
    ({"target": "label"}, MultiLabelConfig(), "the task takes lists of 0 and 1"),
    ({"seq_len": 4}, CLASSES, "data.seq_len and data.vocab_size go together"),
    (
        {"seq_len": 4, "vocab_size": 9, "input": "row"},
        CLASSES,
        "data.seq_len is for lists of tokens, and column row of",
    ),
    ({"seq_len": 4, "vocab_size": 9, "input": "tokens", "target": "label"}, CLASSES, "has no effect with data.seq_len"),
    ({"eval_split": "test"}, CLASSES, "is a single split. Use data.eval_split=null."),
]


@pytest.mark.parametrize(("values", "task", "said"), PLANNED)
def test_columns_are_looked_at_by_plan(folder: str, values: dict[str, Any], task: TaskConfig, said: str) -> None:
    data = HfDatasetConfig(path=folder, **values)
    (problem,) = data_problems(data, task)
    assert said in problem
    with pytest.raises(HpcTrainerError) as caught:
        hf_dataset.build(data, "train", task)
    assert str(caught.value) == problem


def test_splits_and_files_are_looked_at_by_plan(splits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = data_problems(HfDatasetConfig(path=splits, eval_split="tests"), CLASSES)
    assert "data.eval_split=tests: " in problem
    assert "Did you mean test? Valid: train, test." in problem
    (problem,) = data_problems(HfDatasetConfig(path=str(tmp_path)), CLASSES)
    assert "has no dataset_dict.json and no state.json" in problem
    path = Path(save(tmp_path / "a"))
    file = json.loads((path / "state.json").read_text())["_data_files"][0]["filename"]
    (path / file).rename(path / "elsewhere")
    (problem,) = data_problems(HfDatasetConfig(path=str(path)), CLASSES)
    assert f"lists {file}, which is missing" in problem
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = data_problems(HfDatasetConfig(path=str(path)), CLASSES)
    assert problem == f"data=hf_dataset data.path={path} needs the package datasets: pip install 'hpc_trainer[hub]'"


def test_models_that_do_not_read_it_are_named(folder: str) -> None:
    name = "data=hf_dataset data.seq_len="
    for words, values, said in (
        (["model=gpt"], {}, f"model=gpt does not go with {name}null: it reads text. "),
        (
            ["model=cnn"],
            {"input": "tokens", "seq_len": 4, "vocab_size": 20},
            f"{name}4 does not go with model=cnn: it is text",
        ),
        (["model=gpt"], {"input": "tokens", "seq_len": 4, "vocab_size": 20}, None),
        (["model=cnn"], {}, None),
    ):
        config = make_config(*words, data=HfDatasetConfig(path=folder, **values), train__global_batch_size=2)
        problems = list(find_problems(config))
        assert [said in each for each in problems] == [True] * (said is not None), problems
