"""checkpoint.resume_from leads to a run or a checkpoint, is part of the identity, and is absolute once validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.identity import config_digest
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import find_problems, validate
from tests.unit.record.builders import make_config


def _run(tmp_path: Path) -> Path:
    step = tmp_path / "run" / "checkpoints" / "step-00000020"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    return tmp_path / "run"


def _digest(**changes: Any) -> str:
    config = make_config(**changes)
    validate(config)
    return config_digest(to_plain(config))


def test_it_is_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    run = _run(tmp_path)
    for path in (run, run / "checkpoints" / "step-00000020"):
        assert list(find_problems(make_config(checkpoint__resume_from=str(path)))) == []
    for path in (tmp_path, run / "checkpoints", tmp_path / "nothing"):
        (problem,) = find_problems(make_config(checkpoint__resume_from=str(path)))
        assert "must be the folder of a run" in problem
        assert str(path) in problem


def test_it_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = make_config(checkpoint__resume_from="run")
    validate(config)
    assert config.checkpoint.resume_from == str(run)


def test_a_run_that_begins_elsewhere_is_another_run(tmp_path: Path) -> None:
    run = _run(tmp_path)
    step = run / "checkpoints" / "step-00000020"
    digests = {_digest(), _digest(checkpoint__resume_from=str(run)), _digest(checkpoint__resume_from=str(step))}
    assert len(digests) == 3
    assert _digest(checkpoint__allow_changes=["seed"]) == _digest(), "it may be allowed for a run that exists"


@pytest.mark.parametrize("name", ["seed=1", "", "two words"])
def test_allowed_changes_are_keys(name: str) -> None:
    (problem,) = find_problems(make_config(checkpoint__allow_changes=[name]))
    assert "takes only keys" in problem
