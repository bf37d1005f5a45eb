"""Options of sbatch that are no key of ours: judged by name, and by word."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_trainer.config.rules.cluster_rules import _FREE, _OURS, _UNNEEDED, sbatch_flags, sbatch_problems


@pytest.mark.parametrize(
    "options",
    [
        {"mail-type": "END,FAIL", "mail-user": "me@lab.org"},
        {"reservation": "school", "exclusive": True, "hint": "nomultithread"},
        {"exclusive": "user", "nice": 100, "switches": "1@60", "nodelist": "gpu[001-004,7]"},
        {"licenses": "matlab:1,ansys@server:2", "wckey": None, "hold": False},
    ],
)
def test_what_sbatch_takes_is_taken(options: dict[str, Any]) -> None:
    assert list(sbatch_problems(options)) == []
    kept = {name: value for name, value in options.items() if value not in (None, False)}
    assert sbatch_flags(options) == kept


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("partition", "Use hardware.partition."),
        ("time", "Use hardware.time_limit_min."),
        ("--account", "Use cluster.account."),
        ("cpus_per_task", "Use hardware.cpus_per_task."),
        ("no-requeue", "hpc-trainer cancel"),
    ],
)
def test_what_is_ours_is_refused_with_the_key_to_use(name: str, says: str) -> None:
    (problem,) = sbatch_problems({name: "x"})
    assert "which hpc_trainer sets itself" in problem
    assert says in problem


@pytest.mark.parametrize(
    ("name", "says"),
    [("mail-typ", "Did you mean mail-type?"), ("mail_type", "Did you mean mail-type?"), ("zzz", "It takes")],
)
def test_an_option_that_does_not_exist_is_told_the_nearest(name: str, says: str) -> None:
    (problem,) = sbatch_problems({name: "END"})
    assert says in problem


@pytest.mark.parametrize(
    "value",
    ["a b", "x;rm -rf /", "$(id)", "`id`", "a\n#SBATCH --uid=0", "'x'", "", "-x y", ["END"], {"a": 1}, "#x", "é"],
)
def test_a_value_is_one_plain_word(value: Any) -> None:
    (problem,) = sbatch_problems({"comment" if value is None else "reservation": value})
    assert "plain word" in problem


def test_no_option_is_both() -> None:
    assert not _FREE & (_OURS.keys() | _UNNEEDED.keys())
    assert not _OURS.keys() & _UNNEEDED.keys()


def test_an_option_that_is_not_needed_is_to_be_removed_and_why() -> None:
    assert [*sbatch_problems({"comment": "x"})] == [
        "cluster.sbatch holds 'comment', which hpc_trainer sets itself. Remove it: hpc-trainer uses the comment to "
        "recognise its jobs."
    ]
