"""Facts about the making of a checkpoint, and the check whether a start may resume from it.

The verdicts are those of config/resume_contract.py. Facts are gathered only on rank 0: reading a data set or hashing
sources once is enough, because all ranks of a job run the same code. Every checkpoint's manifest holds the facts as
`meta.made_with`.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_trainer import __version__
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.mesh import MeshShape, mesh_shape
from hpc_trainer.config.resume_contract import compare, default_facts, lines_of, refusal
from hpc_trainer.config.schema.key import Effect
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.targets import packages_of
from hpc_trainer.errors import IncompatibleResumeError, LoopError
from hpc_trainer.runtime.code import code_digests
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointInfo
from hpc_trainer.training.data.preprocessing import described

# A checkpoint may be passed on to others, so the site's environment and folders must not be in it; they never matter.
_NOT_KEPT = frozenset({"cluster", "paths"})


@dataclass(slots=True)
class ResumeContract:
    """Facts of one start, and the allowed differences. The default has no facts: it compares and saves nothing.

    After `check` has passed, `changes` describes the differences from the checkpoint, one line each.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)
    """The facts that `describe` added."""
    fed_with: dict[str, Any] | None = None
    """Class names and preprocessing of `dataset` (`training/data/preprocessing.py`), for users of the model. A resume
    compares the data set's fingerprint instead."""
    allow: tuple[str, ...] = ()
    resume_from: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    mesh: MeshShape | None = None
    """Shape of the mesh; None if all ranks are data-parallel, or if a user's own loop leaves it unknown."""

    @classmethod
    def of(cls, config: TrainConfig, group: RankGroup) -> ResumeContract:
        """Return the contract of a start with this configuration; call `describe` for data. Not collective."""
        checkpoint = config.checkpoint
        contract = cls(allow=tuple(checkpoint.allow_changes), resume_from=checkpoint.resume_from)
        contract.mesh = mesh_shape(config.parallel, group.world_size)
        if group.is_rank_zero:
            contract.facts = {
                **{name: value for name, value in to_plain(config).items() if name not in _NOT_KEPT},
                "code": code_digests(packages_of(config)),
                "versions": _versions(group.device),
                "device": {"type": group.device.type, "name": kind_of(group.device).name(group.device)},
                "world_size": group.world_size,
            }
            contract.defaults = default_facts(config)
        return contract

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Add facts; a data set adds its size, shapes and fingerprint.

        Raises:
            LoopError: a name is taken by the configuration, or a value is not JSON.
        """
        taken = sorted(self.facts.keys() & facts.keys())
        if taken:
            raise LoopError(f"run.describe({taken[0]}=...): the name is taken. Choose another.")
        prints = {name: fingerprint(value) for name, value in facts.items()}
        with contextlib.suppress(Exception):  # attributes of a user's data set, which training does not need
            if hasattr(facts.get("dataset"), "__getitems__"):
                self.fed_with = described(facts["dataset"])
        try:
            # As it will come back from the manifest: a tuple would never be equal to the list that was read.
            self.described |= json.loads(json.dumps(prints, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise LoopError(f"run.describe takes JSON with finite numbers, and got {prints!r}: {error}.") from error
        self.facts |= self.described

    def recorded(self) -> dict[str, Any]:
        """Return the facts for the record of an attempt: `code` as in `facts`, and `data` with those of `describe`."""
        return {"code": self.facts.get("code", {}), "data": self.described}

    def meta(self) -> dict[str, Any]:
        """Return the values that the manifest of a checkpoint keeps."""
        fed_with = {} if self.fed_with is None else {"fed_with": self.fed_with}
        return {"made_with": self.facts, **fed_with} if self.facts else {}

    def is_same_world(self, checkpoint: CheckpointInfo, group: RankGroup) -> bool:
        """Return True if each rank's own state in the checkpoint belongs to the same place on the mesh. Not collective.

        The same number of ranks on another mesh is not enough: tensor-parallel neighbours must draw the same random
        numbers, but data-parallel ranks have different ones.
        """
        if self.mesh is None or checkpoint.world_size != group.world_size:
            return checkpoint.world_size == group.world_size
        made_with = checkpoint.meta.get("made_with")
        was = made_with.get("parallel", {}) if isinstance(made_with, dict) else {}
        return (was.get("pipeline_parallel", 1), was.get("tensor_parallel", 1)) == (self.mesh.pp, self.mesh.tp)

    def stream(self, rank: int) -> int | str:
        """Return the number that, with the seed, determines the random numbers of a rank (`MeshShape.stream`)."""
        return rank if self.mesh is None else self.mesh.stream(rank)

    def check(self, checkpoint: CheckpointInfo, group: RankGroup) -> None:
        """Compare the facts with the checkpoint, and print the differences. Collective.

        Raises:
            IncompatibleResumeError: a difference is not allowed; raised on all ranks.
        """
        refused = group.broadcast(self._compare(checkpoint) if group.is_rank_zero else None)
        if refused is not None:
            raise IncompatibleResumeError(refused)

    def _compare(self, checkpoint: CheckpointInfo) -> str | None:
        """Return the message that refuses the resume, or None; for rank 0."""
        was = checkpoint.meta.get("made_with")
        if not self.facts:
            return None
        if not isinstance(was, dict):
            print(
                f"{checkpoint.path.name} does not say what it was made with (saved by an older version): not compared."
            )
            return None
        differences = compare(was, self.facts, allow=self.allow, defaults=self.defaults)
        for line in lines_of(differences):
            print(line)
        self.changes = [f"{item.effect.value}: {item}" for item in differences if item.effect is not Effect.safe]
        is_own = self.resume_from is None or Path(self.resume_from) not in (checkpoint.path, *checkpoint.path.parents)
        return refusal(differences, str(checkpoint.path), is_own=is_own)


def fingerprint(value: Any) -> Any:
    """Return JSON that distinguishes data sets; other values are returned unchanged.

    For an object with `__len__`, `input_shape` and `num_classes` it has these, and the result of `fingerprint()` if the
    object has this method: JSON that is cheap to make and equal for equal content (no times, no paths).
    """
    facts: dict[str, Any] = {}
    if hasattr(value, "input_shape") and hasattr(value, "__len__"):
        shape = list(value.input_shape or ())
        num_samples = None if getattr(value, "stream", None) else len(value)
        facts = {"num_samples": num_samples, "input_shape": shape, "num_classes": value.num_classes}
    own = getattr(value, "fingerprint", None)
    if callable(own):
        facts["digest"] = own()
    return facts or value


def _versions(device: torch.device) -> dict[str, Any]:
    return {
        "hpc_trainer": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **kind_of(device).versions(),
    }
