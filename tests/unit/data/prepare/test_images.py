"""data prepare images: what is in the folder, what is refused, and that any way to make it makes the same bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpc_trainer.data.images import ImageFolderConfig
from hpc_trainer.data.images.folder import FolderSource
from hpc_trainer.data.images.index import damaged_shards, index_shard, read_index
from hpc_trainer.data.prepare import images, job
from hpc_trainer.data.prepare import images as image_shards
from hpc_trainer.data.prepare.images import ImageOptions, prepare_images
from hpc_trainer.data.prepare.job import Prepared, Settings
from hpc_trainer.errors import ConfigError, DataError, RunStateError
from hpc_trainer.record.reading import read_json
from tests.unit.data.prepare.raw_data import content, picture, raw_pictures, samples


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_SMALLEST_MIB", 0.004)  # some 6 pieces of 30 pictures


def _prepare(source: Path, folder: Path, *, settings: Settings | None = None, **options: Any) -> Prepared:
    given = ImageOptions(**{"size": 16, "eval_fraction": 0.3, **options})
    return prepare_images(source, folder, given, settings or Settings(), lambda *_: None)


def test_the_folder_holds_each_picture_once_resized_with_its_label(tmp_path: Path) -> None:
    raw = raw_pictures(tmp_path / "raw")
    told: list[tuple[int, int]] = []
    options = ImageOptions(size=16, eval_fraction=0.3, format="png")
    done = prepare_images(raw, tmp_path / "out", options, Settings(), lambda *each: told.append(each))
    assert done.is_whole
    assert done.num_made == done.num_pieces > 3
    assert told[0] == (0, 30)
    assert told[-1] == (30, 30)
    assert done.overrides == ("data=image_shards", f"data.path={tmp_path / 'out'}", "data.image_size=14")
    pixels, names = [], []
    for part in ("train", "eval"):
        folder = tmp_path / "out" / part
        found = samples(folder)
        names += [name for name, _, _ in found]
        assert len(found) == done.counts[part]["samples"]
        assert {image.size for _, image, _ in found} == {(16, 21)}
        assert all(name.startswith(("cat/", "dog/")[label]) for name, _, label in found)
        pixels += [np.asarray(image).reshape(-1, 3) / 255 for _, image, _ in found] if part == "train" else []
        index = read_index(folder)
        assert list(damaged_shards(index)) == []
        rows = [index_shard(folder / shard.name, 2).rows[["offset", "size", "label"]] for shard in index.shards]
        assert np.array_equal(np.concatenate(rows), index.rows[["offset", "size", "label"]])
        assert json.loads((folder / "classes.json").read_text()) == ["cat", "dog"]
    assert sorted(name.partition("-")[0] for name in names) == sorted(
        f"{('cat', 'dog')[index % 2]}/{index:03d}" for index in range(30)
    )
    told_of = json.loads((tmp_path / "out" / "statistics.json").read_text())
    values = np.concatenate(pixels)
    assert told_of["count"] == done.counts["train"]["samples"]
    np.testing.assert_allclose(told_of["mean"], values.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(told_of["std"], values.std(axis=0), rtol=1e-9)


def test_a_second_call_makes_nothing_and_a_missing_shard_is_made_again(tmp_path: Path) -> None:
    raw, out = raw_pictures(tmp_path / "raw"), tmp_path / "out"
    first = _prepare(raw, out)
    before = content(out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    again = _prepare(raw, out)
    assert (again.num_made, again.counts) == (0, first.counts)
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    (out / "train" / "shard-000001.tar").unlink()
    assert _prepare(raw, out).num_made == 1
    assert content(out) == before


def test_parts_and_processes_make_the_same_bytes(tmp_path: Path) -> None:
    raw = raw_pictures(tmp_path / "raw")
    _prepare(raw, tmp_path / "whole")
    for index in (2, 3, 1):
        done = _prepare(raw, tmp_path / "parts", settings=Settings(part=(index, 3)))
        assert done.is_whole == (index == 1), "the last one finishes"
        if not done.is_whole:
            assert done.num_missing > 0
            with pytest.raises(DataError):
                read_index(tmp_path / "parts" / "train")
    done = _prepare(raw, tmp_path / "two", settings=Settings(num_workers=2))
    assert done.num_made == done.num_pieces
    assert content(tmp_path / "whole") == content(tmp_path / "parts") == content(tmp_path / "two")


def test_a_picture_stays_in_its_part_when_others_come(tmp_path: Path) -> None:
    def parts_of(folder: Path) -> dict[str, str]:
        return {name: part for part in ("train", "eval") for name, _, _ in samples(folder / part)}

    _prepare(raw_pictures(tmp_path / "few", num=20), tmp_path / "a")
    _prepare(raw_pictures(tmp_path / "many", num=60), tmp_path / "b")
    few, many = parts_of(tmp_path / "a"), parts_of(tmp_path / "b")
    assert len(many) == 60
    assert few == {name: many[name] for name in few}
    assert set(few.values()) == {"train", "eval"}


def test_the_same_pictures_are_held_out_as_of_the_raw_folder(tmp_path: Path) -> None:
    raw = raw_pictures(tmp_path / "raw")
    _prepare(raw, tmp_path / "out")
    source = FolderSource(ImageFolderConfig(path=str(raw), eval_fraction=0.3), "eval")
    held_out = {str(Path(source.place(row)[0]).relative_to(raw).with_suffix("")) for row in range(len(source))}
    assert held_out == {name.partition("-")[0] for name, _, _ in samples(tmp_path / "out" / "eval")}


def test_a_source_that_is_split_already_keeps_its_parts(tmp_path: Path) -> None:
    raw_pictures(tmp_path / "raw" / "train", num=8)
    raw_pictures(tmp_path / "raw" / "val", num=4)
    done = _prepare(tmp_path / "raw", tmp_path / "out")
    assert {part: counts["samples"] for part, counts in done.counts.items()} == {"train": 8, "eval": 4}


def test_other_options_and_another_input_are_refused_and_named(tmp_path: Path) -> None:
    raw, out = raw_pictures(tmp_path / "raw"), tmp_path / "out"
    _prepare(raw, out)
    before = content(out)
    says = "was begun with other options: --size was 16, is 20; --format was jpg, is png. Add --fresh"
    with pytest.raises(ConfigError, match=says):
        _prepare(raw, out, size=20, format="png")
    moved = raw_pictures(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"the source was .*raw, is .*elsewhere"):
        _prepare(moved, out)
    picture(99, (40, 40)).save(raw / "cat" / "000.jpg")
    with pytest.raises(ConfigError, match=r"cat/000.jpg was changed since"):
        _prepare(raw, out)
    picture(99).save(raw / "cat" / "new.jpg")
    with pytest.raises(ConfigError, match="had 30 files, and has 31 now"):
        _prepare(raw, out)
    assert content(out) == before
    done = _prepare(raw, out, settings=Settings(fresh=True))
    assert sum(counts["samples"] for counts in done.counts.values()) == 31


def test_a_part_that_begins_after_this_one_has_looked_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a folder shared by NFS a part saw no prepare.json, and then the file and the folders of the first part."""
    raw, out = raw_pictures(tmp_path / "raw"), tmp_path / "out"
    _prepare(raw, out)
    before, looks = content(out), []

    def look(path: Path) -> Any:
        looks.append(path.name)
        return None if looks == [job.ABOUT] else read_json(path)

    monkeypatch.setattr(job, "read_json", look)
    _prepare(raw, out)
    assert looks.count(job.ABOUT) == 2
    assert content(out) == before


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    raw, out = raw_pictures(tmp_path / "raw"), tmp_path / "out"
    (out / "train").mkdir(parents=True)
    (out / "train" / "precious").write_text("x")
    for settings in (Settings(), Settings(fresh=True)):
        with pytest.raises(ConfigError, match=r"it holds train and no prepare.json"):
            _prepare(raw, out, settings=settings)
    assert content(out) == {"train/precious": hashlib.sha256(b"x").hexdigest()}
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="must be a folder"):
        _prepare(raw, tmp_path / "file")


