"""Random override sets over the shipped conf/ and over a folder of files that steer each other."""

from __future__ import annotations

import dataclasses
import enum
import random
import types
import typing
from pathlib import Path

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS

# Files that do what makes composing hard: they override other groups, set keys of the root package, choose by
# interpolation, nest groups, hold interpolations and missing values.
FILES = {
    "experiment/steers": (
        "# @package _global_\ndefaults:\n  - override /optim: sgd\n  - override /model: cnn\nseed: 5\n"
    ),
    "experiment/plain": "# @package _global_\nexperiment_name: plain\ntrain:\n  num_steps: 9\noptim:\n  lr: 0.5\n",
    "experiment/linked": "# @package _global_\ntrain:\n  num_steps: 40\n  eval_every_steps: ${train.num_steps}\n",
    "experiment/hydra_too": "# @package _global_\nhydra:\n  job:\n    name: mine\nseed: 3\n",
    # Two groups that steer a third one: whichever is merged later wins.
    "precision/steers": "defaults:\n  - override /optim@_global_.optim: sgd\ncompute_dtype: bf16\n",
    "checkpoint/steers": "defaults:\n  - override /optim@_global_.optim: adamw\nevery_steps: 9\n",
    "checkpoint/steers_too": (
        "defaults:\n  - override /optim@_global_.optim: sgd\n  - override /model@_global_.model: gpt\n"
    ),
    "hardware/linked": "name: linked\nnum_nodes: 1\ntime_limit_min: ${train.num_steps}\n",
    "hardware/plain": "name: plain\nnum_nodes: 2\ngpus_per_node: 4\n",
    "hardware/nested": "defaults:\n  - part@_here_: big\n  - _self_\nname: nested\n",
    "hardware/part/big": "num_nodes: 8\ngpus_per_node: 2\n",
    "hardware/part/small": "num_nodes: 1\ngpus_per_node: 1\n",
    "hardware/wide": "# @package _global_\nhardware:\n  name: wide\nseed: 77\n",
    "data/follows": "defaults:\n  - digits_schema\n  - extra@_here_: ${optim}\n  - _self_\nname: digits\n",
    "data/extra/adamw": "num_eval: 11\n",
    "data/extra/sgd": "num_eval: 22\n",
    "model/child": "defaults:\n  - cnn\n  - _self_\nname: child\nnum_channels: 7\n",
    "model/missing": "defaults:\n  - mlp_schema\n  - _self_\nname: missing\nhidden_dim: ???\n",
    "model/flexible": "defaults:\n  - custom_schema\n  - _self_\n_target_: torch.nn.Linear\nkwargs:\n  a: 1\n",
    "debug/both": "# @package _global_\ndefaults:\n  - override /schedule: constant\noptim:\n  weight_decay: 0.25\n",
    "schedule/elsewhere": "# @package train\nmax_grad_norm: 3.5\n",
    "experiment/own": "# @package _global_\nparams:\n  lr: 0.5\n  layers: [1, 2]\n  deep:\n    a: 1\n",
    "debug/tiny": "# @package _global_\nparams:\n  lr: 0.25\n  n: x\n",
    "sweep/free": "# @package _global_\nsweep:\n  axes:\n    seed: [1, 2]\n",
}


def write_files(folder: Path) -> Path:
    """Writes `FILES` under `folder`, for `--config-dir`."""
    for name, text in FILES.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


_INT = ["1", "3", "64", "128", "0", "-7", "1_000", "'7'"]
_FLOAT = ["1e-3", "0.5", ".25", "3", "1E2", "-0.0", "'0.125'", "inf", "5.", "123456789.123456789"]
_BOOL = ["true", "False", "1", "0", "yes", "'true'"]
_TEXT = ["abc", "a-b_c", "'a b'", '"q"', "1", "1.50", "true", "a/b.c:d", "'it\\'s'", "[x]", "nan_", "'1e-3'", "''", "é"]
_LIST = ["[0.5,0.25]", "[]", "[1,2,3]", "['0.5']", "[0.1, 0.2]", "[1e-3,null]"]
_DICT = ["{a:1}", "{}", "{a:{b:[1,2]},c:x}", "{'k':'v w'}", "{a:null,b:true}"]
_WRONG = ["abc", "1.5", "[1]", "{a:1}", "null", "'???'", "${seed}", "${nowhere.x}", "true", "1e400"]


def _values_of(hint: object) -> list[str]:
    inner = [each for each in typing.get_args(hint) if each is not type(None)]
    if type(None) in typing.get_args(hint):
        return [*_values_of(inner[0]), "null"]
    if isinstance(hint, types.UnionType):
        return _values_of(inner[0])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [each.name for each in hint] + [f"'{each.name}'" for each in hint]
    origin = typing.get_origin(hint) or hint
    table: dict[object, list[str]] = {int: _INT, float: _FLOAT, bool: _BOOL, str: _TEXT, list: _LIST, dict: _DICT}
    return table[origin]


