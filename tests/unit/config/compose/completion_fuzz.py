"""Random words of a command line: overrides that are right, nearly right, and not at all."""

from __future__ import annotations

import dataclasses
import random
import typing

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS

_GROUPS = (
    "hardware", "cluster", "model", "data", "task", "optim", "schedule", "precision", "parallel", "checkpoint",
    "monitor",
    "tracker", "snapshot", "experiment", "sweep", "debug",
)  # fmt: skip
_SCALARS = (
    "0", "1", "3", "-1", "1e-3", "1e400", "-0.0", "inf", "-inf", "nan", "null", "true", "abc", "a b", "'a b'",
    '"q"', "''",
    "", " ", "???", "'???'", "é", "\\", "\\,", "$", "${seed}", "${nowhere}", "${seed", "${oc.env:HOME}",
    "${oc.env:NO_SUCH}",
    "${oc.decode:'['}", "${now:%Y}", "${optim.lr}", "${.lr}", "${..seed}", "99999999999999999999", "9" * 400,
    "1" + "0" * 4400,
    "[", "]", "{", "}", "[[[]]]", "{a:{b:{}}}", "{1:2}", "{null:1}", "[1,null]", "{lr:1}", "adamw", "cosine",
    "mlp", "../x",
    "/etc/passwd", "a" * 300, "\x00", "\n", "\t1", "1\n2", "\udce9", "none", "auto", "1:2", "a/b", "x=y", "@x",
    "~", "1_0",
)  # fmt: skip
_CALLS = (
    "choice", "range", "glob", "interval", "sort", "shuffle", "int", "float", "str", "bool", "tag", "json_str",
    "foo",
    "extend_list", "dict", "list", "oc.env",
)  # fmt: skip
_ODD_KEYS = (
    "", "optim", "optim.", ".lr", "optim..lr", "optim.lr.x", "optim.betas.0", "optim.betas.9", "optim.betas[0]",
    "hydra",
    "hydra.run.dir", "hydra/launcher", "hydra.searchpath", "hydra.sweeper.params", "model@data",
    "optim@_global_", "optim@x.y",
    "sweep.axes", "sweep.axes.seed", "sweep.zip", "sweep.blocks", "sweep.exclude", "params", "params.x",
    "params.x.y", "x",
    "cluster.env", "cluster.env.A", "cluster.setup", "trust", "model._target_", "train.main", "_target_",
    "defaults", "é",
    "a b", "optim lr", "--x", "model/mlp", "train.guard", "train.guard.on_spike", "train.early_stop", "seed.x",
    "schema", "1",
)  # fmt: skip


def _leaves(hint: object, prefix: str) -> list[str]:
    found: list[str] = []
    for name, inner in typing.get_type_hints(hint).items():
        kinds = list(VARIANTS.get(name, {}).values()) or ([inner] if dataclasses.is_dataclass(inner) else [])
        found += [leaf for kind in kinds for leaf in _leaves(kind, f"{prefix}{name}.")] or [f"{prefix}{name}"]
    return found


_KEYS = sorted(set(_leaves(TrainConfig, "")))


class Words:
    """Makes command lines; equal random states make equal ones."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def make(self) -> list[str]:
        pick = self._chance
        words = [self._word() for _ in range(pick.choice((1, 1, 1, 2, 2, 3)))]
        if pick.random() < 0.5:
            words.insert(pick.randint(0, len(words)), "cluster=" + pick.choice(("local", "slurm", "local")))
        return words

    def _word(self) -> str:
        pick = self._chance
        key = pick.choice(pick.choice((_KEYS, _KEYS, _GROUPS, _ODD_KEYS)))
        sign, equals = (
            pick.choice(("", "", "", "", "+", "++", "~")),
            pick.choice(("=", "=", "=", "=", "=", "", "==", " = ")),
        )
        word = f"{sign}{key}{equals}{self._value(0)}"
        if pick.random() < 0.15:  # a slip of a finger
            at = pick.randint(0, len(word))
            word = word[:at] + pick.choice(",=()[]{}'\"$\\:@~+ #%*.") + word[at + pick.randint(0, 1) :]
        return word

    def _value(self, depth: int) -> str:
        pick, kind = self._chance, self._chance.random()
        if kind < 0.5 or depth > 2:
            return pick.choice(_SCALARS)
        parts = [self._value(depth + 1) for _ in range(pick.choice((0, 1, 2, 2, 3)))]
        text = pick.choice((",", ",", ",", ", ", ":", "=")).join(parts)
        if kind < 0.65:
            return text
        if kind < 0.85:
            return f"{pick.choice(_CALLS)}({text})"
        return f"[{text}]" if kind < 0.93 else f"{{{text}}}"
