"""Training does not import torch._dynamo where nobody compiles, and optimizers work as torch made them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: in this one somebody may have imported torch._dynamo before.
_PROGRAM = """
import sys
import torch
from hpc_trainer.training.without_dynamo import use_deterministic_algorithms, without_dynamo

kind, values = getattr(torch.optim, sys.argv[1]), eval(sys.argv[2])
seen = []


def train(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make(lambda: kind(model.parameters(), lr=0.1, **values))
    hook = optimizer.register_step_post_hook(lambda *_: seen.append(len(seen)))
    for _ in range(3):
        model(torch.ones(4, 3)).square().mean().backward()
        loss = optimizer.step(lambda: torch.tensor(torch.is_grad_enabled()))
        assert bool(loss), "a closure runs with gradients"
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    hook.remove()
    return [weight.detach().clone() for weight in model.parameters()], optimizer.state_dict()


def heavy():
    return [each for each in ("torch._dynamo", "torch._inductor", "sympy") if each in sys.modules]


use_deterministic_algorithms()
assert torch.are_deterministic_algorithms_enabled()
weights, state = train(without_dynamo)
assert not heavy(), heavy()
assert seen == [0, 1, 2]
with torch.profiler.profile() as profile:
    train(without_dynamo)
assert any(each.key.startswith("Optimizer.step#") for each in profile.key_averages())
torch_weights, torch_state = train(lambda make: make())
assert "torch._dynamo" in sys.modules, "torch imports it lazily: without that, this file of ours can go"
import torch._inductor.config
assert torch._inductor.config.deterministic
assert all(map(torch.equal, weights, torch_weights))
assert str(state) == str(torch_state)
late, _ = train(without_dynamo)
assert all(map(torch.equal, weights, late))
called = getattr(torch.optim.Optimizer.zero_grad.__wrapped__, "__dynamo_disable")
assert called.__module__ != without_dynamo.__module__, "ours has gone"
print("ok")
"""


@pytest.mark.parametrize(
    ("kind", "values"),
    [("AdamW", "{'foreach': False}"), ("SGD", "{'momentum': 0.9, 'nesterov': True}")],
)
def test_optimizers_step_without_dynamo_and_have_the_same_bits(kind: str, values: str) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, kind, values], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr


_DDP_PROGRAM = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
from hpc_trainer.training.without_dynamo import ddp_without_dynamo

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)


def gradient(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    ddp = make(lambda: DistributedDataParallel(model, gradient_as_bucket_view=True))
    with ddp.no_sync():
        ddp(torch.ones(4, 3)).square().mean().backward()
    ddp(torch.ones(4, 3)).square().mean().backward()
    return ddp, model.weight.grad.clone()


ours, ours_gradient = gradient(ddp_without_dynamo)
assert "torch._dynamo" not in sys.modules
assert "_dynamo" not in vars(torch), "what answers DDP has gone"
try:
    ddp_without_dynamo(lambda: 1 / 0)
except ZeroDivisionError:
    assert "_dynamo" not in vars(torch)
theirs, gradient_of_torch = gradient(lambda make: make())
assert "torch._dynamo" in sys.modules, "torch imports it lazily: without that, this file of ours can go"
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer", "what we answer is what torch answers"
assert ours._use_python_reducer == theirs._use_python_reducer
ours(torch.ones(4, 3)).sum().backward()
late, late_gradient = gradient(ddp_without_dynamo)
assert torch.equal(ours_gradient, gradient_of_torch)
assert torch.equal(late_gradient, gradient_of_torch)
print("ok")
"""


def test_ddp_steps_without_dynamo_and_has_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _DDP_PROGRAM, str(tmp_path / "rendezvous")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr
