"""All pairs of the table of what goes with what, each in a small configuration of its own.

Each choice is composed once; two of them are put together in memory: composing takes 0.1 s, this 1 ms.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from hpc_trainer.config.load import from_plain, to_plain
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.config.table.choice import holds, split
from hpc_trainer.config.table.declarations import declarations
from hpc_trainer.config.table.feature import Feature, Row
from tests.composed import composed

FEATURES = {each.name: each for each in declarations()}
_BASE = ("train.num_steps=2", "train.global_batch_size=16", "train.eval_every_steps=0", "schedule=constant")
_MODELS = {
    "gpt": (
        "model=gpt", "data=text_bytes", "data.seq_len=16", "data.eval_fraction=0.01", "model.num_layers=2",
        "model.embed_dim=16", "model.num_heads=2",
    ),
    "resnet": (
        "model=resnet18", "model.width=8", "data=synthetic_images", "data.num_samples=100", "data.num_eval=8",
        "data.image_size=8",
    ),
}  # fmt: skip
_GROUP_KEYS = ("strategy", "compute_dtype", "executor")
"""What a file of parallel/, precision/ or cluster/ is chosen for."""
_Leaf = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ground:
    """What a pair is tried on: a model with its data, and so many ranks of a kind."""

    model: str
    ranks: int
    is_cpu: bool

    @property
    def words(self) -> tuple[str, ...]:
        """Without the ranks, which whoever starts them says."""
        return (*_MODELS[self.model], *_BASE)


# What this machine can train comes first. HSDP and tensor parallel take eight ranks together.
GROUNDS = [
    *(Ground(model, ranks, is_cpu) for is_cpu, ranks, model in itertools.product((True, False), (2, 1, 4), _MODELS)),
    Ground("gpt", 8, False),
]


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Every two, once."""
    for one, other in itertools.combinations(sorted(FEATURES), 2):
        yield FEATURES[one], FEATURES[other]


def words(ground: Ground, *features: Feature) -> list[str]:
    """What one types for them there."""
    return _typed(ground.words, (word for each in features for word in each.example.split()))


@functools.cache
def problems(ground: Ground, *features: Feature) -> tuple[str, ...] | None:
    """What stands against them there, together or one alone; None: they are two values of one key, or one of them
    turns the other off.
    """
    said: dict[_Leaf, Any] = {}
    for feature in features:
        for leaf, value in _changes(feature.example).items():
            if said.setdefault(leaf, value) != value:
                return None
    config = _changed(ground, said)
    if config is None or not all(each.is_on(config) for each in features):
        return None
    return tuple(find_problems(config))


def _changed(ground: Ground, said: dict[_Leaf, Any]) -> TrainConfig | None:
    """None where a key is of another model."""
    plain = copy.deepcopy(_plain(ground))
    for (*path, name), value in sorted(said.items(), key=lambda each: len(each[0])):  # sections before keys in them
        owner = plain
        for each in path:
            owner = owner.get(each, {})
        if name not in owner:
            return None
        owner[name] = copy.deepcopy(value)
    config: TrainConfig = from_plain(plain)
    return config


def without(ground: Ground, feature: Feature) -> TrainConfig | None:
    """After its example what one types to be without it, the first way of it."""
    return _changed(ground, _changes(f"{feature.example} {feature.without.partition(' or ')[0]}"))


def breaking(feature: Feature, row: Row) -> TrainConfig:
    """A configuration that breaks this row."""
    is_excluded = row in feature.excludes
    how = (
        _words_for(row.what)
        if is_excluded
        else next((word for need, word in _WITHOUT.items() if row.what.startswith(need)), "")
    )
    when = _words_for(row.when)
    orders = (f"{feature.example} {when} {how}", f"{how} {feature.example} {when}")
    for ground, words in itertools.product(GROUNDS, orders):
        config = _changed(ground, _changes(words))
        if (
            config is not None
            and feature.is_on(config)
            and holds(config, row.what) is is_excluded
            and (not row.when or holds(config, row.when))
        ):
            return config
    raise AssertionError(f"{orders}: on no ground")


