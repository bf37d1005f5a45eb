"""What `init_from` names, found and read at plan time: places, headers, patterns, digests. Nothing here needs torch's
models, and nothing hostile in a file is believed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from hpc_trainer.errors import ConfigError
from hpc_trainer.features.init_from import InitFromConfig, WhichCheckpoint
from hpc_trainer.features.init_from import source as source_module
from hpc_trainer.features.init_from.source import digest_of, names_in, read_names, renamed, resolved

RUN_ID = "cnn-digits-lr0.001-s0-0123456789"


def _file(path: Path, *names: str, value: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file({name: np.full((2, 3), value, np.float32) for name in names}, path)
    return path


def _checkpoint(run: Path, step: int, metric: float | None = None, **checkpoint: Any) -> Path:
    """As far as a plan looks at it."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, mode=0o700)
    model = {"dict": [["layer.weight", {"tensor": "w"}], ["layer.bias", {"sharded": "b"}], ["more", {"dict": []}]]}
    objects = {"dict": [["model", model], ["samples_seen", 3]]}
    meta = {"made_with": {"checkpoint": checkpoint}} if checkpoint else {}
    manifest = {"step": step, "meta": meta, "replicated": {"dict": [["step", step], ["objects", objects]]}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "manifest.json").chmod(0o600)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "eval_loss": metric}) + "\n")
    return folder


def _resolved(path: object, runs_dir: Path | None = None, **values: Any) -> InitFromConfig:
    return resolved(InitFromConfig(path=str(path), **values), None if runs_dir is None else str(runs_dir))