def test_broken_pictures_are_listed_and_refused_or_left_out(tmp_path: Path) -> None:
    raw, out = raw_pictures(tmp_path / "raw"), tmp_path / "out"
    whole = (raw / "cat" / "000.jpg").read_bytes()
    (raw / "cat" / "000.jpg").write_bytes(whole[:-60])
    (raw / "dog" / "001.jpg").write_text("<html>404</html>")
    (raw / "dog" / "003.jpg").write_bytes(b"")
    with pytest.raises(RunStateError, match=r"3 of 30 pictures cannot be read; .*broken.txt lists.*--on-broken skip"):
        _prepare(raw, out)
    listed = dict(line.split(": ", 1) for line in (out / "broken.txt").read_text().splitlines())
    assert listed.keys() == {"cat/000.jpg", "dog/001.jpg", "dog/003.jpg"}
    assert "truncated" in listed["cat/000.jpg"].lower()
    with pytest.raises(DataError):
        read_index(out / "train")
    done = _prepare(raw, out, settings=Settings(skip_broken=True))
    assert (done.num_made, done.num_broken) == (0, 3), "what is made already stays"
    assert sum(counts["samples"] for counts in done.counts.values()) == 27


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA", "P", "1", "LA"])
def test_pictures_of_any_mode_become_rgb(tmp_path: Path, mode: str) -> None:
    raw = raw_pictures(tmp_path / "raw", num=20)
    original = picture(1, (40, 30), "CMYK") if mode == "CMYK" else picture(1, (40, 30)).convert(mode)
    original.save(raw / "cat" / f"odd.{'jpg' if mode == 'CMYK' else 'png'}")
    _prepare(raw, tmp_path / "out", format="png")
    ((_, image, _),) = [
        each for part in ("train", "eval") for each in samples(tmp_path / "out" / part) if "odd" in each[0]
    ]
    assert (image.mode, image.size) == ("RGB", (21, 16))
    plain = original.convert("RGB").resize((21, 16), Image.Resampling.BOX)
    assert np.abs(np.asarray(image, dtype=float) - np.asarray(plain)).mean() < 40