def _keys() -> dict[str, list[str]]:
    table = {f"params.{key}": _TEXT + _FLOAT + _INT + _BOOL + ["null", *_LIST, *_DICT] for key in ("lr", "n", "deep.a")}
    hints = typing.get_type_hints(TrainConfig)
    for name, hint in hints.items():
        if not dataclasses.is_dataclass(hint):
            table[name] = _values_of(hint)
            continue
        for variant in VARIANTS.get(name, {"": hint}).values():
            hints_of = typing.get_type_hints(variant)
            for key, inner in ((each.name, hints_of[each.name]) for each in dataclasses.fields(variant)):
                if dataclasses.is_dataclass(inner):
                    deep = typing.get_type_hints(inner)
                    table |= {f"{name}.{key}.{field}": _values_of(each) for field, each in deep.items()}
                elif not (name == "sweep" and key in ("blocks", "stages")):
                    table[f"{name}.{key}"] = _values_of(inner)
    return table


_KEYS = _keys()
_SPECIAL = [
    "+cluster.env.OMP=1", "++cluster.env.OMP=two", "~cluster.env.OMP", "+cluster.env={A:b,C:'d e'}",
    "++optim.lr=0.75", "++optim.new=1", "+optim.new=1", "~train.num_steps", "~tracker", "~debug", "+seed=4",
    "+model.kwargs.width=3", "++model.kwargs.deep={a:[1,2]}", "model.kwargs.a=5", "model.kwargs={b:2}",
    "+sweep.axes.seed=[1,2]", "+sweep.axes={seed:[1,5],optim.lr:[1e-2]}", "sweep.axes={}",
    "optim={lr:0.5}", "optim={lr:0.5,weight_decay:'0.25'}", "train={num_steps:3,max_grad_norm:null}", "train=3",
    "cluster={env:{A:b}}", "cluster.setup=['module load x','a=\\'b\\'']", "+cluster.setup=[more]", "trust=[a,b]",
    "train.eval_every_steps=${train.num_steps}", "sweep_name=x-${model.name}", "paths.runs_dir=${oc.env:HOME}/x",
    "experiment_name='a${seed}b'", "experiment_name='\\${seed}'", "hardware.time_limit_min=${seed}",
    "data={num_workers:${seed}}", "optim.betas.0=0.5", "optim.betas.5=0.5", "optim.betas=${optim.betas}",
    "hydra.verbose=true", "hydra/job_logging=disabled", "+tracker=none", "model@data=cnn", "+experiment=plain",
    "model=null", "model=[mlp,cnn]", "hardware/part@hardware=small", "seed=1,2", "seed", "=3", "optim.lr==3",
    "model={hidden_dim:5}", "hardware={}", "parallel.timeout_s=${seed}", "seed= 5 ",
    "sweep_name=a b", "params.lr=1e-3", "params.lr='1e-3'", "params.n=null", "+params.n=1", "++params.n=2", "~params.n",
    "params.a.b=[1,2]", "params.a=[1,{b:c}]", "params={lr:1,n:{m:2}}", "params=3", "params=null", "params.a.b.c=x",
    "params.n=${seed}", "params.n=???", "params.s=$\\{seed\\}", "params.optim=sgd", "params.lr=1,2", "params.x=a b",
    "sweep_name=$\\{seed\\}", "hardware.source=$\\{optim.lr\\}", "cluster.setup=[$\\{seed\\}]",
    "hardware.source='\\???'",
    "++model.kwargs.deep={a:[$\\{seed\\}]}", "hardware.source=?\\??",
]  # fmt: skip


class Maker:
    """Makes override sets of which most compose; equal seeds make equal sets."""

    def __init__(self, composer: Composer, seed: int) -> None:
        self._random = random.Random(seed)
        self._groups = {group: composer.choices(group) for group in composer.choices_of_root()}
        self._skeleton = self._random.sample(sorted(self._groups), 4)

    def make(self) -> tuple[list[str], int]:
        """One set, and how many of its overrides stand for fixed ones."""
        pick = self._random
        # The same groups again and again, in one order, as on the axes of a grid; sometimes others.
        if pick.random() < 0.1:
            self._skeleton = pick.sample(sorted(self._groups), pick.randint(1, 6))
        lines = [f"{group}={pick.choice(self._groups[group])}" for group in self._skeleton]
        if "custom" in [line.partition("=")[2] for line in lines] and pick.random() < 0.8:
            lines += ["++model._target_=a.B", "++data._target_=c.D", "++optim._target_=e.F"]
        chosen = dict(line.split("=", 1) for line in lines if "=" in line and "." not in line)
        for _ in range(pick.choice([0, 1, 2, 2, 3, 4])):
            lines.append(self._value(chosen))
        if pick.random() < 0.35:
            lines.append(pick.choice(_SPECIAL))
        if pick.random() < 0.3:
            pick.shuffle(lines)
        return lines, pick.choice([0, 0, len(lines) // 2, len(lines)])

    def _value(self, chosen: dict[str, str]) -> str:
        pick = self._random
        key = pick.choice(sorted(_KEYS))
        section = key.partition(".")[0]
        if section in VARIANTS and pick.random() < 0.9:  # a key that the chosen variant has
            default = {"model": "mlp", "data": "digits", "task": "classification", "optim": "adamw"}[section]
            variant = VARIANTS[section].get(chosen.get(section, default))
            if variant is not None:
                key = f"{section}.{pick.choice([each.name for each in dataclasses.fields(variant)])}"
        values = _WRONG if pick.random() < 0.03 else _KEYS[key]
        return f"{key}={pick.choice(values)}"
