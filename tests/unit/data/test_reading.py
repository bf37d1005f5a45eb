"""data check finds what is wrong with each sample and file; data bench measures the batches of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.data.files import Problem
from hpc_trainer.data.images.index import read_index
from hpc_trainer.data.prepare.images import ImageOptions, prepare_images
from hpc_trainer.data.prepare.job import Settings
from hpc_trainer.data.reading import bench, check
from hpc_trainer.data.verbs import Measured, Rate
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid

ONE = "train.global_batch_size=1"
ANY_MODEL = ("model=custom", "model._target_=torch.nn.Identity")


class Rows:
    """32 rows of 3 columns for training, 8 for evaluation; a few of them are wrong."""

    input_shape, num_classes = (3,), 4

    def __init__(self, split: str, wrong: Sequence[str] = ()) -> None:
        generator = torch.Generator().manual_seed(int(split == "eval"))
        self._split, self._wrong = split, wrong
        self._inputs = torch.rand(32 if split == "train" else 8, 3, generator=generator)
        self._targets = torch.arange(len(self._inputs)) % 4
        if split == "train":
            self._targets[0] = -100  # padding counts nothing
            self._inputs[3, 1] = float("nan") if "hole" in wrong else 0.0
            self._targets[5] = 7 if "label" in wrong else 0
        elif "leak" in wrong:
            self._inputs[6] = Rows("train").__getitems__([9])[0][0]

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitems__(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if "broken" in self._wrong and 11 in rows:
            raise OSError("it cannot be read")
        return self._inputs[list(rows)], self._targets[list(rows)]

    def problems(self) -> Iterator[Problem]:
        if "checksum" in self._wrong and self._split == "eval":
            yield Problem("rows.bin", "its SHA-256 is another one", 12)


def build(split: str, **options: Any) -> Rows:
    return Rows(split, **options)


class Stream:
    """Numbers without an end, and what a stream needs to be trained on."""

    num_classes = 4

    def __init__(self) -> None:
        self._place = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        while True:
            self._place += 1
            yield torch.full((3,), float(self._place)), 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


def build_stream(split: str) -> Any:
    return Stream() if split == "train" else Rows(split)


def _config(*words: str) -> TrainConfig:
    grid = freeze_grid(["cluster=local", *ANY_MODEL, *words], trust=[__name__.partition(".")[0]])
    return grid.specs[0].typed()


def _own(wrong: str = "", target: str = "build", *words: str) -> TrainConfig:
    kwargs = [f"+data.kwargs.wrong=[{wrong}]"] if wrong else []
    return _config("data=custom", f"data._target_={__name__}.{target}", *kwargs, *words)


def _check(config: TrainConfig, sample: int | None = None, num_workers: int = 0) -> dict[str, Any]:
    told: list[tuple[int, int]] = []
    found = check(config, sample=sample, num_workers=num_workers, tell=lambda *each: told.append(each))
    assert not told or told[-1][0] == told[-1][1]
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    assert len(found["problems"]) == found["num_problems"]
    return [f"{each['split']}: {Problem(each['file'], each['cause'], each['offset'])}" for each in found["problems"]]


def test_data_without_a_fault() -> None:
    found = _check(_config("data=digits"))
    assert found["splits"] == {"train": {"samples": 1437, "read": 1437}, "eval": {"samples": 360, "read": 360}}
    assert (found["num_problems"], found["duplicates"]["num"]) == (0, 0)
    assert _check(_config("data=text_bytes"), sample=5)["splits"]["train"]["read"] == 5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_fault_is_named_with_its_sample(num_workers: int) -> None:
    found = _check(_own("hole,label,broken,leak,checksum"), num_workers=num_workers)
    assert _lines(found) == [
        "train: train sample 11: OSError: it cannot be read",
        "train: train sample 3: its inputs hold NaN or infinity (in column 1)",
        "train: train sample 5: its label 7 must be 0 to 3",
        "eval: rows.bin at byte 12: its SHA-256 is another one",
    ]
    assert found["duplicates"] == {"num": 1, "pairs": [[9, 6]]}


def test_what_a_feature_cannot_take_is_told_before_a_run_meets_it() -> None:
    found = _check(_own("label", "build", "augment.crop=padded"))
    assert found["num_problems"] == 3
    assert all("augment changes images" in line for line in (_lines(found)[0], _lines(found)[1]))
    assert _lines(found)[2] == "train: train sample 5: its label 7 must be 0 to 3"
    augmented = _check(_config("data=digits", "augment.crop=padded", "augment.size=4", "augment.label_noise=0.1"))
    assert (augmented["num_problems"], augmented["splits"]["train"]["read"]) == (0, 1437)


def test_old_data_that_a_run_replays_are_opened_too() -> None:
    old = f"replay.data=[{{name: custom, _target_: {__name__}.build}}]"
    (line,) = _lines(_check(_config("data=digits", "replay.share=0.2", old)))
    assert "input_shape=[1, 8, 8] and input_shape=[3]" in line


def test_a_sample_of_the_data_reads_no_checksums() -> None:
    found = _check(_own("checksum"), sample=4)
    assert found["splits"] == {"train": {"samples": 32, "read": 4}, "eval": {"samples": 8, "read": 4}}
    assert found["num_problems"] == 0


@pytest.mark.long
def test_a_stream_has_no_samples_by_number() -> None:
    assert _check(_own("", "build_stream"))["splits"] == {
        "train": {"samples": None, "read": 0}, "eval": {"samples": 8, "read": 8},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="these data are a stream"):
        bench(_own("", "build_stream"), workers=[0], seconds=0.1, tell=lambda *_: None)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(24):
        path = folder / "raw" / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    options = ImageOptions(size=16, format="png", eval_fraction=0.3)
    prepare_images(folder / "raw", folder / "out", options, Settings(), lambda *_: None)
    return folder


def test_prepared_pictures_and_a_byte_that_has_changed(pictures: Path, tmp_path: Path) -> None:
    config = _config("data=image_shards", f"data.path={pictures / 'out'}", "data.image_size=14", ONE)
    assert _check(config)["num_problems"] == 0
    index = read_index(pictures / "out" / "train")
    shard = pictures / "out" / "train" / "shard-000000.tar"
    whole = shard.read_bytes()
    place = int(index.rows[2]["offset"]) + 60
    try:
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        lines = _lines(_check(config))
        assert lines[0] == f"train: {shard}: its SHA-256 has changed since it was indexed"
        assert len(lines) == 2
        assert lines[1].startswith(f"train: train sample 2: {shard} at byte ")
        shard.unlink()
        (line,) = _lines(_check(config))
        assert line.startswith("train: data=image_shards: 1 shard(s) of data.path=")
    finally:
        shard.write_bytes(whole)


def test_a_broken_picture_is_told_also_where_another_would_stand_in(pictures: Path) -> None:
    broken = pictures / "raw" / "cat" / "0.png"
    whole = broken.read_bytes()
    words = ("data=image_folder", f"data.path={pictures / 'raw'}", "data.eval_fraction=0.3", "data.image_size=14")
    try:
        broken.write_bytes(whole[:50])
        (line,) = _lines(_check(_config(*words, "data.on_broken=skip")))
        assert str(broken) in line
    finally:
        broken.write_bytes(whole)


def test_batches_are_measured_with_and_without_processes(pictures: Path) -> None:
    words = ("data=image_shards", f"data.path={pictures / 'out'}", "data.image_size=14", "train.global_batch_size=8")
    told: list[tuple[int, int]] = []
    found = bench(_config(*words), workers=[0, 1], seconds=0.1, tell=lambda *each: told.append(each))
    assert told == [(0, 2), (1, 2)]
    assert (found["batch_size"], [row["num_workers"] for row in found["rows"]]) == (8, [0, 1])
    for row in found["rows"]:
        assert row["num_batches"] >= 1
        assert row["samples_per_s"] == pytest.approx(8 * 1000 / row["batch_ms"])
        # 8 pictures of 3 channels of 14 by 14 float32, and a label of int64 each
        assert row["mb_per_s"] == pytest.approx(row["samples_per_s"] * (3 * 14 * 14 * 4 + 8) / 1e6)
    assert 0 < found["shares"]["decode"] < 1
    cropped = _config("data=digits", "augment.crop=padded", "augment.size=4", "train.global_batch_size=8")
    (row,) = bench(cropped, workers=[0], seconds=0.05, tell=lambda *_: None)["rows"]
    assert row["mb_per_s"] == pytest.approx(row["samples_per_s"] * (4 * 4 * 4 + 8) / 1e6)
    assert bench(_config("data=digits"), workers=[0], seconds=0.05, tell=lambda *_: None)["shares"] == {}


def test_what_suffices_for_a_step() -> None:
    rates = {0: 90.0, 2: 40.0, 4: 19.0, 8: 18.0}
    rows = tuple(
        Rate(num_workers=n, samples_per_s=1.0, batch_ms=ms, mb_per_s=1.0, first_batch_s=1.0, num_batches=1)
        for n, ms in rates.items()
    )
    found = Measured(batch_size=1, num_samples=1, rows=rows, shares={})
    assert [found.enough(ms) for ms in (100, 50, 20, 10)] == [0, 2, 4, None]
