"""The registry of domains: what is registered exists, is lazy, and needs no torch where no rank calls it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hpc_trainer.domains import DOMAINS, HOOKS, contributions
from tests import removal_domains

_OF_RANKS = ("recorders",)
"""Hooks that only a rank calls which has torch."""


def test_every_contribution_is_to_a_hook_and_exists() -> None:
    registered = {hook for domain in DOMAINS for hook in importlib.import_module(f"hpc_trainer.{domain}").CONTRIBUTES}
    assert registered <= set(HOOKS)
    for hook in HOOKS:
        assert all(each is not None for each in contributions(hook)), hook


def test_an_unknown_hook_is_an_error() -> None:
    with pytest.raises(KeyError):
        contributions("warning")


def test_the_login_node_calls_its_hooks_without_torch() -> None:
    hooks = [hook for hook in HOOKS if hook not in _OF_RANKS]
    code = (
        "import sys; from hpc_trainer.domains import contributions\n"
        f"for hook in {hooks}: contributions(hook)\n"
        "print([name for name in ('torch', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_domain_is_imported_only_when_a_hook_is_called() -> None:
    """Its `__init__.py`, which lists the contributions, is imported with the first hook of any domain."""
    code = (
        "import sys; import hpc_trainer.record.status, hpc_trainer.operate.why, hpc_trainer.operate.report.page\n"
        "print([name for name in sys.modules if name.startswith('hpc_trainer.observe.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("domain", DOMAINS)
def test_the_rest_works_without_a_domain(domain: str) -> None:
    removal_domains.main([domain])