def test_what_is_as_it_should_be_keeps_its_bytes_and_turned_pictures_are_turned(tmp_path: Path) -> None:
    raw = raw_pictures(tmp_path / "raw", num=20)
    picture(1, (16, 12)).save(raw / "cat" / "small.jpg", quality=40)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    picture(2, (40, 30)).save(raw / "cat" / "turned.jpg", exif=exif)
    _prepare(raw, tmp_path / "out")
    found = {
        name.partition("-")[0]: image
        for part in ("train", "eval")
        for name, image, _ in samples(tmp_path / "out" / part)
    }
    tars = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*.tar"))
    assert (raw / "cat" / "small.jpg").read_bytes() in tars
    assert found["cat/turned"].size == (16, 21)
    assert not found["cat/turned"].getexif()


def test_bad_input_is_refused_with_file_and_fix(tmp_path: Path) -> None:
    raw = raw_pictures(tmp_path / "raw")
    out = tmp_path / "out"
    for change, match in (
        ({"size": 4}, "--size=4 must be 8 to 8192. Use 8."),
        ({"format": "bmp"}, "--format=bmp: use jpg, png, webp."),
        ({"format": "png", "quality": 80}, "--quality=80 has no effect"),
        ({"eval_fraction": 1.0}, "--eval-fraction=1 must be between"),
        ({"eval_fraction": 1e-6}, "eval has none of the 30 pictures"),
    ):
        with pytest.raises(ConfigError, match=match):
            _prepare(raw, out, **change)
    with pytest.raises(ConfigError, match="must be a folder with a folder of pictures"):
        _prepare(tmp_path / "none", out)
    for inside in (raw, raw / "prepared", raw.parent / "x" / ".." / "raw" / "cat" / "prepared"):
        with pytest.raises(ConfigError, match=r"is inside .*raw, which is an input"):
            _prepare(raw, inside)
    (raw / "bird").mkdir()
    with pytest.raises(ConfigError, match=r"bird has no picture"):
        _prepare(raw, out)
    shutil.rmtree(raw / "cat")
    (raw / "dog").rename(raw.parent / "gone")
    (raw / "empty").mkdir()
    with pytest.raises(ConfigError, match="its folders have none"):
        _prepare(raw, out)
    assert not out.exists(), "nothing was written"


def test_names_of_any_kind_are_packed(tmp_path: Path) -> None:
    raw = raw_pictures(tmp_path / "raw", num=20)
    odd = ["a.b.jpg", "a.c.jpg", "with space.jpg", "ümläut.jpg", "x" * 120 + ".jpg", os.fsdecode(b"\xff\xfe.jpg")]
    for index, name in enumerate(odd):
        picture(50 + index).save(raw / "cat" / name)
    done = _prepare(raw, tmp_path / "out", settings=Settings(num_workers=2))
    names = [name for part in ("train", "eval") for name, _, _ in samples(tmp_path / "out" / part)]
    assert len(names) == len(set(names)) == 26 == sum(counts["samples"] for counts in done.counts.values())
    assert all(name.isascii() and name.count(".") == 1 for name in names)


def test_what_is_no_picture_file_is_told_and_holds_nothing_up(tmp_path: Path) -> None:
    raw = raw_pictures(tmp_path / "raw")
    os.mkfifo(raw / "cat" / "pipe.jpg")
    (raw / "cat" / "nowhere.jpg").symlink_to("/no/such")
    (raw / "cat" / "loop.jpg").symlink_to("loop.jpg")
    (raw / "cat" / "again").symlink_to(raw / "cat")
    (raw / "dog" / "up").symlink_to(raw / "dog", target_is_directory=True)
    with (raw / "dog" / "sparse.png").open("wb") as file:
        file.truncate(60 << 30)
    done = _prepare(raw, tmp_path / "out", settings=Settings(skip_broken=True))
    assert done.is_whole
    assert (done.num_broken, sum(done.counts[part]["samples"] for part in ("train", "eval"))) == (4, 30)
    told = (tmp_path / "out" / "broken.txt").read_text()
    for name, why in (("pipe.jpg", "it is a pipe, not a file"), ("nowhere.jpg", "No such file"),
                      ("loop.jpg", "Too many levels"), ("sparse.png", "it has 64,424,509,440 bytes")):  # fmt: skip
        assert any(name in line and why in line for line in told.splitlines()), told


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_pictures(tmp_path / "raw")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(image_shards, "_add", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*out/.*shard-.*'"):
        _prepare(raw, tmp_path / "out")
