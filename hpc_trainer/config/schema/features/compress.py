"""`prune` and `qat`: a training that knows how its model will be made smaller (docs/prune.md)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hpc_trainer.config.schema.key import ALWAYS, INCOMPATIBLE, SCHEDULE, key, only_with


class PruneMethod(str, enum.Enum):
    """What becomes zero together."""

    none = "none"
    unstructured = "unstructured"
    n_m = "n_m"
    channels = "channels"


# By call: global is no name in Python.
PruneScope = enum.Enum("PruneScope", {"layer": "layer", "global": "global"})
"""Among which weights the smallest are looked for."""

_ON = only_with("prune.method")
_BY_SHARE = only_with("prune.method=unstructured", "prune.method=channels")
_N_M = only_with("prune.method=n_m")


@dataclass(kw_only=True, slots=True)
class PruneConfig:
    method: PruneMethod = key(PruneMethod.none, ALWAYS, resume=INCOMPATIBLE)
    """unstructured: single weights. n_m: of each `m` weights in a row of inputs all but the `n` largest. channels:
    whole channels of convolutions and hidden units of linear layers, so that an export is really smaller. none: off."""
    sparsity: float = key(0.5, _BY_SHARE, limits="(0, 1)")
    """Share of the weights that are zero at the end; of channels with `channels`."""
    scope: PruneScope = key(PruneScope["layer"], _BY_SHARE, resume=INCOMPATIBLE)
    """layer: the same share of each layer. global: the smallest of all layers together."""
    n: int = key(2, _N_M, resume=INCOMPATIBLE, limits="≥ 1")
    """Weights that stay of each `m`; less than `m`."""
    m: int = key(4, _N_M, resume=INCOMPATIBLE, limits="≥ 2")
    """Neighbours along the inputs of a layer; GPUs from Ampere on compute 2 of 4 faster."""
    start_step: int = key(0, _ON, limits="≥ 0")
    """Steps that are done before sparsity begins to grow."""
    end_step: int | None = key(None, _ON, limits="≥ 0")
    """Steps after which it is reached; `start_step`: all at once then, with 0 before the first step. null: half of
    `train.num_steps`, but no less than `start_step`."""
    every_steps: int = key(10, _ON, limits="≥ 1")
    """Steps from one choice of what becomes zero to the next; what is zero stays zero."""
    include: list[str] = key([], _ON, resume=INCOMPATIBLE)
    """Names of weights, with * and ?, that are pruned, as ['blocks.*']; []: all matrices and filters but
    embeddings."""
    exclude: list[str] = key([], _ON, resume=INCOMPATIBLE)
    """Of those the ones that stay whole, as ['classifier.*']."""


class QatTo(str, enum.Enum):
    """What weights, and with `dynamic_` the inputs of layers too, are rounded to."""

    none = "none"
    int8 = "int8"
    int4 = "int4"
    dynamic_int8 = "dynamic_int8"
    dynamic_int4 = "dynamic_int4"


_QAT = only_with("qat.to")


@dataclass(kw_only=True, slots=True)
class QatConfig:
    to: QatTo = key(QatTo.none, ALWAYS)
    """Linear layers compute with numbers rounded as an export will have them, and learn to live with it (torchao).
    int8: weights, a scale a row. int4: weights, a scale for each `group_size` of a row. dynamic_int8, dynamic_int4: the
    inputs too, in 8 bits, a scale for each row of a batch. Evaluations round as well. none: off."""
    group_size: int = key(32, only_with("qat.to=int4", "qat.to=dynamic_int4"), limits="≥ 1")
    """Weights of 4 bits that share a scale; it must divide the inputs of a layer, others stay as they are."""
    start_step: int = key(0, _QAT, resume=SCHEDULE, limits="≥ 0")
    """Steps that are done before rounding begins."""
    exclude: list[str] = key([], _QAT)
    """Names of linear layers, with * and ?, that stay as they are, as ['head']."""
