"""`prune` and `qat`: training that prepares a model to be made smaller (docs/prune.md)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, SCHEDULE, key, only_with


class PruneMethod(str, enum.Enum):
    """Group of weights that become zero together."""

    none = "none"
    unstructured = "unstructured"
    n_m = "n_m"
    channels = "channels"


# Created by a call, because `global` is a keyword of Python.
PruneScope = enum.Enum("PruneScope", {"layer": "layer", "global": "global"})
"""Weights among which the smallest are searched."""

_ON = only_with("prune.method")
_BY_SHARE = only_with("prune.method=unstructured", "prune.method=channels")
_N_M = only_with("prune.method=n_m")


@dataclass(kw_only=True, slots=True)
class PruneConfig:
    method: PruneMethod = key(PruneMethod.none, ALWAYS, resume=INCOMPATIBLE)
    """unstructured: single weights. n_m: all but the `n` largest of each `m` weights in a row of inputs. channels:
    whole channels of convolutions and hidden units of linear layers, so that an export is really smaller. none: off."""
    sparsity: float = key(0.5, _BY_SHARE, limits="(0, 1)")
    """Share of the weights that are zero at the end; with `channels` share of the channels."""
    scope: PruneScope = key(PruneScope["layer"], _BY_SHARE, resume=INCOMPATIBLE)
    """layer: the same share of each layer. global: the smallest weights of all layers together."""
    n: int = key(2, _N_M, resume=INCOMPATIBLE, limits="≥ 1")
    """Number of weights that stay out of each `m`; less than `m`."""
    m: int = key(4, _N_M, resume=INCOMPATIBLE, limits="≥ 2")
    """Number of neighbours along the inputs of a layer; GPUs from Ampere on compute 2 of 4 faster."""
    start_step: int = key(0, _ON, limits="≥ 0")
    """Steps before sparsity begins to grow."""
    end_step: int | None = key(None, _ON, limits="≥ 0")
    """Steps after which the full sparsity is reached. With the value of `start_step` it is reached at once, with 0
    before the first step. null: half of `train.num_steps`, but at least `start_step`."""
    every_steps: int = key(10, _ON, limits="≥ 1")
    """Steps between two choices of the weights that become zero; a zero weight stays zero."""
    include: list[str] = key([], _ON, resume=INCOMPATIBLE)
    """Names of weights, with * and ?, to prune, as ['blocks.*']; []: all matrices and filters except embeddings."""
    exclude: list[str] = key([], _ON, resume=INCOMPATIBLE)
    """Names of weights, with * and ?, to leave unpruned although `include` names them, as ['classifier.*']."""


class QatTo(str, enum.Enum):
    """Format to which weights are rounded; with `dynamic_` the inputs of layers too."""

    none = "none"
    int8 = "int8"
    int4 = "int4"
    dynamic_int8 = "dynamic_int8"
    dynamic_int4 = "dynamic_int4"


_QAT = only_with("qat.to")


@dataclass(kw_only=True, slots=True)
class QatConfig:
    to: QatTo = key(QatTo.none, ALWAYS)
    """Linear layers compute with numbers rounded as an export will have them, so that training adapts to it (torchao).
    int8: weights, one scale a row. int4: weights, one scale for each `group_size` of a row. dynamic_int8, dynamic_int4:
    the inputs too, in 8 bits, one scale for each row of a batch. Evaluations round as well. none: off."""
    group_size: int = key(32, only_with("qat.to=int4", "qat.to=dynamic_int4"), limits="≥ 1")
    """Number of 4-bit weights that share a scale. It must divide the inputs of a layer; other layers are not
    rounded."""
    start_step: int = key(0, _QAT, resume=SCHEDULE, limits="≥ 0")
    """Steps before rounding begins."""
    exclude: list[str] = key([], _QAT)
    """Names of linear layers, with * and ?, that are not rounded, as ['head']."""