def _refusal(path: object, runs_dir: Path | None = None, **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        _resolved(path, runs_dir, **values)
    return str(caught.value)


def test_a_file_is_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, same = _file(tmp_path / "a.safetensors", "w"), _file(tmp_path / "b" / "c.safetensors", "w")
    other = _file(tmp_path / "d.safetensors", "w", value=2)
    monkeypatch.chdir(tmp_path)
    found = _resolved("a.safetensors")
    assert found.path == str(one)
    assert len(found.digest or "") == 64
    assert found.digest == _resolved(same).digest == _resolved(same.parent).digest != _resolved(other).digest
    assert _resolved(same, digest=found.digest).path == str(same), "a person may say which content is meant"
    assert "the content differs" in _refusal(other, digest=found.digest)


def test_a_folder_as_hugging_face_writes_it(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    _file(blobs / "1", "a", "b")
    _file(blobs / "2", "c")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").symlink_to(blobs / str(number))
    index = folder / "model.safetensors.index.json"
    where = {"a": 1, "b": 1, "c": 2}
    index.write_text(
        json.dumps({"weight_map": {name: f"model-0000{each}-of-00002.safetensors" for name, each in where.items()}})
    )
    assert names_in(folder) == ["a", "b", "c"]
    before = _resolved(folder).digest
    _file(blobs / "2", "c", value=3)
    assert _resolved(folder).digest != before
    index.write_text(json.dumps({"weight_map": {"z": "model-00001-of-00002.safetensors"}}))
    assert "does not contain it" in _refusal(folder)
    for name in ("../a.safetensors", "/etc/passwd", "model.bin", ""):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "must name .safetensors files beside it" in _refusal(folder)
    for text in ("[" * 100_000, "{}", '{"weight_map": 3}', "no"):
        index.write_text(text)
        assert "is not an index of safetensors files" in _refusal(folder)


def test_a_run_means_its_last_checkpoint_or_its_best(tmp_path: Path) -> None:
    run = tmp_path / "sweep" / RUN_ID
    for step, loss in ((10, 0.5), (20, 0.2), (30, 0.4)):
        last = _checkpoint(run, step, loss, keep_best="eval_loss", best_mode="auto")
    shutil.rmtree(_checkpoint(run, 40, 0.1))
    best = run / "checkpoints" / "step-00000020"
    for name in (RUN_ID, "cnn-digits", "0123456789", f"sweep/{RUN_ID}", "sweep/cnn"):
        assert _resolved(name, tmp_path).path == str(last), name
    assert _resolved(run).path == _resolved(last).path == str(last)
    found = _resolved(RUN_ID, tmp_path, checkpoint=WhichCheckpoint.best)
    assert (found.path, names_in(best)) == (str(best), ["layer.weight", "layer.bias"])
    assert found.digest == digest_of(best) != digest_of(last)
    unmarked = tmp_path / "sweep" / "mlp-0123456789"
    _checkpoint(unmarked, 10, 0.5)
    assert "without checkpoint.keep_best" in _refusal(unmarked, checkpoint=WhichCheckpoint.best)


def test_a_name_that_fits_two_runs_or_none_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _checkpoint(tmp_path / name / RUN_ID, 10)
    _checkpoint(tmp_path / "one" / f"{RUN_ID}.old-17", 10)
    assert f"may be one/{RUN_ID}, two/{RUN_ID}. Write one of these." in _refusal("cnn", tmp_path)
    assert _resolved("one/cnn", tmp_path).path == str(tmp_path / "one" / RUN_ID / "checkpoints" / "step-00000010")
    assert "is neither a file nor a folder, and no run in" in _refusal("gpt", tmp_path)
    (tmp_path / "young" / RUN_ID / "checkpoints").mkdir(parents=True)
    assert "has no checkpoint (yet)" in _refusal(tmp_path / "young" / RUN_ID)


def test_a_checkpoint_without_a_model_that_is_damaged_or_that_others_may_write(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "run", 10)
    manifest = folder / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('["model"', '["net"'))
    assert "no object named `model`" in _refusal(folder)
    for text in ("{", "[]", '{"replicated": {"dict": 3}}'):
        manifest.write_text(text)
        assert "is damaged" in _refusal(folder)
        assert "is damaged" in _refusal(tmp_path / "run", checkpoint=WhichCheckpoint.best)
    manifest.write_text(whole)
    renamed_folder = folder.rename(tmp_path / "mine")
    assert "Rename it to step-" in _refusal(renamed_folder)
    folder = renamed_folder.rename(tmp_path / "step-00000010")
    folder.chmod(0o777)
    assert "others may write it" in _refusal(folder)


def test_pickles_are_refused_with_how_to_convert_them(tmp_path: Path) -> None:
    for name in ("model.bin", "model.pt", "model.pth", "model.ckpt"):
        (tmp_path / "m").mkdir(exist_ok=True)
        path = tmp_path / "m" / name
        path.touch()
        for named in (path, path.parent):
            said = _refusal(named)
            assert "safetensors" in said
            assert f"torch.load('{name}', weights_only=True)" in said
        path.unlink()
    (tmp_path / "weights.npz").touch()
    assert "must be a .safetensors file" in _refusal(tmp_path / "weights.npz")
    assert "it has none" in _refusal(tmp_path / "m")
    _file(tmp_path / "m" / "a.safetensors", "a"), _file(tmp_path / "m" / "b.safetensors", "a")
    assert "it has a.safetensors, b.safetensors" in _refusal(tmp_path / "m")


def _with_header(path: Path, header: bytes, *, length: int | None = None, data: bytes = b"") -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


_FINE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{", b"[" * 100_000, b'{"w": 3}', b'{"w": {}}', b"\xff\xfe{}", b'"text"',
        *(json.dumps({"w": {**_FINE, **each}}).encode() for each in (
            {"shape": [3]}, {"shape": [-2]}, {"shape": [2.0]}, {"shape": [True, 2]}, {"shape": "2"}, {"dtype": "F4"},
            {"dtype": ["F32"]}, {"data_offsets": [0, 9]}, {"data_offsets": [-8, 0]}, {"data_offsets": [8, 16]},
            {"data_offsets": [0]}, {"data_offsets": ["0", "8"]}, {"shape": [10**400], "data_offsets": [0, 4 * 10**400]},
        )),
    ],
)  # fmt: skip
def test_a_hostile_header_is_one_sentence(tmp_path: Path, header: bytes) -> None:
    path = _with_header(tmp_path / "w.safetensors", header, data=bytes(8))
    said = _refusal(path)
    assert f"{path} is not a safetensors file" in said
    assert len(said) < 600 + len(str(path))
    assert "\n" not in said


def test_a_header_is_never_read_past_its_bound(tmp_path: Path) -> None:
    fine = json.dumps({"w": _FINE, "__metadata__": {"format": "pt"}}).encode()
    assert read_names(_with_header(tmp_path / "w.safetensors", fine, data=bytes(8))) == ["w"]
    for length in (2**63, len(fine) + 9, 0, 1):
        said = _refusal(_with_header(tmp_path / "w.safetensors", fine, length=length, data=bytes(8)))
        assert "is not a safetensors file that this version can read, or is damaged: " in said
    for content in (b"abc", b""):
        (tmp_path / "w.safetensors").write_bytes(content)
        assert "w.safetensors is not a safetensors file" in _refusal(tmp_path / "w.safetensors")


def test_a_format_that_nobody_reads_is_told_when_the_run_is_planned(tmp_path: Path) -> None:
    header = json.dumps({"w": {**_FINE, "dtype": "F8_E8M0", "shape": [8]}}).encode()
    said = _refusal(_with_header(tmp_path / "w.safetensors", header, data=bytes(8)))
    assert "w has the number format F8_E8M0; supported are BF16, " in said


def test_names_are_renamed_by_patterns() -> None:
    names = ["bert.layer.0.weight", "bert.layer.1.weight", "head.bias"]
    config = InitFromConfig(rename={"bert.layer.*.weight": "blocks.*.w", "head.*": "classifier.*"})
    assert renamed(names, config, "there") == {
        "blocks.0.w": names[0], "blocks.1.w": names[1], "classifier.bias": names[2],
    }  # fmt: skip
    assert renamed(["a.b"], InitFromConfig(rename={"a.b": "c"}), "there") == {"c": "a.b"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rename": {"bart.*": "encoder.*"}}, "'bart.*', which matches no name in .*. There are bert.*, head.*"),
        ({"rename": {"bert": "encoder"}}, r"Use 'bert\.\*' for all of it"),
        ({"rename": {"bert.*": "x.*", "*.0": "y.*"}}, "which both match bert.0"),
        ({"rename": {"bert.*": "head.*"}}, "maps both bert.0 and head.0 to head.0"),
        ({"include": ["tail.*"]}, "init_from.include has 'tail.*', which matches no name"),
        ({"exclude": ["*"]}, "leaves nothing of"),
        ({"include": ["head.*"], "exclude": ["head.0"]}, "leaves nothing of"),
    ],
)
def test_patterns_that_fit_nothing_or_collide_are_refused_at_plan_time(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    path = _file(tmp_path / "w.safetensors", "bert.0", "head.0")
    with pytest.raises(ConfigError, match=said):
        _resolved(path, **values)


def test_the_digest_of_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(source_module, "_SMALL", 0)
    path, reads = _file(tmp_path / "w.safetensors", "w"), []
    real = source_module.sha256_of
    monkeypatch.setattr(source_module, "sha256_of", lambda each: (reads.append(each), real(each))[1])
    first = source_module.remembered(path)
    assert source_module.remembered(path) == first == real(path)
    assert len(reads) == 1
    _file(path, "w", value=5)
    assert source_module.remembered(path) == real(path) != first
    for text in ("{", "[]", '{"a": [1]}'):
        (tmp_path / "cache" / "hpc_trainer" / "weights.json").write_text(text)
        assert source_module.remembered(path) == real(path), "a damaged memory is forgotten"


def test_a_pipe_in_the_place_of_an_index_or_of_weights_is_refused(tmp_path: Path) -> None:
    """Who opens a pipe waits for a writer: `plan` hung."""
    index = tmp_path / "model.safetensors.index.json"
    os.mkfifo(index)
    safetensors.numpy.save_file({"a": np.zeros(2, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"init_from=.* cannot be read: .*it is a pipe, not a file: '.*index\.json'"):
        resolved(InitFromConfig(path=str(tmp_path)), None)
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"pipe\.safetensors cannot be read: it is a pipe"):
        read_names(pipe)
    with pytest.raises(OSError, match="it is a pipe"):
        source_module.remembered(pipe)
