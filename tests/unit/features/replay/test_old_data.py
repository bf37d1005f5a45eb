"""Which data are replayed, as `plan` finds and refuses them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import targets_of
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import append_specs
from tests.composed import composed

DIGITS = ("experiment=digits", "cluster=local", "hardware=cpu_x1")


def _arrays(path: Path, shape: tuple[int, ...] = (1, 8, 8)) -> str:
    rng = np.random.default_rng(0)
    np.savez(path, inputs=rng.random((100, *shape), dtype=np.float32), targets=np.arange(100) % 10)
    return f"data.path={path}"


def _run(folder: Path, *words: str) -> Path:
    """A run that is done, as far as a plan looks at it: its spec, and a checkpoint with the names of a model."""
    config = composed([*DIGITS, f"paths.runs_dir={folder.parent}", f"sweep_name={folder.name}", *words])
    validate(config)
    spec = freeze(config, axes={}, overrides=words)
    sweep = SweepPaths(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    append_specs(sweep, [spec])
    step = sweep.run(spec.run_id).folder / "checkpoints" / "step-00000010"
    step.mkdir(parents=True, mode=0o700)
    model = {"dict": [["layer.weight", {"tensor": "w"}]]}
    manifest = {
        "step": 10,
        "meta": {},
        "replicated": {"dict": [["step", 10], ["objects", {"dict": [["model", model]]}]]},
    }
    (step / "manifest.json").write_text(json.dumps({**manifest, "run": spec.run_id}))
    (step / "manifest.json").chmod(0o600)
    return sweep.run(spec.run_id).folder


def _continued(run: Path | str, *words: str) -> TrainConfig:
    config = composed([*DIGITS, f"init_from.path={run}", "replay.share=0.2", *words])
    validate(config)
    return config


def _refusal(run: Path | str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _continued(run, *words)
    return str(caught.value)


def _names(config: TrainConfig) -> list[str]:
    return [Path(each["path"]).stem if "path" in each else each["name"] for each in config.replay.data]


def test_the_old_data_are_those_of_the_run_without_what_belongs_to_its_loader(tmp_path: Path) -> None:
    run = _run(tmp_path / "first", "data=arrays", _arrays(tmp_path / "a.npz"), "data.num_workers=3")
    config = _continued(run, "data=arrays", _arrays(tmp_path / "b.npz"))
    assert config.replay.data == [{"name": "arrays", "path": str(tmp_path / "a.npz")}]
    again = _continued(run, "data=arrays", f"data.path={tmp_path / 'b.npz'}")
    digests = {freeze(each, axes={}, overrides=()).digest for each in (config, again)}
    other = _continued(run, "data=arrays", f"data.path={tmp_path / 'b.npz'}", "replay.share=0.3")
    assert len(digests) == 1
    assert freeze(other, axes={}, overrides=()).digest not in digests


def test_a_run_that_was_continued_hands_on_what_it_replayed(tmp_path: Path) -> None:
    """The oldest first, each once: of all that came before each sample is as likely as any other."""
    first = _run(tmp_path / "first", "data=arrays", _arrays(tmp_path / "a.npz"))
    second = _run(
        tmp_path / "second", "data=arrays", _arrays(tmp_path / "b.npz"), f"init_from.path={first}", "replay.share=0.2"
    )
    third = _run(
        tmp_path / "third", "data=arrays", _arrays(tmp_path / "c.npz"), f"init_from.path={second}", "replay.share=0.2"
    )
    assert _names(_continued(third)) == ["a", "b", "c"]
    back = _run(tmp_path / "back", "data=arrays", f"data.path={tmp_path / 'a.npz'}", f"init_from.path={second}",
                "replay.share=0.2")  # fmt: skip
    assert _names(_continued(back)) == ["a", "b"]
    told_only = _run(tmp_path / "told", f"init_from.path={first}", "replay.share=0")
    assert _names(_continued(told_only)) == ["a", "digits"]
    forgot = _run(tmp_path / "forgot", f"init_from.path={first}")
    assert _names(_continued(forgot)) == ["digits"]


def test_old_data_that_are_gone_are_refused_with_the_way_to_name_them(tmp_path: Path) -> None:
    run = _run(tmp_path / "first", "data=arrays", _arrays(tmp_path / "a.npz"))
    (tmp_path / "a.npz").rename(tmp_path / "moved.npz")
    told = _refusal(run, "data=digits")
    assert told.startswith("replay: the old data (data=arrays):")
    assert str(tmp_path / "a.npz") in told
    moved = _continued(run, "data=digits", f"replay.data=[{{name: arrays, path: {tmp_path / 'moved.npz'}}}]")
    assert _names(moved) == ["moved"]


def test_a_source_that_is_no_run_of_the_shared_loop_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path / "first")
    for copy in (tmp_path / "first").rglob("specs*"):
        copy.unlink()
    assert "are not known any more" in _refusal(run)
    lone = tmp_path / "lone" / "step-00000010"
    lone.parent.mkdir(mode=0o700)
    (run / "checkpoints" / "step-00000010").rename(lone)
    assert "is not a checkpoint in a run's folder" in _refusal(lone)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (("model=gpt", "data=text_bytes", "data.seq_len=16"), ("model=gpt", "data=text_bytes", "data.seq_len=32"),
         "inputs of the shape [16], and the new data [32]"),
        (("model=gpt", "data=text_bytes", "data.seq_len=16"),
         ("model=gpt", "data=synthetic_tokens", "data.seq_len=16", "data.vocab_size=99"),
         "num_classes 256, and the new data 99"),
        (("data=synthetic_images", "data.image_size=16"), (),
         "inputs of the shape [3, 16, 16], and the new data [1, 8, 8]"),
    ],
)  # fmt: skip
def test_data_that_one_model_cannot_take_are_refused(
    old: tuple[str, ...], new: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    assert told in _refusal(_run(tmp_path / "first", *old), *new)


def test_what_the_new_data_do_not_tell_is_no_difference(tmp_path: Path) -> None:
    """The digits have ten classes; how many an array file has, only its samples tell."""
    run = _run(tmp_path / "first")
    config = _continued(run, "data=arrays", _arrays(tmp_path / "a.npz"))
    assert [each["name"] for each in config.replay.data] == ["digits"]
    told = _refusal(run, "data=arrays", _arrays(tmp_path / "b.npz", shape=(1, 9, 9)))
    assert "inputs of the shape [1, 8, 8], and the new data [1, 9, 9]" in told


def test_a_run_with_another_task_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path / "first", "task=regression", "data=arrays", _arrays(tmp_path / "a.npz"))
    assert "has task=regression, and this is task=classification" in _refusal(run)


def test_folders_with_other_classes_are_refused(tmp_path: Path) -> None:
    for name, classes in (("old", ("cat", "dog")), ("new", ("dog", "fox"))):
        for folder in classes:
            (tmp_path / name / folder).mkdir(parents=True)
    words = ("data=image_folder", "data.eval_fraction=0.5", "data.image_size=8", "model=cnn")
    run = _run(tmp_path / "first", *words, f"data.path={tmp_path / 'old'}")
    told = _refusal(run, *words, f"data.path={tmp_path / 'new'}")
    assert "its classes are cat, dog (2), and those of the new data dog, fox (2)" in told
    (tmp_path / "new" / "fox").rename(tmp_path / "new" / "cat")
    assert _continued(run, *words, f"data.path={tmp_path / 'new'}").replay.data[0]["path"] == str(tmp_path / "old")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("[{name: digit}]", "Did you mean digits?"),
        ("[digits]", "must hold data sections"),
        ("[{name: digits, num_evil: 3}]", "num_evil is not a key of DigitsConfig"),
        ("[{name: digits, num_eval: 5000}]", "replay.data[0]: data.num_eval=5000 must be"),
        ("[{name: table, path: a.csv}]", "holds a table"),
        ("[{name: custom, _target_: my_lab.old}]", "add --trust my_lab"),
    ],
)
def test_what_a_person_writes_out_is_checked(given: str, told: str) -> None:
    config = composed([*DIGITS, "replay.share=0.2", f"replay.data={given}"])
    (problem,) = find_problems(config)
    assert told in problem


def test_it_needs_a_run_and_refuses_tables() -> None:
    (alone,) = find_problems(composed([*DIGITS, "replay.share=0.2"]))
    assert "replay.share=0.2 needs init_from.path" in alone
    (idle,) = find_problems(composed([*DIGITS, "replay.data=[{name: digits}]"]))
    assert "replay.data" in idle
    assert "has no effect" in idle
    (large,) = find_problems(composed([*DIGITS, "init_from.path=a", "replay.share=1"]))
    assert "replay.share=1" in large


def test_code_of_old_data_is_frozen_with_the_run(tmp_path: Path) -> None:
    config = composed([*DIGITS, "replay.share=0.2", "replay.data=[{name: custom, _target_: my_lab.old}]"])
    config = dataclasses.replace(config, trust=["my_lab"])
    validate(config)
    plain: dict[str, Any] = dict(freeze(config, axes={}, overrides=()).config)
    assert targets_of(plain)["replay.data[0]._target_"] == "my_lab.old"


def test_metrics_of_the_old_set_may_decide() -> None:
    words = ("checkpoint.keep_best=eval_old_loss", "replay.data=[{name: digits}]")
    assert list(find_problems(composed([*DIGITS, "replay.share=0", *words]))) == []
    (told,) = find_problems(composed([*DIGITS, words[0]]))
    assert "eval_old_loss is not a metric" in told
