"""The resume contract: which facts may differ between a checkpoint and the start that resumes from it.

    safe                   the same training, or the same result: one line in the log
    changes-the-schedule   another schedule, or other last bits, from here on: a warning, recorded in the journal
    incompatible           another training: refused with the differences, unless `checkpoint.allow_changes` names them

Reads no file and imports no torch: the facts are gathered in `training/contract.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.schema.key import Effect
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.store import KEYS

# Facts that are not keys of the configuration. A name stands for everything below it.
FACTS: dict[str, Effect] = {
    "world_size": Effect.schedule,
    "device": Effect.schedule,
    "fit": Effect.schedule,  # the micro-batch that train.micro_batch_size=auto has found
    # Other kernels, or other code, whose effect cannot be known here.
    "versions": Effect.schedule,
    "code": Effect.schedule,
    "libraries": Effect.schedule,  # those with which a feature builds the model
    # The random generators of Python and numpy are the same in all supported releases (NEP 19 for numpy's).
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
    """Fact that differs from the checkpoint. `is_allowed` is true if `checkpoint.allow_changes` names the fact."""

    key: str
    was: Any
    now: Any
    effect: Effect
    is_allowed: bool = False

    def __str__(self) -> str:
        """Return the difference as `optim.lr: 0.1 -> 0.2`."""
        return f"{self.key}: {_short(self.was)} -> {_short(self.now)}"


def effect_of(key: str) -> Effect:
    """Return the effect of a difference in `key`: as its field or its section says; an unknown key is incompatible."""
    while key:
        if key in _EFFECTS:
            return _EFFECTS[key]
        key = key.rpartition(".")[0]
    return Effect.incompatible


def compare(
    was: Mapping[str, Any], now: Mapping[str, Any], *, allow: Collection[str] = (), defaults: Mapping[str, Any] = {}
) -> list[Difference]:
    """Return every difference of two sets of facts, the worst first.

    Args:
        was: facts of the checkpoint, nested or flat; a configuration's sections are at the top level.
        now: facts of this start, of the same form.
        allow: keys that may differ although they are incompatible; a name covers every key below it.
        defaults: values of keys that an older version did not have: such a key does not differ if it has its default
            now.
    """
    old, new, usual = flatten(was), flatten(now), flatten(defaults)
    differences = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, ABSENT), new.get(key, ABSENT)
        if before == after or (key not in old and key in usual and usual[key] == after):
            continue
        effect = effect_of(key)
        if key == "train.num_steps" and old.get("schedule.name") == new.get("schedule.name") == "constant":
            effect = Effect.safe  # a constant learning rate does not depend on the last step
        if key == "train.num_steps" and _has_rounds(new):
            effect = Effect.schedule  # the last step ends a round
        if key == "world_size" and (_has_rounds(new) or new.get("parallel.comm_hook") == _POWERSGD):
            effect = Effect.incompatible  # an added rank has no state, a removed rank's state is lost
        if key == "parallel.comm_hook" and _POWERSGD in (before, after):
            effect = Effect.incompatible  # PowerSGD has a state, the other hooks have none
        if key == "parallel.bucket_cap_mb" and new.get("parallel.comm_hook") == _POWERSGD:
            effect = Effect.incompatible  # PowerSGD's state is by bucket
        is_allowed = any(key == name or key.startswith(name + ".") for name in allow)
        differences.append(Difference(key, before, after, effect, is_allowed))
    order = list(reversed(Effect))
    return sorted(differences, key=lambda difference: (order.index(difference.effect), difference.key))


def _has_rounds(flat: Mapping[str, Any]) -> bool:
    return bool(flat.get("parallel.sync", "every_step") != "every_step")


def refusal(differences: Collection[Difference], checkpoint: str, *, is_own: bool = True) -> str | None:
    """Return the message that refuses to resume; None if every incompatible difference is allowed.

    Args:
        is_own: True if the checkpoint is the run's own; else `checkpoint.resume_from` named it.
    """
    refused = [
        difference
        for difference in differences
        if difference.effect is Effect.incompatible and not difference.is_allowed
    ]
    if not refused:
        return None
    lines = "\n".join(f"  {difference}" for difference in refused)
    keys = ",".join(difference.key for difference in refused)
    anew = "--fresh, or another sweep_name" if is_own else "without checkpoint.resume_from"
    return (
        f"{checkpoint} belongs to another training, so this start does not resume from it (was -> is):\n{lines}\n"
        f"Undo the change, or begin anew ({anew}). To resume all the same, if weights and optimizer still fit: "
        f"checkpoint.allow_changes=[{keys}]"
    )


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested facts: {"a": {"b": 1}} -> {"a.b": 1}. Lists are values; an empty mapping leaves no key."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def default_facts(config: TrainConfig) -> dict[str, Any]:
    """Return the default values of all keys, each section in the variant that `config` has."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    fresh: dict[str, Any] = {
        name: type(value)()
        for name, value in sections.items()
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
    }
    return to_plain(TrainConfig(**fresh))


def lines_of(differences: Collection[Difference]) -> Iterator[str]:
    """Yield the log lines on differences that do not end the run, one for each effect."""
    texts = {
        Effect.incompatible: "WARNING: resumes despite incompatible changes, as checkpoint.allow_changes permits",
        Effect.schedule: "WARNING: resumes, and from here on the schedule or the last bits differ",
        Effect.safe: "differs from the checkpoint without changing the training",
    }
    for effect, text in texts.items():
        listed = ", ".join(str(difference) for difference in differences if difference.effect is effect)
        if listed:
            yield f"{text}: {listed}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
