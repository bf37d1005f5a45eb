"""A sweep as one file and back; and archives of strangers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.run_verbs import status_json
from hpc_trainer.errors import ConfigError, HpcTrainerError, RunStateError
from hpc_trainer.operate.results import result_table
from hpc_trainer.operate.why import explain
from hpc_trainer.record.files import append_lines
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.tidy.archive import MANIFEST, pack, unpack
from hpc_trainer.tidy.cleaning import remove_sweep
from hpc_trainer.tidy.labels import at_rest, change_tags, read_labels
from tests.unit.record.builders import make_specs
from tests.unit.record.sweeps import SweepOnDisk
from tests.unit.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path, fake_slurm: FakeSlurm) -> SweepOnDisk:
    """Four runs: complete with three checkpoints, failed, cancelled before it began by scancel, complete."""
    specs = make_specs(4, "cluster=slurm", checkpoint__keep_best="eval_loss")
    sweep = SweepOnDisk(tmp_path / "runs" / "mine", specs)
    sweep.submit()
    for index in (0, 1, 3):
        sweep.start(index)
    sweep.done(0, eval_loss=0.7)
    append_lines(sweep.run(0).metrics, [{"step": step, "eval_loss": step / 100} for step in (10, 20, 30)])
    for step in (10, 20, 30):
        folder = sweep.run(0).checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        _write_checkpoint(folder)
    sweep.end(1, state=RunState.FAILED, cause="exception", error={"type": "ValueError", "message": "no"})
    sweep.done(3, eval_loss=0.6)
    for index in (0, 3):  # else their time goes on
        sweep.end(index, state=RunState.COMPLETED, cause="done")
    (sweep.run(3).logs / "attempt-000.rank-0.log").write_text("hello\n")
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", "500_2|CANCELLED by 0|0:0|n1\n")
    return sweep


def _write_checkpoint(folder: Path) -> None:
    import zlib

    (folder / "state.safetensors").write_bytes(b"x" * 100)
    record = {"name": "state.safetensors", "size": 100, "crc32": zlib.crc32(b"x" * 100)}
    body = json.dumps({"files": [record]}).encode()[:-1]
    (folder / "manifest.json").write_bytes(body + f',"checksum":"{zlib.crc32(body):08x}"}}\n'.encode())


def _pack(sweep: SweepPaths, file: Path, **options: bool) -> Any:
    with at_rest(sweep, "archive") as status:
        return pack(status, file, **options)


@pytest.mark.parametrize("ending", [".tar.gz", pytest.param(".txz", marks=pytest.mark.long)])
def test_all_verbs_work_after_archive_rm_and_unarchive(
    sweep: SweepOnDisk, tmp_path: Path, ending: str, fake_slurm: FakeSlurm
) -> None:
    change_tags(sweep.paths, ["kept"])
    before = read_status(sweep.paths)
    seen = status_json(before), result_table(before).rows, [explain(before, run).verdict for run in before.runs]
    file = tmp_path / f"mine{ending}"
    done = _pack(sweep.paths, file)
    assert done.num_files > 10
    remove_sweep(sweep.paths)
    fake_slurm.answer("sacct", "")  # the accounting has forgotten
    back = unpack(file, tmp_path / "runs")
    assert back.num_files == done.num_files
    after = read_status(SweepPaths(back.place))
    states = [run.state.value for run in after.runs]
    assert states == ["COMPLETED", "FAILED", "CANCELLED", "COMPLETED"]
    again = status_json(after), result_table(after).rows, [explain(after, run).verdict for run in after.runs]
    assert again == seen
    assert read_labels(SweepPaths(back.place)).tags == ("kept",)
    kept = sorted(path.name for path in SweepPaths(back.place).run(sweep.specs[0].run_id).checkpoints.iterdir())
    assert kept == ["step-00000010", "step-00000030"], "the best and the newest"
    assert not list((tmp_path / "runs").glob(".trash*"))
    for path in back.place.rglob("*"):
        assert not path.is_symlink()
        assert path.stat().st_uid == os.getuid()
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path


def test_another_name_and_one_that_is_taken(sweep: SweepOnDisk, tmp_path: Path) -> None:
    file = tmp_path / "mine.tar"
    _pack(sweep.paths, file, every_checkpoint=True)
    with pytest.raises(RunStateError, match=r"exists already\. Give the sweep another name: --name mine-2"):
        unpack(file, tmp_path / "runs")
    back = unpack(file, tmp_path / "runs", "copy")
    assert read_status(SweepPaths(back.place)).counts == read_status(sweep.paths).counts
    assert len(list(SweepPaths(back.place).run(sweep.specs[0].run_id).checkpoints.iterdir())) == 3
    with pytest.raises(ConfigError, match="the sweep's name"):
        unpack(file, tmp_path / "runs", "../x")


def test_where_no_archive_goes(sweep: SweepOnDisk, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    (tmp_path / "there.tar").write_text("mine")
    for file, why in (
        (tmp_path / "x.zip", "the ending of an archive is"), (tmp_path / ".tar", "the ending"),
        (tmp_path / "there.tar", "exists already"), (tmp_path / "no" / "x.tar", "there is no folder"),
        (sweep.paths.folder / "x.tar", "would be inside the sweep"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            _pack(sweep.paths, file)
    assert (tmp_path / "there.tar").read_text() == "mine"
    sweep.submit("501")
    fake_slurm.answer("squeue", "501_1|RUNNING|n1|None|x\n")
    with pytest.raises(RunStateError, match="archive is refused"):
        _pack(sweep.paths, tmp_path / "y.tar")
    assert not (tmp_path / "y.tar").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_links_are_left_out_and_named(sweep: SweepOnDisk, tmp_path: Path) -> None:
    (sweep.run(3).folder / "link").symlink_to("/etc/passwd")
    done = _pack(sweep.paths, tmp_path / "x.tar")
    assert done.left_out == (f"{sweep.specs[3].run_id}/link",)


def test_files_of_a_program_are_kept_whatever_their_names_are(sweep: SweepOnDisk, tmp_path: Path) -> None:
    """Names of our locks and temporary files were left out there too, without a word: then came `rm`."""
    names = {
        "uv.lock", ".cache.tmp", "weights.old-1", "step-00000010.tmp-7", "deep/er/.trash-can/x", "output/x.lock",
        "walk.json", "MANIFEST.json",
    }  # fmt: skip
    for name in names:
        path = sweep.run(3).output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    done = _pack(sweep.paths, tmp_path / "x.tar")
    assert done.left_out == ()
    unpack(tmp_path / "x.tar", tmp_path / "elsewhere")
    output = RunPaths(tmp_path / "elsewhere" / "mine" / sweep.specs[3].run_id).output
    assert {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()} == names


# Archives of strangers.

Member = tuple[tarfile.TarInfo, bytes]


def _member(name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "") -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, len(data) if kind == tarfile.REGTYPE else 0
    member.mode, member.uid, member.gid = 0o6777, 0, 0
    return member, data


def _archive(path: Path, *members: Member, listed: list[dict[str, Any]] | None = None, own: str = "mine") -> Path:
    files = [
        {"name": member.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for member, data in members
        if member.isreg()
    ]
    manifest = json.dumps({"format": 1, "files": files if listed is None else listed}).encode()
    with tarfile.open(path, "w") as tar:
        for member, data in (*members, _member(f"{own}/{MANIFEST}", manifest)):
            tar.addfile(member, io.BytesIO(data) if member.isreg() else None)
    return path


_GOOD = _member("mine/specs.jsonl", b"")


@pytest.mark.parametrize(
    "bad",
    [
        _member("/etc/evil"), _member("../evil"), _member("mine/../../evil"), _member("mine//evil"),
        _member("mine/./x"),
        _member("mine/a\nb"), _member("mine/x\x1b[2J"), _member("mine/" + "a" * 5000), _member("other/x"), _GOOD,
        _member("mine/link", kind=tarfile.SYMTYPE, link="/etc"), _member("mine/hard", kind=tarfile.LNKTYPE, link="x"),
        _member("mine/pipe", kind=tarfile.FIFOTYPE), _member("mine/disk", kind=tarfile.BLKTYPE),
        _member("mine/tty", kind=tarfile.CHRTYPE), _member("mine", kind=tarfile.SYMTYPE, link="/tmp"),
        _member("mine/sparse", kind=tarfile.GNUTYPE_SPARSE),
    ],
    ids=lambda member: repr(member[0].name[:20]),
)  # fmt: skip
def test_nothing_leads_elsewhere(bad: Member, tmp_path: Path) -> None:
    file = _archive(tmp_path / "x.tar", _GOOD, bad)
    runs = tmp_path / "deep" / "runs"
    with pytest.raises(RunStateError):
        unpack(file, runs)
    assert list(runs.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "x.tar"]


@pytest.mark.parametrize("own", ["..", ".", "a b", "-x", ".trash-x"])
def test_no_odd_name_of_a_sweep(own: str, tmp_path: Path) -> None:
    file = _archive(tmp_path / "x.tar", _member(f"{own}/specs.jsonl"), own=own)
    with pytest.raises(HpcTrainerError):
        unpack(file, tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def _damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"hello")] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        _damaged,
        lambda path: path.write_bytes(path.read_bytes()[:2000]),
        lambda path: path.write_bytes(b"no tar at all"),
        lambda path: path.write_bytes(b""),
    ],
    ids=["a byte", "cut", "text", "empty"],
)
def test_a_damaged_archive_unpacks_nothing(
    damage: Callable[[Path], object], sweep: SweepOnDisk, tmp_path: Path
) -> None:
    file = tmp_path / "x.tar"
    _pack(sweep.paths, file)
    damage(file)
    with pytest.raises(RunStateError, match=r"x\.tar"):
        unpack(file, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_files_that_are_not_listed_and_listed_ones_that_are_missing(tmp_path: Path) -> None:
    extra = _archive(tmp_path / "x.tar", _GOOD, _member("mine/more"), listed=[])
    with pytest.raises(RunStateError, match="is not listed"):
        unpack(extra, tmp_path / "runs")
    missing = _archive(tmp_path / "y.tar", listed=[{"name": "mine/x", "size": 1, "sha256": "0"}])
    with pytest.raises(RunStateError, match="is missing"):
        unpack(missing, tmp_path / "runs")
    none = _archive(tmp_path / "z.tar", _member("mine/readme"))
    with pytest.raises(RunStateError, match="holds no sweep"):
        unpack(none, tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"format": 2}', b'{"format": 1, "files": [3]}', b"[" * 100_000])
def test_an_odd_list_of_files(content: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for member, data in (_GOOD, _member(f"mine/{MANIFEST}", content)):
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(RunStateError):
        unpack(tmp_path / "x.tar", tmp_path / "runs")


def test_more_than_the_disk_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    file = _archive(tmp_path / "x.tar", _GOOD, _member("mine/big", b"x" * 1000))
    with pytest.raises(RunStateError, match="more than the room"):
        unpack(file, tmp_path / "runs")
