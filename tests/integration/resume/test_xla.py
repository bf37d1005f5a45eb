"""Runs on an XLA device, with torch-xla on the CPU: `make xla`, in an environment of its own.

torch-xla is built for one release of torch, and that is not the newest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

pytestmark = [pytest.mark.xla, pytest.mark.timeout(600)]
SMALL = ("experiment=digits", "cluster=local", "model=mlp", "train.num_steps=24", "monitor.log_every_steps=1")


@pytest.fixture(autouse=True)
def _xla_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_interruptions_change_no_bit(local: LocalDriver, precision: str) -> None:
    """Dropout draws from XLA's own generator; moments have no memory that a checkpoint could tell them by."""
    words = (*SMALL, "hardware=xla_x1", f"precision={precision}", "model.dropout=0.1", "train.grad_accum_steps=2")
    done = local.run("verify", "resume", *words, "train.ema_decay=0.9", "--seed", "6852", timeout_s=500)
    assert "IDENTICAL: " in done.stdout


def test_it_learns_what_the_cpu_learns(local: LocalDriver) -> None:
    losses = {}
    for hardware in ("cpu_x1", "xla_x1"):
        words = (*SMALL, f"hardware={hardware}", "model.dropout=0", "train.eval_every_steps=12")
        assert local.train(*words, f"sweep_name={hardware}")["state"] == "COMPLETED"
        losses[hardware] = local.metrics(hardware, "loss") | local.metrics(hardware, "eval_loss")
    assert losses["xla_x1"] == pytest.approx(losses["cpu_x1"], rel=1e-5)
    assert set(losses["xla_x1"].values()) != {0.0}
