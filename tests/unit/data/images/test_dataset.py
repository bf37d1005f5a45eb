"""Images are the files' pixels, normalised; a broken one is refused, or always has the same one in its place."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hpc_trainer.data.images import ImageFolderConfig, ImageShardsConfig, OnBroken
from hpc_trainer.data.images import dataset as dataset_module
from hpc_trainer.data.images.dataset import build
from hpc_trainer.data.images.index import build_index
from hpc_trainer.data.images.pictures import read_picture
from hpc_trainer.datasets import MapDataset
from hpc_trainer.errors import BrokenPictureError, DataError
from tests.unit.data.images.making import encoded, make_folder, make_shards, pixels, samples


def folder(path, split="train", **values):
    return build(ImageFolderConfig(path=str(path), **{"image_size": 16, "resize": 18, **values}), split)


def shards(path, split="train", **values):
    return build(ImageShardsConfig(path=str(path), **{"image_size": 16, "resize": 18, **values}), split)


@pytest.fixture
def root(tmp_path):
    """Four training pictures of each class, two for evaluation."""
    return make_folder(tmp_path, train=4, eval=2)


def broken(root, *names, size=60):
    for name in names:
        path = root / "train" / name
        path.write_bytes(path.read_bytes()[:size])


def test_images_are_the_pixels_normalised(root):
    data = folder(root, mean=[0.1, 0.2, 0.3], std=[0.5, 0.25, 1.0])
    assert isinstance(data, MapDataset)
    assert (data.input_shape, data.num_classes, len(data)) == ((3, 16, 16), 3, 12)
    assert list(data.classes) == sorted(path.name for path in (root / "train").iterdir())
    images, targets = data.__getitems__([5, 0, 11])
    assert (images.dtype, targets.dtype, targets.tolist()) == (torch.float32, torch.int64, [1, 0, 2])
    assert images.is_contiguous()
    array = read_picture((root / "train/bee/001.png").read_bytes(), "", num_channels=3, short_side=18, size=16)
    expected = (array / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.25, 1.0]
    assert np.allclose(images[0].permute(1, 2, 0), expected, atol=1e-6)
    pixels_again = images[0].permute(1, 2, 0).numpy() * data.pixel_std + data.pixel_mean
    assert np.allclose(pixels_again, array / 255, atol=1e-6)
    with pytest.raises(IndexError, match="index 12 must be 0 to 11"):
        data.__getitems__([12])


def test_an_image_has_the_same_bits_in_any_batch_and_process(root):
    build_index(make_shards(root / "packed/train", samples(12)))
    for data in (folder(root), shards(root / "packed/train", eval_fraction=0.2), folder(root, "eval", num_workers=3)):
        images, targets = data.__getitems__(range(len(data)))
        for index in range(len(data)):
            one, target = data.__getitems__([index])
            assert torch.equal(one[0], images[index])
            assert target[0] == targets[index]
    loader = DataLoader(
        data, sampler=range(len(data)), batch_size=2, num_workers=1, collate_fn=lambda batch: batch,
        multiprocessing_context="fork",
    )  # fmt: skip
    assert torch.equal(torch.cat([batch for batch, _ in loader]), images)


def test_grey_and_default_sizes(root):
    data = folder(root, num_channels=1, image_size=8, resize=None)
    images, _ = data.__getitems__([1])
    array = read_picture((root / "train/ant/001.png").read_bytes(), "", num_channels=1, short_side=9, size=8)
    assert np.allclose(images[0, 0], array[..., 0] / 127.5 - 1, atol=1e-6)


def test_statistics_are_read_where_there_are_some(root):
    (root / "statistics.json").write_text(json.dumps({"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "count": 9}))
    plain = folder(root, mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    assert torch.equal(folder(root).__getitems__([3])[0], plain.__getitems__([3])[0])
    assert folder(root).fingerprint() == plain.fingerprint()
    assert folder(root, mean=[0.5] * 3).fingerprint()["std"] == [0.4, 0.5, 0.6]
    (root / "statistics.json").rename(root / "train" / "statistics.json")
    assert folder(root, "eval").fingerprint()["mean"] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON object with mean and std"),
        ('{"mean": [0.5], "std": [0.5]}', r"mean must be 3 number\(s\)"),
        ('{"mean": [0.5, 0.5, 0.5]}', "'std'"),
        ('{"mean": [0.5, 0.5, 0.5], "std": [0.5, 0, 0.5]}', "std must be 3 number.* greater than 0"),
        ('{"mean": [0.5, 0.5, NaN], "std": [0.5, 0.5, 0.5]}', "mean must be 3 number"),
        ("[]", "TypeError"),
    ],
)
def test_statistics_that_cannot_be_are_refused(root, content, message):
    (root / "statistics.json").write_text(content)
    with pytest.raises(DataError, match=rf"statistics.json must be .*{message}.* Fix: .*data.mean and data.std"):
        folder(root)


def test_the_fingerprint_tells_content_from_place(root, tmp_path_factory):
    other = make_folder(tmp_path_factory.mktemp("other"), train=4, eval=2)
    assert folder(root).fingerprint() == folder(other).fingerprint()
    assert folder(root).fingerprint() != folder(root, "eval").fingerprint()
    assert folder(root).fingerprint() != folder(root, mean=[0.4, 0.4, 0.4]).fingerprint()
    (other / "train/ant/000.jpg").write_bytes(b"1")
    assert folder(root).fingerprint() != folder(other).fingerprint()
    json.dumps(folder(root).fingerprint())


def test_a_broken_picture_is_refused_with_the_way_out(root):
    broken(root, "bee/000.jpg")
    data = folder(root)
    data.__getitems__([0, 1, 2, 3])
    with pytest.raises(
        BrokenPictureError, match=r"train/bee/000.jpg cannot .*Fix: .*data check.*on_broken=skip"
    ) as raised:
        data.__getitems__([3, 4])
    assert raised.value.exit_code == 1  # started again it would meet the picture again


def test_the_same_one_stands_in_always_and_it_is_told_once(root, capfd):
    broken(root, "bee/000.jpg", "ant/002.webp")
    data = folder(root, on_broken=OnBroken.skip)
    images, targets = data.__getitems__(range(12))
    said = capfd.readouterr().err
    assert said.count("replaces it") == 2
    assert re.search(r"train/bee/000\.jpg cannot be decoded .* so far this process has found 2 broken .* of 12", said)
    whole = [row for row in range(12) if row not in (2, 4)]
    for row in (2, 4):
        (other,) = [each for each in whole if torch.equal(images[each], images[row])]
        assert targets[row] == targets[other]  # its own class, not that of the broken one
    # In another process, order and batch: a fresh data set is as a resumed run has it.
    fresh = folder(root, on_broken=OnBroken.skip)
    for row in (4, 2, 0):
        assert torch.equal(fresh.__getitems__([row])[0][0], images[row])
    assert torch.equal(data.__getitems__([2])[0][0], images[2])
    assert capfd.readouterr().err.count("replaces it") == 2  # the fresh one's


def test_skip_is_for_what_a_file_holds_and_not_for_lost_files(root):
    data = folder(root, on_broken=OnBroken.skip)
    (root / "train/bee/000.jpg").unlink()
    with pytest.raises(DataError, match=r"bee/000.jpg cannot be read on .*No such file") as raised:
        data.__getitems__([4])
    assert not isinstance(raised.value, BrokenPictureError)


def test_a_data_set_of_broken_pictures_is_refused(root, monkeypatch):
    for path in (root / "train").glob("*/*"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"100 others, drawn from 12, cannot be read either: .*data check"):
        folder(root, on_broken=OnBroken.skip).__getitems__([0])


def test_a_broken_picture_in_a_shard_is_named_with_its_byte(root):
    packed = samples(8)
    packed[5] = ("000005.png", packed[5][1][:50], 2)
    build_index(make_shards(root / "packed/train", packed))
    build_index(make_shards(root / "packed/eval", samples(3, 50)))
    with pytest.raises(BrokenPictureError, match=r"shard-000001.tar at byte \d+ cannot be decoded"):
        shards(root / "packed").__getitems__([5])
    assert len(shards(root / "packed", on_broken=OnBroken.skip).__getitems__(range(8))[1]) == 8
    assert shards(root / "packed", "eval").__getitems__(range(3))[1].tolist() == [2, 0, 1]


def test_files_that_have_changed_are_problems(root):
    build_index(make_shards(root / "packed", samples(8)))
    data = shards(root / "packed", eval_fraction=0.3)
    assert list(data.problems()) == []
    assert list(folder(root).problems()) == []
    path = root / "packed/shard-000001.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (problem,) = data.problems()
    assert problem.file == str(path)
    assert "SHA-256" in problem.cause


def test_a_shard_that_is_missing_is_told_before_the_first_step(root):
    build_index(make_shards(root / "packed", samples(8)))
    (root / "packed/shard-000001.tar").unlink()
    with pytest.raises(
        DataError, match=r"1 shard\(s\) of .*shard-000001.tar: No such file or directory on .*Fix: copy"
    ):
        shards(root / "packed", eval_fraction=0.3)


def test_evaluation_decodes_in_threads_and_training_in_its_processes(root, monkeypatch):
    used = []
    real = dataset_module.ThreadPoolExecutor
    monkeypatch.setattr(dataset_module, "ThreadPoolExecutor", lambda count, **_: used.append(count) or real(count))
    alone = folder(root, "eval").__getitems__(range(6))
    folder(root, num_workers=3).__getitems__(range(6))
    assert used == []
    many = folder(root, "eval", num_workers=3).__getitems__(range(6))
    assert used == [3]
    assert torch.equal(alone[0], many[0])
    broken(root, "../eval/bee/000.jpg")
    with pytest.raises(BrokenPictureError):
        folder(root, "eval", num_workers=3).__getitems__(range(6))


def test_large_pictures_of_any_kind(tmp_path):
    for split in ("train", "eval"):
        for number, name in enumerate("ab"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "x.jpg").write_bytes(encoded(pixels(number, 0, (300, 200)), "jpg"))
            (tmp_path / split / name / "y.png").write_bytes(encoded(pixels(number, 0, (50, 999), 1), "png"))
    images, targets = folder(tmp_path).__getitems__(range(4))
    assert targets.tolist() == [0, 0, 1, 1]
    assert images.isfinite().all()
