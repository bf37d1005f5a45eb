"""The index finds each picture of each tar by its offset, and says which file is wrong, at which byte."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hpc_trainer.data.images import index as shard_index
from hpc_trainer.data.images.index import ROW, build_index, index_shard, missing_shards, read_index
from hpc_trainer.errors import DataError


def write_tar(path: Path, members, format=tarfile.GNU_FORMAT) -> Path:
    """`members`: (name, bytes) each."""
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key, label=0, picture=b"picture", extension="jpg"):
    return [(f"{key}.{extension}", picture), (f"{key}.cls", str(label).encode())]


def pictures_of(index) -> list[tuple[bytes, int]]:
    found = []
    for row in index.rows:
        data = (index.folder / index.shards[row["shard"]].name).read_bytes()
        found.append((data[row["offset"] : row["offset"] + row["size"]], int(row["label"])))
    return found


def causes(path, num_classes=None):
    return [str(problem) for problem in index_shard(path, num_classes).problems]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_each_sample_is_found_by_its_offset(tmp_path, format):
    long_key = "/".join(["folder" * 5] * 4) if format == tarfile.USTAR_FORMAT else "long" * 60
    first = [
        *sample("a", 2, b"one" * 400),
        *sample(long_key, 0, b"two", "PNG"),
        ("b.json", b"{}"),
        *sample("b", 1, b"3", "webp"),
    ]
    write_tar(tmp_path / "shard-000000.tar", first, format)
    # The label may come first, and other members of the key between the two.
    write_tar(
        tmp_path / "shard-000001.tar",
        [("x/c.cls", b" 1\n"), ("x/c.json", b"{}"), ("x/c.jpeg", b"4" * 513), ("README", b"")],
    )
    built = build_index(tmp_path)
    assert pictures_of(built) == [(b"one" * 400, 2), (b"two", 0), (b"3", 1), (b"4" * 513, 1)]
    assert (built.num_classes, [shard.num_samples for shard in built.shards]) == (3, [3, 1])
    again = read_index(tmp_path)
    assert pictures_of(again) == pictures_of(built)
    assert again.digest == built.digest
    assert again.rows.dtype == ROW
    assert isinstance(again.rows.base, np.memmap)
    assert [*missing_shards(again), *shard_index.damaged_shards(again)] == []


def test_of_two_samples_with_one_key_in_two_folders_each_is_its_own(tmp_path):
    write_tar(tmp_path / "s.tar", [*sample("cat/1", 0, b"a"), *sample("dog/1", 1, b"b")])
    assert pictures_of(build_index(tmp_path)) == [(b"a", 0), (b"b", 1)]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"x"), *sample("b")], r"s.tar at byte 512: a.jpg has no label"),
        ([*sample("a"), ("b.cls", b"1")], r"s.tar at byte 2560: b.cls has no picture: no jpg, jpeg, png or webp"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], r"s.tar at byte 1536: a.cls must hold a whole number .* holds 'cat'"),
        (sample("a", -1), r"s.tar at byte 1536: a.cls holds the label -1; it must be .* 0 to 9"),
        (sample("a", 10), r"s.tar at byte 1536: a.cls holds the label 10; it must be .* 0 to 9"),
        ([("a.jpg", b"x"), ("a.png", b"x"), ("a.cls", b"1")], r"s.tar at byte 1536: a.jpg and a.png have one label"),
        ([("a.jpg", b"x"), ("a.jpg", b"y"), ("a.cls", b"1")], r"s.tar at byte 1024: a.jpg is in it twice"),
        (sample("a", 1, b""), r"s.tar at byte 512: a.jpg has 0 bytes"),
    ],
)
def test_a_sample_that_is_not_whole_is_named_with_file_and_byte(tmp_path, members, message):
    (tmp_path / "classes.json").write_text(json.dumps([f"class {number}" for number in range(10)]))
    path = write_tar(tmp_path / "s.tar", members)
    (cause,) = causes(path, 10)
    assert re.search(message, cause)
    with pytest.raises(DataError, match=re.escape(cause)):
        build_index(tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_a_tar_that_is_cut_anywhere_is_never_indexed(tmp_path):
    path = write_tar(tmp_path / "s.tar", [*sample("a", 0, b"x" * 700), *sample("b", 1, b"y" * 100)])
    whole = path.read_bytes()
    end = 512 + 1024 + 512 + 512 + 512 + 512 + 512 + 512  # of the last member: then come empty blocks
    for size in [0, 1, 511, 512, 700, 1024, 1536, 2048, 2560, 3072, 3584, end - 1, end, end + 511]:
        path.write_bytes(whole[:size])
        assert causes(path), size
    path.write_bytes(whole[: end + 512])
    assert causes(path) == []


def test_a_header_of_garbage_is_not_taken_for_the_end(tmp_path):
    path = write_tar(tmp_path / "s.tar", [*sample("a"), *sample("b"), *sample("c")])
    data = bytearray(path.read_bytes())
    data[2048:2560] = b"\xff" * 512
    path.write_bytes(data)
    assert any("at byte 2048: there is no tar header" in cause for cause in causes(path))
    path.write_bytes(gzip.compress(data))
    assert "not a whole, plain tar" in causes(path)[0]


def test_folders_without_shards_or_index_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"gone must be a folder .* No such file or directory \(on .*Fix:"):
        read_index(tmp_path / "gone")
    with pytest.raises(DataError, match=r"holds no \*.tar.*Fix: .*data prepare"):
        read_index(tmp_path)
    write_tar(tmp_path / "s.tar", sample("a"))
    with pytest.raises(DataError, match=r"no index.json.*Fix: .*hpc-trainer data index"):
        read_index(tmp_path)
    build_index(tmp_path)
    (tmp_path / "empty").mkdir()
    write_tar(tmp_path / "empty" / "s.tar", [])
    with pytest.raises(DataError, match="hold no sample"):
        build_index(tmp_path / "empty")


def _edit(folder: Path, **changes) -> None:
    about = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**about, **changes}))


def test_a_damaged_index_is_refused(tmp_path):
    write_tar(tmp_path / "s.tar", [*sample("a"), *sample("b")])
    build_index(tmp_path)
    rows, about = (tmp_path / "index.npy").read_bytes(), (tmp_path / "index.json").read_text()
    shard = json.loads(about)["shards"][0]
    for changes, message in [
        ({"version": 2}, "has version 2"),
        ({"num_samples": 3}, "damaged"),
        ({"num_samples": None}, "damaged"),
        ({"shards": [{**shard, "name": "../s.tar"}]}, "damaged"),
        ({"shards": [{"name": "s.tar"}]}, "damaged"),
    ]:
        _edit(tmp_path, **changes)
        with pytest.raises(DataError, match=message):
            read_index(tmp_path)
        (tmp_path / "index.json").write_text(about)
    (tmp_path / "index.npy").write_bytes(rows[:-1])
    with pytest.raises(DataError, match="damaged"):
        read_index(tmp_path)
    np.save(tmp_path / "index.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="damaged"):  # a pickle is never loaded
        read_index(tmp_path)
    (tmp_path / "index.npy").write_bytes(rows[:-1] + bytes([rows[-1] ^ 1]))
    assert [Path(each.file).name for each in shard_index.damaged_shards(read_index(tmp_path))] == ["index.npy"]


def test_missing_and_changed_shards_are_named(tmp_path):
    for name in "abc":
        write_tar(tmp_path / f"{name}.tar", sample(name))
    index = build_index(tmp_path)
    (tmp_path / "a.tar").unlink()
    with (tmp_path / "b.tar").open("ab") as file:
        file.write(b"more")
    data = bytearray((tmp_path / "c.tar").read_bytes())
    data[512] ^= 1
    (tmp_path / "c.tar").write_bytes(data)
    assert [Path(each.file).name for each in missing_shards(index)] == ["a.tar", "b.tar"]
    assert [Path(each.file).name for each in shard_index.damaged_shards(index)] == ["a.tar", "b.tar", "c.tar"]
    (tmp_path / "a.tar").mkdir()  # what was a file is something else
    assert "bytes on" in str(next(missing_shards(index)))


def test_a_new_index_that_is_killed_halfway_leaves_none(tmp_path, monkeypatch):
    write_tar(tmp_path / "a.tar", sample("a"))
    build_index(tmp_path)
    write_tar(tmp_path / "a.tar", sample("a", 0, b"x" * 700))

    def killed(*args, **others):
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_index, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path)
    with pytest.raises(DataError, match=r"no index.json"):
        read_index(tmp_path)
    monkeypatch.undo()
    assert pictures_of(build_index(tmp_path)) == [(b"x" * 700, 0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "index.json", "index.npy"]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read"), ("{}", "list of class names"), ('["a","a"]', "twice")]
)
def test_class_names_are_a_list_of_distinct_names(tmp_path, text, message):
    write_tar(tmp_path / "a.tar", sample("a"))
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(DataError, match=message):
        build_index(tmp_path)


TEN_MILLION = """
import resource, sys, time
from pathlib import Path
from hpc_trainer.data.images.index import read_index
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
index = read_index(Path(sys.argv[1]))
seconds = time.process_time() - begin
assert len(index.rows) == 10**7 and int(index.rows[9_999_999]["offset"]) == 9_999_999
assert "torch" not in sys.modules
print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_ten_million_samples_are_opened_without_being_read(tmp_path):
    # What is not written is zeros, and takes no room.
    rows = np.lib.format.open_memmap(tmp_path / "index.npy", mode="w+", dtype=ROW, shape=(10**7,))
    rows[-1] = (0, 9_999_999, 1, 0)
    rows.flush()
    shards = [{"name": f"{n}.tar", "size": 1, "sha256": "", "num_samples": 10**4} for n in range(1000)]
    about = {"version": 1, "num_samples": 10**7, "num_classes": 1, "rows_sha256": "", "shards": shards}
    (tmp_path / "index.json").write_text(json.dumps(about))
    done = subprocess.run([sys.executable, "-c", TEN_MILLION, tmp_path], capture_output=True, text=True, check=True)
    seconds, mebibytes = map(float, done.stdout.split())
    assert seconds < 2
    assert mebibytes < 50
