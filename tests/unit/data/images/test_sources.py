"""Sources number the pictures alike on every machine, and say which file is missing or wrong."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hpc_trainer.data.images import ImageFolderConfig, ImageShardsConfig
from hpc_trainer.data.images import shards as shards_module
from hpc_trainer.data.images.dataset import open_source
from hpc_trainer.data.images.folder import held_out_rows, is_held_out
from hpc_trainer.data.images.index import ROW, build_index, read_index
from hpc_trainer.errors import DataError
from tests.seeds import chosen_seed
from tests.unit.data.images.making import CLASSES, make_folder, make_shards, picture, samples


def folder(path, split="train", **values):
    return open_source(ImageFolderConfig(path=str(path), **values), split)


def shards(path, split="train", **values):
    return open_source(ImageShardsConfig(path=str(path), **values), split)


def content(source) -> list[tuple[bytes, int]]:
    labels = source.labels(np.arange(len(source))).tolist()
    return [(source.read(row), label) for row, label in enumerate(labels)]


def relative(source, root) -> list[str]:
    return [os.path.relpath(source.place(row)[0], root) for row in range(len(source))]


@pytest.fixture
def packed(tmp_path) -> Path:
    """Ten training and five held-out samples in shards with an index."""
    for split, count, first in (("train", 10, 0), ("eval", 5, 100)):
        build_index(make_shards(tmp_path / split, samples(count, first)))
    return tmp_path


def test_a_folder_is_numbered_by_class_and_name(tmp_path):
    make_folder(tmp_path, train=3, eval=1)
    (tmp_path / "train" / "ant" / "deeper").mkdir()
    (tmp_path / "train" / "ant" / "deeper" / "x.PNG").write_bytes(b"x")
    for ignored in ("train/.hidden/a.png", "train/ant/notes.txt", "train/ant/.a.jpg", "train/README.png"):
        (tmp_path / ignored).parent.mkdir(exist_ok=True)
        (tmp_path / ignored).write_bytes(b"")
    source = folder(tmp_path)
    names = [f"{name}/{file}" for name in CLASSES for file in ("000.jpg", "001.png", "002.webp")]
    assert relative(source, tmp_path / "train") == sorted([*names, "ant/deeper/x.PNG"])
    assert source.labels(np.arange(10)).tolist() == [0] * 4 + [1] * 3 + [2] * 3
    assert (source.num_classes, len(folder(tmp_path, "eval"))) == (3, 3)
    assert source.read(1) == picture(0, 1, "png")


def test_names_need_be_no_text(tmp_path):
    for name in (b"a", b"b\xff"):
        (tmp_path / "train" / os.fsdecode(name)).mkdir(parents=True)
        (tmp_path / "train" / os.fsdecode(name) / os.fsdecode(b"\xfe.png")).write_bytes(name)
    (tmp_path / "val").symlink_to(tmp_path / "train")
    assert [data for data, _ in content(folder(tmp_path, "eval"))] == [b"a", b"b\xff"]
    assert folder(tmp_path).digest()


def test_val_is_the_eval_folder_too_and_may_lack_a_class(tmp_path):
    make_folder(tmp_path, train=2, val=1)
    (tmp_path / "val" / "ant" / "000.jpg").unlink()
    (tmp_path / "val" / "ant").rmdir()
    source = folder(tmp_path, "eval")
    assert source.labels(np.arange(2)).tolist() == [1, 2]
    assert source.num_classes == 3
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(DataError, match=r"val/dog is a class that the training folder does not have\."):
        folder(tmp_path, "eval")


def test_a_split_by_hash_shares_no_picture_and_stays_when_others_come(tmp_path):
    make_folder(tmp_path, here=40)
    train, held_out = (
        set(relative(folder(tmp_path, split, eval_fraction=0.25), tmp_path)) for split in ("train", "eval")
    )
    assert len(train | held_out) == len(train) + len(held_out) == 120
    assert 15 <= len(held_out) <= 45  # 30 expected, standard deviation 4.7
    for number in range(40, 60):
        (tmp_path / "bee" / f"{number:03}.png").write_bytes(b"")
    assert held_out < set(relative(folder(tmp_path, "eval", eval_fraction=0.25), tmp_path))
    # Pinned: another hash would hold out others, and finished runs would have trained on them.
    assert [is_held_out(f"ant/{number}.jpg", 0.3) for number in range(12)] == PINNED


PINNED = [bool(int(each)) for each in "000001011100"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: [path.unlink() for path in (root / "train/bee").iterdir()], r"train/bee holds no picture .*Fix"),
        (lambda root: (root / "train").rename(root / "other"), r"train is missing on this node"),
        (lambda root: (root / "eval").rename(root / "test"), r"eval is missing on this node"),
        (
            lambda root: [path.unlink() for path in (root / "train").glob("*/*")],
            r"train holds no picture .* in its 3 class folders",
        ),
        (
            lambda root: [(root / f"train/{name}").rename(root / name) for name in ("ant", "bee")],
            r"train must hold a folder for each class, and two classes or more; it has 1",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path, spoil, message):
    make_folder(tmp_path, train=2, eval=1)
    spoil(tmp_path)
    with pytest.raises(DataError, match=message):
        [folder(tmp_path, split) for split in ("train", "eval")]


def test_the_digest_of_a_folder_is_of_names_and_sizes(tmp_path):
    make_folder(tmp_path / "a", train=3, eval=1)
    make_folder(tmp_path / "b", train=3, eval=1)
    first = folder(tmp_path / "a").digest()
    assert folder(tmp_path / "b").digest() == first
    path = tmp_path / "b/train/ant/000.jpg"
    with path.open("ab") as file:
        file.write(b"x")
    changed = folder(tmp_path / "b").digest()
    path.rename(path.with_name("000.jpeg"))
    assert len({first, changed, folder(tmp_path / "b").digest(), folder(tmp_path / "a", "eval").digest()}) == 4


def test_shards_give_the_same_bytes_as_the_tars(packed):
    expected = [(data, label) for _, data, label in samples(10)]
    source = shards(packed)
    assert content(source) == expected
    assert content(shards(packed, "eval")) == [(data, label) for _, data, label in samples(5, 100)]
    assert source.num_classes == 3
    assert source.place(4) == (str(packed / "train" / "shard-000001.tar"), 512)


def test_a_split_of_shards_by_hash(packed):
    parts = {split: content(shards(packed / "train", split, eval_fraction=0.3)) for split in ("train", "eval")}
    assert sorted(parts["train"] + parts["eval"]) == sorted(content(shards(packed)))
    assert parts["train"]
    assert parts["eval"]
    digests = {shards(packed / "train", split, eval_fraction=0.3).digest() for split in ("train", "eval")}
    assert len({*digests, shards(packed).digest()}) == 3
    with pytest.raises(DataError, match=r"eval_fraction=1e-09 leaves no picture for split=eval"):
        shards(packed / "train", "eval", eval_fraction=1e-9)


def test_the_hash_of_rows_holds_out_the_share_that_is_asked_for():
    random = np.random.default_rng(chosen_seed())
    rows = np.zeros(600_000, dtype=ROW)
    rows["shard"] = random.integers(0, 7, len(rows))
    rows["offset"] = np.cumsum(random.integers(1, 40, len(rows))) * 512
    names = [f"shard-{number:06}.tar" for number in range(7)]
    found = held_out_rows(rows, names, 0.1)
    assert abs(found.mean() - 0.1) < 0.002  # five standard deviations
    assert all(abs(found[rows["shard"] == shard].mean() - 0.1) < 0.006 for shard in range(7))
    assert np.array_equal(held_out_rows(rows[77:], names, 0.1), found[77:])  # a sample's own place decides


def open_tars() -> int:
    found = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(path.suffix == ".tar" for path in found)


def test_files_are_opened_late_few_at_a_time_and_closed(packed, monkeypatch):
    monkeypatch.setattr(shards_module, "_MOST_OPEN", 2)
    source = shards(packed)
    assert open_tars() == 0
    expected = [data for _, data, _ in samples(10)]
    for row in (0, 9, 4, 0, 9, 1):
        assert source.read(row) == expected[row]
        assert 1 <= open_tars() <= 2
    del source
    gc.collect()
    assert open_tars() == 0


def test_threads_may_read_while_files_are_closed(packed, monkeypatch):
    monkeypatch.setattr(shards_module, "_MOST_OPEN", 1)
    source = shards(packed)
    expected = [data for _, data, _ in samples(10)]
    rows = [0, 4, 8] * 200
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(source.read, rows)) == [expected[row] for row in rows]


def test_missing_and_shrunk_shards_are_named(packed):
    source = shards(packed)
    (packed / "train" / "shard-000002.tar").unlink()
    (problem,) = source.missing()
    assert "shard-000002.tar" in problem.file
    assert "No such file" in problem.cause
    with pytest.raises(DataError, match=r"shard-000002.tar cannot be read on .*No such file"):
        source.read(9)
    with (packed / "train" / "shard-000000.tar").open("r+b") as file:
        file.truncate(600)
    with pytest.raises(DataError, match=r"shard-000000.tar has shrunk since it was indexed: .* at byte 512"):
        source.read(0)
    assert [Path(each.file).name for each in source.damaged()] == ["shard-000000.tar", "shard-000002.tar"]


def test_labels_that_training_does_not_know_are_refused(packed):
    build_index(make_shards(packed / "eval", [("x.png", picture(0, 0), 3)]))
    with pytest.raises(DataError, match="labels up to 3, and the training shards only 3 classes"):
        shards(packed, "eval")


def test_classes_in_another_order_are_refused(packed):
    (packed / "train/classes.json").write_text('["ant", "bee", "cat"]')
    (packed / "eval/classes.json").write_text('["ant", "bee"]')  # one without a picture may be left out at the end
    assert shards(packed, "eval").num_classes == 3
    (packed / "eval/classes.json").write_text('["ant", "cat", "bee"]')
    says = r"eval/classes.json and that of .* number the classes differently: 'cat' where training has 'bee'"
    with pytest.raises(DataError, match=says):
        shards(packed, "eval")


def test_the_index_stays_mapped(packed):
    assert isinstance(shards(packed).index.rows.base, np.memmap)
    assert read_index(packed / "train").rows.flags.writeable is False


def test_links_that_lead_in_a_circle_are_not_followed(tmp_path):
    """Each picture counted 40 times, and then came `Too many levels of symbolic links`."""
    make_folder(tmp_path / "plain", train=2, eval=1)
    make_folder(tmp_path / "linked", train=2, eval=1)
    first, second = CLASSES[:2]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "new.png").write_bytes(picture(1, 99))
    (tmp_path / "more" / "back").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "forth").symlink_to(tmp_path / "more")
    (tmp_path / "linked" / "train" / first / "up").symlink_to(tmp_path / "linked" / "train")
    (tmp_path / "linked" / "train" / first / "here").symlink_to(".")
    (tmp_path / "linked" / "train" / first / "self.png").symlink_to("self.png")
    (tmp_path / "linked" / "train" / second / "more").symlink_to(tmp_path / "more")
    expected = relative(folder(tmp_path / "plain"), tmp_path / "plain")
    found = relative(folder(tmp_path / "linked"), tmp_path / "linked")
    assert sorted(found) == sorted([*expected, f"train/{second}/more/new.png"])
