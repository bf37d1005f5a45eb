"""show, diff and sweeps: what was submitted, by files alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

SMALL = ("debug=smoke", "experiment=digits", "model=cnn", "sweep_name=two")


@pytest.fixture
def submitted(local: LocalDriver) -> LocalDriver:
    local.run("submit", *SMALL, "optim.lr=1e-3,3e-3", "cluster=local", "--wait")
    return local


def test_show_says_where_each_value_comes_from(submitted: LocalDriver) -> None:
    second = submitted.json("status", "two")["runs"][1]["run_id"]
    told = submitted.json("show", second)
    values = {each["key"]: each for each in told["values"]}
    assert (told["run_id"], told["sweep"]) == (second, "two")
    assert told["command"][-2:] == ["cluster=local", "--wait"]
    assert len(told["code"]) == 64
    assert (values["optim.lr"]["value"], values["optim.lr"]["source"]) == (0.003, "command line")
    assert (values["model.name"]["value"], values["model.name"]["said"]) == ("cnn", "model=cnn")
    assert values["seed"]["source"] == "default"
    assert values["train.micro_batch_size"]["source"] == "filled in"
    assert values["train.num_steps"]["source"] == "file", "debug=smoke says so"
    short, long = (submitted.run("show", second[-6:], *more).stdout for more in ((), ("--all",)))
    assert "optim.lr" in short
    assert "monitor.watchdog_s" not in short
    assert "monitor.watchdog_s" in long
    assert "keys at their default are left out" in short


@pytest.mark.long
def test_diff_shows_what_is_not_the_same(submitted: LocalDriver) -> None:
    first, second = (run["run_id"] for run in submitted.json("status", "two")["runs"])
    assert submitted.json("diff", first, second) == [{"key": "optim.lr", first: 0.001, second: 0.003}]
    assert "do not differ" in submitted.run("diff", first, first).stdout
    done = submitted.run("diff", first, check=False)
    assert (done.returncode, "name two or more" in done.stderr) == (2, True)


@pytest.mark.long
def test_sweeps_are_listed_without_a_scheduler(submitted: LocalDriver) -> None:
    (line,) = submitted.json("sweeps")
    assert (line["name"], line["num_runs"], line["executor"]) == ("two", 2, "local")
    assert "optim.lr=1e-3,3e-3" in line["command"]
    assert "two    2" in submitted.run("sweeps").stdout
    missing = submitted.run("show", "nobody", check=False)
    assert (missing.returncode, "no run is named 'nobody'" in missing.stderr) == (1, True)
    several = submitted.run("show", "cnn", check=False)
    assert "Write more of the id" in several.stderr
