"""Program of test_sharded_sgd_ranks.py: steps of SGD and RAdam, and skipped ones, on whole weights and on parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from hpc_trainer.config.schema.optim import CustomOptimConfig, OptimConfig, SgdConfig
from hpc_trainer.config.schema.parallel import Dtype
from hpc_trainer.features.custom_optim.custom_optim import PutBack
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.optim.build import step_unless
from tests.unit.training.checkpoint.reshard_child import on_ranks
from tests.unit.training.parallel.shard_builders import KINDS, build, digests
from tests.unit.training.parallel.sharded_step_child import whole
from tests.unit.training.step_builders import batches_of

CONFIGS: dict[str, OptimConfig] = {
    "nesterov": SgdConfig(lr=0.1, weight_decay=0.1),
    "momentum": SgdConfig(lr=0.1, nesterov=False),
    "plain": SgdConfig(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.1),
    "radam": CustomOptimConfig(_target_="torch.optim.RAdam", lr=0.1),
}


def steps(kind: str, group: RankGroup, name: str, skipped: tuple[int, ...] = ()) -> dict[str, Any]:
    """Three steps, and before those of `skipped` one more with gradients of NaN, which the device skips."""
    state, stepper = build(kind, group, seed=5, has_norm=False, optim=CONFIGS[name])
    batches = batches_of(rank=group.rank, world_size=group.world_size, grad_accum_steps=2, num_steps=3)
    is_kept = []
    for step in range(3):
        if step in skipped:
            before = digests(state, group)["shared"]
            for weight in state.model.parameters():
                weight.grad = torch.full_like(weight, float("nan")) if weight.requires_grad else None
            if name == "radam":  # as on a GPU: on a CPU the host looks first
                PutBack(state.optimizer).step_unless(torch.tensor(True))
            else:
                step_unless(state.optimizer, torch.tensor(True))
            is_kept.append(before == digests(state, group)["shared"])
            state.optimizer.zero_grad()
        stepper.step(state, batches, lr=0.1, wish_to_stop=False)
    weights = {key: whole(weight) for key, weight in state.model.named_parameters()}
    return {"weights": weights, "is_kept": is_kept, "is_fused": state.optimizer.param_groups[0].get("fused")}


def overflow(kind: str, group: RankGroup) -> list[bool]:
    """Of three steps in fp16, whether each changed a weight; only the last rank's samples overflow, in the second."""
    state, stepper = build(
        kind, group, seed=5, dtype=Dtype.fp16, grad_accum_steps=1, has_norm=False, optim=CONFIGS["nesterov"]
    )
    changed = []
    for step in range(3):
        before = digests(state, group)["shared"]
        size = 1e30 if step == 1 and group.rank == group.world_size - 1 else 1.0
        batch = (torch.full((4, 6), size), torch.zeros(4, dtype=torch.int64))
        stepper.step(state, iter([batch]), lr=0.01, wish_to_stop=False)
        after = digests(state, group)["shared"]
        changed.append(any(before[key] != after[key] for key in before if key.startswith(("/model", "/optimizer"))))
    return changed


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    for kind in kinds:

        def act(group: RankGroup, kind: str = kind) -> None:
            said = {name: [steps(kind, group, name), steps(kind, group, name, (0, 2))] for name in CONFIGS}
            (folder / f"{kind}-{group.rank}.json").write_text(json.dumps([said, overflow(kind, group)]))

        on_ranks(KINDS[kind][0], folder, act)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