# What one types against a need.
_WITHOUT = {"parallel=ddp": "parallel=fsdp", "data=custom": "data=digits", "parallel=fsdp": "parallel=ddp",
            "optim=": "optim=muon", "model=": "model=hf",
            "train.compile=true": "train.compile=false",
            "optim.lr_base_batch": "optim.lr_base_batch=null", "init_from.path": "init_from.path=null"}  # fmt: skip
# What one types for a choice that names no value.
_WITH = {"train.main": "mine.main", "train.label_smoothing": "0.1", "train.grad_accum_steps": "2",
         "train.max_grad_norm": "1.0", "train.batch_per_rank": "true", "train.max_skipped_steps": "10",
         "train.compile_mode": "max_autotune", "optim.layer_decay": "0.5", "checkpoint.resume_from": "runs/a",
         "augment.mixup_alpha": "0.2", "augment.label_noise": "0.1"}  # fmt: skip
_OTHER = {"precision": ("fp32", "bf16", "fp16")}


def _words_for(choice: str) -> str:
    """What one types for its first way."""
    return " ".join(_word_for(part) for part in choice.partition(" or ")[0].split(" & ") if part)


def _word_for(part: str) -> str:
    key, sign, values = split(part)
    if key in ("hardware.world_size", "hardware.device_type"):  # a ground has it
        return ""
    if sign == "=":
        first = values.partition("|")[0]
        # Models and data sets come in pairs, and hardware.device counts no CUDA devices.
        beside = {"mlp": "data=digits", "cnn": "data=digits"}.get(first, "") if key == "model" else ""
        chosen = VARIANTS[key][first]().name if key == "model" else first  # of a family its usual one
        return f"{key}={chosen} {beside}"
    if sign == "!=" and key in _OTHER:
        return f"{key}={next(each for each in _OTHER[key] if each not in values.split('|'))}"
    if sign == "<":
        return f"{key}={int(values) // 2}"
    if sign == ">":
        return f"{key}={0.5 if key == 'model.dropout' else int(values) + 1}"
    if key in _WITH:
        return f"{key}={_WITH[key]}"
    return next(each.example for each in FEATURES.values() if key in each.on)


def home(*features: Feature) -> Ground | None:
    """The first ground on which they are taken."""
    return next((ground for ground in GROUNDS if problems(ground, *features) == ()), None)


@functools.cache
def _changes(words: str) -> dict[_Leaf, Any]:
    """What they change: a key, or all of a section that has kinds; of two for a key the later one."""
    found: dict[_Leaf, Any] = {}
    for index, word in enumerate(words.split()):
        key, _, value = word.lstrip("+").partition("=")
        if "." in key:
            found[tuple(key.split("."))] = _value(value)
            continue
        # A key of the section may have no default.
        its_own = itertools.takewhile(lambda each: each.startswith(f"{key}."), words.split()[index + 1 :])  # noqa: B023
        was, now = _composed(())[key], _composed((word, *its_own))[key]
        if key in VARIANTS:
            found = {leaf: each for leaf, each in found.items() if leaf[0] != key} | {(key,): now}
        else:
            found |= {(key, name): value for name, value in now.items() if value != was[name] or name in _GROUP_KEYS}
    return found


def _value(text: str) -> Any:
    """Of a key; names with values stand in braces, without spaces."""
    if not text.startswith("{"):
        return yaml.safe_load(text)
    items = (each.partition(":") for each in text[1:-1].split(",") if each)
    return {name: yaml.safe_load(value) for name, _, value in items}


@functools.cache
def _plain(ground: Ground) -> dict[str, Any]:
    hardware = _composed((f"hardware={'cpu' if ground.is_cpu else 'gpu'}_x1",))["hardware"]
    ranks = {"tasks_per_node" if ground.is_cpu else "gpus_per_node": ground.ranks}
    return {**_composed(ground.words), "hardware": {**hardware, **ranks}}


@functools.cache
def _composed(words: tuple[str, ...]) -> dict[str, Any]:
    return to_plain(composed(_typed((*_BASE, "cluster=slurm"), words)))


def _typed(ground: Iterable[str], examples: Iterable[str]) -> list[str]:
    """Each key once, as said last; another file of a group than the ground's has other keys."""
    typed = {word.partition("=")[0]: word for word in examples}
    groups = tuple(f"{key}." for key in typed if "." not in key)
    kept = {word.partition("=")[0]: word for word in ground if not word.startswith(groups)}
    return list({**kept, **typed}.values())
