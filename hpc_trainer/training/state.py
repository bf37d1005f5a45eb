"""All that a resumed run needs to go on with the same bits, and putting it back without anything left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpc_trainer.errors import CheckpointError
from hpc_trainer.training.rng import rng_state, set_rng_state

_COUNTERS = ("step", "samples_seen", "best_metric")


@dataclass(slots=True, kw_only=True)
class TrainState:
    """What training changes. The learning rate and the order of samples are functions of `step`.

    `model` is the bare module, without DDP around it. `step` counts optimizer steps done, `samples_seen` the
    samples of all ranks in them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    samples_seen: int = 0
    best_metric: float | None = None

    def replicated_state(self) -> dict[str, Any]:
        """What is the same on all ranks. The tensors are those in use, not copies: save before the next step."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            **{name: getattr(self, name) for name in _COUNTERS},
        }

    def rank_state(self) -> dict[str, Any]:
        """What differs between ranks: random state and buffers (batch norm's statistics see one rank's samples)."""
        return {"rng": rng_state(), "buffers": self._buffers()}

    def load(self, replicated: Mapping[str, Any], per_rank: Mapping[str, Any]) -> None:
        """Puts everything back but the random state: that is `restore_rng`, when the data loader stands.

        Strict: what is saved and what is here must have the same keys, shapes and number formats. The trees are
        used up: their tensors may become the optimizer's own. Not collective.

        Raises:
            CheckpointError: the first differences, by name. The state may then be half loaded: build it anew.
        """
        _check_keys("replicated state", replicated, {"model", "optimizer", "scaler", *_COUNTERS})
        _check_keys("rank state", per_rank, {"rng", "buffers"})
        _check_tensors("model", replicated["model"], self.model.state_dict())
        _check_tensors("buffers", per_rank["buffers"], self._buffers())
        _check_keys("scaler", replicated["scaler"], set(self.scaler.state_dict()))

        self.model.load_state_dict(replicated["model"])
        for name, buffer in self._buffers().items():
            buffer.copy_(per_rank["buffers"][name])
        self._load_optimizer(replicated["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(dict(replicated["scaler"]))
        for name in _COUNTERS:
            setattr(self, name, replicated[name])

    def restore_rng(self, per_rank: Mapping[str, Any]) -> None:
        """Restores this rank's random state; nothing for {}, a fresh start. Call it last before the first step."""
        if per_rank:
            set_rng_state(per_rank["rng"])

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that the model's state holds; non-persistent ones are made anew by the model."""
        saved = self.model.state_dict()
        return {name: saved[name] for name, _ in self.model.named_buffers() if name in saved}

    def _load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Strict where torch is not: a fresh state_dict is empty, unknown keys pass, and floats are cast.

        So what the optimizer says afterwards is compared with what was saved.
        """
        groups = self.optimizer.state_dict()["param_groups"]
        if len(groups) != len(saved["param_groups"]):
            raise CheckpointError(
                f"optimizer: {len(saved['param_groups'])} groups of weights are saved and {len(groups)} are here; the "
                "model or optim.* has changed. Resume with the configuration that saved."
            )
        for index, (here, there) in enumerate(zip(groups, saved["param_groups"], strict=True)):
            _check_keys(f"optimizer, group {index}", there, set(here))
            if here["params"] != there["params"]:
                raise CheckpointError(
                    f"optimizer, group {index}: {len(there['params'])} weights are saved and {len(here['params'])} are "
                    "here, or in another order; the model has changed. Resume with the configuration that saved."
                )
        _check_shapes(self.optimizer, saved["state"])
        self.optimizer.load_state_dict(dict(saved))
        loaded = self.optimizer.state_dict()["state"]
        _check_keys("optimizer state", saved["state"], set(loaded))
        for index, values in saved["state"].items():
            _check_keys(f"optimizer state of weight {index}", values, set(loaded[index]))
            _check_tensors(f"optimizer state of weight {index}", values, loaded[index])


def _check_keys(where: str, saved: Mapping[Any, Any], here: set[Any]) -> None:
    unread, unfilled = (sorted(map(str, keys)) for keys in (set(saved) - here, here - set(saved)))
    if unread or unfilled:
        raise CheckpointError(
            f"{where}: saved but not here: {unread[:5]}; here but not saved: {unfilled[:5]} "
            f"({len(unread)} and {len(unfilled)} in all). The configuration or the code has changed; resume with that "
            "which saved, or start anew with --fresh."
        )


def _check_tensors(where: str, saved: Mapping[Any, Any], here: Mapping[Any, Any]) -> None:
    """Same keys, and tensors of the same shape and number format."""
    _check_keys(where, saved, set(here))
    for name, value in here.items():
        there = saved[name]
        if _form(there) != _form(value):
            raise CheckpointError(
                f"{where}: {name} is saved as {_form(there)} and is {_form(value)} here; they must be alike. The "
                "configuration or the code has changed; resume with that which saved, or start anew with --fresh."
            )


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _check_shapes(optimizer: torch.optim.Optimizer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Strict where torch is not: it takes moments of any shape and fails in the next step."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for index, values in saved.items():
        if index not in range(len(weights)):
            raise CheckpointError(
                f"optimizer state is saved for weight {index}, and there are {len(weights)} here. The model has "
                "changed; resume with the configuration that saved, or start anew with --fresh."
            )
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != weights[index].shape:
                raise CheckpointError(
                    f"optimizer state of weight {index}: {name} is saved with shape {list(value.shape)} and the weight "
                    f"has {list(weights[index].shape)} here. Resume with the configuration that saved."
                )
