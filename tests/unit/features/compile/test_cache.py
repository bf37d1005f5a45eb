"""The archive of the compile cache: whole or not there, ours or not used, and in nobody's way when a disk is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_trainer.errors import UntrustedFileError
from hpc_trainer.features.compile.compile import CompileCache, cache_key, open_cache, read_archive, write_archive
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_group import RankGroup
from tests.unit.record.builders import make_config

_FACTS: dict[str, Any] = {"code": {"hpc_trainer": "1f"}, "versions": {"torch": "2.8"}, "device": {}, "world_size": 1}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "compile_cache" / "0123456789abcdef.0.cache"


def _compiled(archive: Path, **files: str) -> CompileCache:
    """A cache after a first step that has compiled these files."""
    cache = CompileCache(archive, writes=True)
    for name, text in files.items():
        (cache.folder / "ab").mkdir(exist_ok=True)
        (cache.folder / "ab" / name).write_text(text)
    return cache


def test_a_first_run_fills_it_and_a_second_reads_it(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _compiled(archive, kernel="code", other="more")
    (first.folder / "locks").mkdir()
    (first.folder / "locks" / "a.lock").touch()
    assert not first.load()
    first.save_once()
    first.close()
    assert not first.folder.exists()
    second = CompileCache(archive, writes=True)
    assert second.load()
    assert sorted(path.name for path in second.folder.rglob("*") if path.is_file()) == ["kernel", "other"]
    before = archive.stat().st_mtime_ns
    second.save_once()
    second.close()
    assert archive.stat().st_mtime_ns == before, "nothing new: nothing is written"
    assert [path.name for path in archive.parent.iterdir()] == [archive.name], "no temporary file is left"
    assert "2 files of the sweep's cache" in capsys.readouterr().out


def test_folders_and_environment_are_this_rank_s_and_gone_at_the_end(
    archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cache = CompileCache(archive, writes=False)
    assert cache.folder.parent == tmp_path
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == cache.folder
    assert Path(os.environ["TRITON_CACHE_DIR"]) == cache.folder / "triton"
    cache.close()
    cache.close()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert not cache.folder.exists()


def test_a_folder_that_a_person_names_is_left_to_them(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(
        group=RankGroup(), is_rank_zero=True, contract=SimpleNamespace(facts=_FACTS),
        paths=RunPaths(archive.parent.parent / "run"), env=SimpleNamespace(local_rank=2, node_rank=1),
    )  # fmt: skip
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/mine")
    assert open_cache(make_config(), run) is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_me")  # torch's own doing
    cache = open_cache(make_config(), run)
    assert cache is not None
    assert (cache.archive.parent, cache.archive.suffixes, cache.writes) == (archive.parent, [".2", ".cache"], False)
    cache.close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/torchinductor_me"


def test_only_one_rank_of_an_archive_writes(archive: Path) -> None:
    cache = _compiled(archive, kernel="code")
    cache.writes = False
    cache.save_once()
    cache.close()
    assert not archive.exists()


@pytest.mark.parametrize("mode", [0o602, 0o620])
def test_what_others_may_write_is_not_used(archive: Path, mode: int, capsys: pytest.CaptureFixture[str]) -> None:
    cache = _compiled(archive, kernel="code")
    cache.save_once()
    archive.chmod(mode)
    with pytest.raises(UntrustedFileError):
        read_archive(archive)
    assert not cache.load(), "the run compiles by itself"
    assert "WARNING: the compile cache is not used" in capsys.readouterr().out
    archive.chmod(0o600)
    archive.parent.chmod(0o777)
    with pytest.raises(UntrustedFileError):
        read_archive(archive)
    with pytest.raises(UntrustedFileError):
        write_archive(archive, {})
    archive.parent.chmod(0o700)
    target = archive.rename(archive.with_name("elsewhere"))
    archive.symlink_to(target)
    with pytest.raises(UntrustedFileError):
        read_archive(archive)
    cache.close()


def test_every_flipped_byte_and_every_cut_is_found(archive: Path) -> None:
    cache = _compiled(archive, kernel="code")
    cache.save_once()
    cache.close()
    whole = archive.read_bytes()
    assert read_archive(archive) is not None
    for place in range(0, len(whole), 7):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read_archive(archive) is None, place
        archive.write_bytes(whole[:place])
        assert read_archive(archive) is None, place
    archive.write_bytes(whole)
    assert read_archive(archive) is not None


def test_a_full_disk_is_a_warning(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = _compiled(archive, kernel="code")
    monkeypatch.setattr("hpc_trainer.features.compile.compile.os.fsync", full)
    cache.save_once()
    cache.close()
    assert "WARNING: the compile cache was not saved" in capsys.readouterr().out
    assert list(archive.parent.iterdir()) == []


def test_runs_that_differ_in_what_no_graph_sees_share_it() -> None:
    key = cache_key(make_config(), _FACTS)
    assert key == cache_key(make_config(seed=5, optim__lr=0.5, train__num_steps=77, hardware__partition="big"), _FACTS)
    others = [
        cache_key(make_config(model__hidden_dim=8), _FACTS),
        cache_key(make_config(train__micro_batch_size=3), _FACTS),
        *(cache_key(make_config(), {**_FACTS, name: "other"}) for name in _FACTS),
    ]
    assert len({key, *others}) == 1 + len(others)
