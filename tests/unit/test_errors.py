"""Exit codes: distinct, outside what shells and srun use, one for each kind of error."""

from __future__ import annotations

import inspect
import re

import pytest

from hpc_trainer import errors
from hpc_trainer.errors import ConfigError, ExitCode, HpcTrainerError, did_you_mean

KINDS = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, HpcTrainerError)]


def test_exit_codes_are_the_designs() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0, "FAILED": 1, "USAGE": 2, "STORAGE": 74, "REQUEUED": 75, "NO_PROGRESS": 76, "CONFIG": 78,
    }  # fmt: skip


def test_no_exit_code_is_the_shells_a_signals_or_a_common_requeue_code() -> None:
    assert not [code for code in ExitCode if 126 <= code <= 165 or code in (99, 255)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_table_of_the_module_with_its_code(kind: type[HpcTrainerError]) -> None:
    table = re.findall(r"(\w+Error)\b.*?exit (\d+)", errors.__doc__ or "")
    assert (kind.__name__, str(int(kind.exit_code))) in table
    assert kind.exit_code is not ExitCode.OK


def test_a_configuration_error_is_a_value_error_too() -> None:
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [("adamW", "AdamW"), ("gup", "gpu"), ("defq", "dev-q"), ("quantum", None), ("", None)],
)
def test_the_nearest_name_is_offered(wrong: str, found: str | None) -> None:
    expected = "" if found is None else f"Did you mean {found}? "
    assert did_you_mean(wrong, ["gpu", "AdamW", "dev-q"]) == expected
    assert did_you_mean(wrong, []) == ""
