"""The resume contract: what may differ between a checkpoint and the start that goes on from it. Facts in, verdicts out.

    safe                   the same training, or the same result: one line in the log
    changes-the-schedule   another course, or other last bits, from here on: a warning, recorded in the journal
    incompatible           another training: refused with the differences, unless `checkpoint.allow_changes` names them

Reads no file and imports no torch: the facts are gathered in `training/contract.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.keys import KEYS
from hpc_trainer.config.load import to_plain
from hpc_trainer.config.schema.key import Effect
from hpc_trainer.config.schema.train import TrainConfig

# Facts that are no keys of the configuration. A name stands for all below it.
FACTS: dict[str, Effect] = {
    "world_size": Effect.schedule,
    "device": Effect.schedule,
    "fit": Effect.schedule,  # the micro-batch that train.micro_batch_size=auto has found
    # Other kernels; other code, of which nobody can say here what it changes.
    "versions": Effect.schedule,
    "code": Effect.schedule,
    "libraries": Effect.schedule,  # that a feature builds the model with
    # Their random generators are the same in all releases that we run on (NEP 19 for numpy's).
    "versions.python": Effect.safe,
    "versions.numpy": Effect.safe,
    "dataset": Effect.incompatible,
    "eval_dataset": Effect.incompatible,
}
ABSENT = "(none)"
_POWERSGD = "powersgd"
_EFFECTS = FACTS | {name: key.resume for name, key in KEYS.items() if key.resume is not None}


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact that is not as it was. `is_allowed`: by `checkpoint.allow_changes`."""

    key: str
    was: Any
    now: Any
    effect: Effect
    is_allowed: bool = False

    def __str__(self) -> str:
        """`optim.lr: 0.1 -> 0.2`."""
        return f"{self.key}: {_short(self.was)} -> {_short(self.now)}"


def effect_of(key: str) -> Effect:
    """What a difference in `key` does: as its field says, else its section; of all others the worst is assumed."""
    while key:
        if key in _EFFECTS:
            return _EFFECTS[key]
        key = key.rpartition(".")[0]
    return Effect.incompatible


def compare(
    was: Mapping[str, Any], now: Mapping[str, Any], *, allow: Collection[str] = (), defaults: Mapping[str, Any] = {}
) -> list[Difference]:
    """Every difference of two sets of facts, the worst first.

    Args:
        was: facts of the checkpoint, nested or flat; a configuration's sections stand at the top.
        now: facts of this start, of the same form.
        allow: keys that may differ although they are incompatible; a name covers what is below it.
        defaults: values of keys that an older version did not have: such a key is none if it is at its default now.
    """
    old, new, usual = flatten(was), flatten(now), flatten(defaults)
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, ABSENT), new.get(key, ABSENT)
        if before == after or (key not in old and key in usual and usual[key] == after):
            continue
        effect = effect_of(key)
        if key == "train.num_steps" and old.get("schedule.name") == new.get("schedule.name") == "constant":
            effect = Effect.safe  # a learning rate that does not know where the end is
        if key == "train.num_steps" and _has_rounds(new):
            effect = Effect.schedule  # the last step ends a round
        if key == "world_size" and (_has_rounds(new) or new.get("parallel.comm_hook") == _POWERSGD):
            effect = Effect.incompatible  # nobody has the state of a rank more, and nobody wants that of one less
        if key == "parallel.comm_hook" and _POWERSGD in (before, after):
            effect = Effect.incompatible  # it has a state, the others none
        if key == "parallel.bucket_cap_mb" and new.get("parallel.comm_hook") == _POWERSGD:
            effect = Effect.incompatible  # that state is by bucket
        is_allowed = any(key == name or key.startswith(name + ".") for name in allow)
        found.append(Difference(key, before, after, effect, is_allowed))
    order = list(reversed(Effect))
    return sorted(found, key=lambda each: (order.index(each.effect), each.key))


def _has_rounds(flat: Mapping[str, Any]) -> bool:
    return bool(flat.get("parallel.sync", "every_step") != "every_step")


def refusal(differences: Collection[Difference], checkpoint: str, *, is_own: bool = True) -> str | None:
    """The message that refuses to go on, or None if every incompatible difference is allowed.

    Args:
        is_own: the checkpoint is the run's own; else `checkpoint.resume_from` named it.
    """
    refused = [each for each in differences if each.effect is Effect.incompatible and not each.is_allowed]
    if not refused:
        return None
    lines = "\n".join(f"  {each}" for each in refused)
    keys = ",".join(each.key for each in refused)
    anew = "--fresh, or another sweep_name" if is_own else "without checkpoint.resume_from"
    return (
        f"{checkpoint} is of another training, and this start refuses to go on from it (was -> is):\n{lines}\n"
        f"Take the change back, or begin anew ({anew}). To go on all the same, where weights and optimizer still fit: "
        f"checkpoint.allow_changes=[{keys}]"
    )


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. Lists are values; an empty mapping is nothing."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def default_facts(config: TrainConfig) -> dict[str, Any]:
    """The values that the keys of this configuration have where nobody sets them."""
    sections = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    fresh: dict[str, Any] = {
        name: type(value)()
        for name, value in sections.items()
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
    }
    return to_plain(TrainConfig(**fresh))


def lines_of(differences: Collection[Difference]) -> Iterator[str]:
    """What the log says of differences that do not end the run, a line for each effect."""
    words = {
        Effect.incompatible: "WARNING: goes on with what is incompatible, as checkpoint.allow_changes says",
        Effect.schedule: "WARNING: goes on, and from here on the schedule or the last bits are others",
        Effect.safe: "differs from the checkpoint, and does no harm",
    }
    for effect, text in words.items():
        listed = ", ".join(str(each) for each in differences if each.effect is effect)
        if listed:
            yield f"{text}: {listed}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
