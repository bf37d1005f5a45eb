"""What runs differ in has a value for each run and a column for each key, however they were submitted."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path

import pytest

from hpc_trainer.config.load import hyperparameters
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.launch.freeze import freeze
from hpc_trainer.operate.report.data import build_report
from hpc_trainer.operate.results import result_table
from hpc_trainer.operate.show import as_text
from hpc_trainer.record import spec as spec_file
from hpc_trainer.record.metrics import MetricsLog
from hpc_trainer.record.reading import parse_record
from hpc_trainer.record.spec import LateConfig, RunSpec, find_axes, read_specs, shown_axis
from hpc_trainer.record.states import RunState
from hpc_trainer.record.status import read_status
from tests.unit.record.builders import make_config, make_spec
from tests.unit.record.sweeps import SweepOnDisk


def _alone(*overrides: str) -> RunSpec:
    """Of a command without an axis."""
    config = make_config(*overrides)
    validate(config)
    return freeze(config, axes={}, overrides=overrides)


def test_a_run_of_another_command_has_its_value_on_an_axis() -> None:
    swept = [make_spec(f"optim.lr={lr}", axes={"optim.lr": lr}) for lr in ("1e-3", "3e-3")]
    other, unsaid = _alone("optim.lr=1e-2"), _alone("seed=5")
    found = find_axes([*swept, other, unsaid])
    assert [found[spec.run_id]["optim.lr"] for spec in (*swept, other)] == ["1e-3", "3e-3", "0.01"]
    assert found[unsaid.run_id] == {"optim.lr": "1e-3", "seed": "5"}, "the default, in the words that were typed"
    assert found[other.run_id]["seed"] == "0"


def test_no_secret_is_shown_as_what_runs_differ_in_nor_sent_to_a_tracker() -> None:
    """`sync` sent params.token to MLflow and W&B, and `results` wrote it into tables."""
    tokens = ("hf_" + "a" * 20, "swordfish")
    words = ("train.command=python", "+params.width=16", "+params.hub={api_key: xyzzy}")
    specs = [
        make_spec(*words, f"+params.token={token}", axes={"params.token": token, "params.width": "16"})
        for token in tokens
    ]
    assert [*find_axes(specs).values()] == 2 * [{"params.token": "[redacted]", "params.width": "16"}]
    for spec in specs:
        params = hyperparameters(spec.config)["params"]
        assert params == {"token": "[redacted]", "width": 16, "hub": {"api_key": "[redacted]"}}
        assert spec.config["params"]["token"] in tokens, "the run itself needs it"


def test_a_key_that_no_command_swept_is_an_axis_where_runs_differ() -> None:
    first, second = _alone("optim.lr=1e-3"), _alone("optim.lr=1e-3", "train.label_smoothing=0.1")
    assert find_axes([first]) == {first.run_id: {}}
    assert find_axes([first, second]) == {
        first.run_id: {"train.label_smoothing": "0"}, second.run_id: {"train.label_smoothing": "0.1"},
    }  # fmt: skip


def test_runs_of_two_models_that_a_file_chose_differ_in_the_model_and_not_in_its_keys() -> None:
    rows = find_axes([dataclasses.replace(_alone(f"model={name}"), overrides=()) for name in ("mlp", "cnn")])
    assert [row["model"] for row in rows.values()] == ["mlp", "cnn"]
    assert not any(key.startswith("model.") for row in rows.values() for key in row)


def test_a_large_whole_number_is_shown_as_it_was_typed() -> None:
    """Hydra makes 10000000000.0 of 1e10: ids and overrides keep that, tables show 1e10."""
    typed = {"10000000000.0": "1e10", "300000.0": "300000", "1234567.0": "1234567", "-2500000.0": "-2.5e6"}
    typed |= {"100.0": "100.0", "1e-3": "1e-3", "200000": "200000", "1e+16": "1e+16", "1234567.5": "1234567.5"}
    specs = [make_spec(f"optim.lr={float(text)}", axes={"optim.lr": text}) for text in typed if text[0] != "-"]
    shown = [find_axes(specs)[spec.run_id]["optim.lr"] for spec in specs]
    assert shown == [short for text, short in typed.items() if text[0] != "-"]
    assert [shown_axis(text) for text in typed] == [*typed.values()]
    assert all(float(short) == float(text) for text, short in typed.items())
    assert [as_text(value) for value in (1e10, 0.1, 5, True, None)] == ["1e10", "0.1", "5", "true", "null"]


def test_a_choice_of_a_group_is_one_column() -> None:
    first, second = _alone("model=mlp"), _alone("model=cnn")
    assert find_axes([first, second]) == {first.run_id: {"model": "mlp"}, second.run_id: {"model": "cnn"}}


def test_runs_that_no_word_tells_apart_differ_by_what_a_file_says() -> None:
    first = _alone("model=mlp")
    changed = make_config("model=mlp")
    changed.optim.lr = 0.5
    validate(changed)
    second = freeze(changed, axes={}, overrides=("model=mlp",))
    assert find_axes([first, second]) == {first.run_id: {"optim.lr": "0.001"}, second.run_id: {"optim.lr": "0.5"}}


def test_metrics_of_a_stopped_run_say_of_which_step_they_are(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path / "s", [make_spec()])
    sweep.submit(executor="local")
    sweep.start(executor="local")
    sweep.beat(step=40, eval_loss=0.9)  # the last one that was written
    log = MetricsLog(sweep.run().metrics)
    for step, loss in ((40, 0.9), (80, 0.5), (120, 0.1)):
        log.append(step, {"eval_loss": loss})
    sweep.end(state=RunState.PREEMPTED, cause="stopped", saved_step=97)
    status = read_status(sweep.paths)
    (row,) = result_table(status).rows
    assert (row["step"], row["eval_loss"], row["metrics_step"]) == (97, 0.5, 80), "the newest, not what comes again"
    (run,) = build_report(status).runs
    assert (run.step, run.metrics, run.metrics_step) == (97, {"eval_loss": 0.5}, 80)


def test_an_override_that_deletes_a_key_is_no_axis() -> None:
    """An app's `~callbacks`, as sweeps of before have it: a column without a value."""
    specs = [make_spec(axes={"seed": str(seed), "params.~callbacks": ""}, seed=seed) for seed in (0, 1)]
    assert find_axes(specs) == {spec.run_id: {"seed": spec.axes["seed"]} for spec in specs}


def test_axes_of_a_longer_grid_parse_each_configuration_once_and_keep_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`results` of 10,000 runs of which half came by --extend took 6 s and 440 MB: a configuration takes 38 kB."""
    sweep = SweepOnDisk(
        tmp_path / "s",
        [
            make_spec(f"train.num_steps={steps}", axes={"seed": str(seed)}, seed=seed)
            for steps in (200, 400)
            for seed in range(6)
        ],
    )
    specs = list(read_specs(sweep.paths).values())
    parsed: list[bytes] = []
    monkeypatch.setattr(spec_file, "_MOST_PARSED", 3)
    monkeypatch.setattr(spec_file, "_parsed", deque())  # other tests of this process have filled it
    monkeypatch.setattr(spec_file, "parse_record", lambda line: parsed.append(line) or parse_record(line))
    rows = find_axes(specs)
    assert [row["train.num_steps"] for row in rows.values()] == ["200"] * 6 + ["400"] * 6
    assert len(parsed) == len({*parsed}) == 12
    in_memory = [spec for spec in specs if isinstance(spec.config, LateConfig) and spec.config._found is not None]
    assert in_memory == specs[-3:]
