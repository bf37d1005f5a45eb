"""Messages about wrong overrides: which key, value or form was probably meant."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import shlex
import typing
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import OverrideParseException
from omegaconf import MISSING

from hpc_trainer.config.load import hints, kinds_of
from hpc_trainer.config.rules.declared_rules import WORDS
from hpc_trainer.config.schema.key import Declared
from hpc_trainer.config.store import DECLARED, declared_at
from hpc_trainer.errors import did_you_mean, valid

# OmegaConf's messages about a value that a type does not accept.
_OF_A_TYPE = re.compile(
    r"is not Optional|Cannot (convert|assign|merge) |Invalid (value|type) |is not a valid (bool|input for <enum)"
    r"|is not in struct|could not be converted to|is incompatible with type hint|unsupported type|not supported"
)
_QUOTED = re.compile(r"'(.*?)'", re.DOTALL)
_PLAIN_WORDS = re.compile(r"[-+\w./]+")
_SPAN = re.compile(r"(\d{1,9})(?:\.\.+|-|:)(\d{1,9})")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def wrong_value(key: str, message: str, line: str | None) -> str | None:
    """Return the message that replaces OmegaConf's, or None if OmegaConf's is about something else.

    Args:
        key: the key that OmegaConf names.
        message: OmegaConf's message.
        line: the override that set the value, if one did.
    """
    declared = declared_at(key)
    if declared is None or not _OF_A_TYPE.search(message):
        return None
    quoted = _QUOTED.search(message)
    text = line.partition("=")[2] if line else quoted[1] if quoted else "this"
    if declared.section is not None:
        name, first = declared.name, dataclasses.fields(declared.section)[0].name
        return f"{name}={text}: {name} is a section. Set its keys one by one, as {name}.{first}=VALUE."
    hint = kinds_of(hints(declared.kind)[declared.field.name])[0]
    rest = key[len(declared.name) :]
    kind = typing.get_origin(hint) or hint
    if kind is dict and rest:
        if line is None or not line.startswith("+"):
            return f"{key}: add a new key of {declared.name} with +{key}=VALUE."
        return f"{key}={text} must be {WORDS.get(typing.get_args(hint)[1], 'one value')}. Use a value as +{key}=NAME."
    what, name = f"{declared.name}={text}", declared.name
    if kind is list:
        items = typing.get_args(hint)[0]
        of_names = typing.get_origin(items) is dict or dataclasses.is_dataclass(items)
        nouns = {str: "texts", float: "numbers", int: "whole numbers"}
        kinds = "names with values" if of_names else nouns.get(items, "values")
        return f"{what} must be a list of {kinds}. Use '{name}={_example_list(declared, items)}'."
    if kind is dict:
        return f"{what} must be names with values. Add them one by one: +{name}.NAME=VALUE."
    if issubclass(kind, enum.Enum):
        return f"{what}: no such choice. {valid(text, [member.name for member in kind])}"
    if kind in (int, float):
        return _of_number(declared, kind, text)
    return f"{what} must be {WORDS[kind]}. Use a value as {name}={_example(declared)}."


def _of_number(declared: Declared, kind: type, text: str) -> str:
    name, what = declared.name, f"{declared.name}={text}"
    sweep = as_sweep(text)
    if sweep is not None and all(map(_NUMBER.fullmatch, sweep.split(","))):
        rule = "one number" if text.startswith("[") else WORDS[kind]
        several = "Separate several values by commas, without brackets or spaces."
        return f"{what} must be {rule}. {several} Use {name}={sweep}."
    with_unit = _of_unit(declared.field.name, text)
    if with_unit is not None:
        unit, value = with_unit
        return f"{what} must be {WORDS[kind]} of {unit}, without a unit. Use {name}={max(1, round(value))}."
    span = _SPAN.fullmatch(text) if kind is int else None
    if span is not None:
        first, last = span[1], span[2]
        return f"{what} must be {WORDS[kind]}. Use '{name}=range({first},{int(last) + 1})' for {first} to {last}."
    try:
        value = float(text)
    except ValueError:
        return f"{what} must be {WORDS[kind]}. Use a value as {name}={_example(declared)}."
    if not math.isfinite(value):
        return f"{what} must be {WORDS[kind]}. Use {name}={_example(declared)}."
    written = ", written with digits alone" if value.is_integer() else ""
    return f"{what} must be {WORDS[kind]}{written}. Use {name}={round(value)}."


_SECONDS = {
    **dict.fromkeys(("s", "sec", "seconds"), 1), **dict.fromkeys(("m", "min", "mins", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600), **dict.fromkeys(("d", "day", "days"), 86400),
}  # fmt: skip
_GB = {"k": 2**-20, "m": 2**-10, "g": 1, "t": 2**10}
_WITH_UNIT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)")
_SLURM_TIME = re.compile(r"(?:(\d{1,5})-)?(\d{1,5}):(\d\d)(?::(\d\d))?")


def _of_unit(name: str, text: str) -> tuple[str, float] | None:
    """Return (the unit of the key, the value in it) of a time or a memory that was typed with a unit, else None.

    Times may be written as for sbatch: `1-00:00:00`, `24:00:00`.
    """
    text = text.strip("'\"").lower()
    match, words = _WITH_UNIT.fullmatch(text), name.split("_")
    unit = "" if match is None else match[2]
    if "gb" in words:
        factor = _GB.get(unit.removesuffix("b").removesuffix("i"))
        return None if match is None or factor is None else ("GB", float(match[1]) * factor)
    per_unit = {"min": 60, "s": 1}.get(words[-1])
    if per_unit is None:
        return None
    called = "minutes" if per_unit == 60 else "seconds"
    clock = _SLURM_TIME.fullmatch(text)
    if clock is not None:
        days, first, second, third = (int(part or 0) for part in clock.groups())
        # sbatch: minutes:seconds, hours:minutes:seconds, days-hours:minutes[:seconds]
        is_hours = clock[1] is not None or clock[4] is not None
        seconds = days * 86400 + (first * 3600 + second * 60 + third if is_hours else first * 60 + second)
        return called, seconds / per_unit
    factor_s = _SECONDS.get(unit)
    return None if match is None or factor_s is None else (called, float(match[1]) * factor_s / per_unit)


def as_sweep(text: str) -> str | None:
    """Return `1e-3,2e-3` for `[1e-3,2e-3]`, `(1e-3 2e-3)` or `1e-3;2e-3,`; None if it is not a list of plain values."""
    values = [value for value in re.split(r"[\s,;]+", text.strip("'\"()[]{}")) if value]
    is_list = len(values) > 1 or (bool(values) and values[0] != text.strip("'\""))
    is_list = is_list and not re.match(r"\w+\(", text)  # choice(), range(1)
    return ",".join(values) if is_list and all(map(_PLAIN_WORDS.fullmatch, values)) else None


def _example(declared: Declared) -> str:
    """Return a value that the key takes: its default, if the default is a value."""
    kind = kinds_of(hints(declared.kind)[declared.field.name])[0]
    if isinstance(declared.default, bool):
        return str(declared.default).lower()
    if declared.default in (None, "", MISSING):
        return "NAME" if kind is str else "1"
    return str(declared.default)


def _example_list(declared: Declared, items: typing.Any) -> str:
    if typing.get_origin(items) is dict:
        return "[{optim.lr:[0.1,0.2],seed:[1,2]}]"
    if dataclasses.is_dataclass(items):
        return "[{axes:{optim.lr:[0.1,0.2]}},{axes:{seed:[1,2]}}]"
    # A list of texts may hold the typed text; a list of numbers has a length of its own.
    return f"[{','.join(map(str, declared.default)) or ('100,200' if items is int else 'A,B')}]"


_OPEN = (",", "=", "(", "[", "{", ":")
_GOES_ON = (",", "=", ")", "]", "}", ":")
_LONGEST = 200
_KEY = re.compile(r"[+~]*[A-Za-z_][\w.@/]*=")
# Hydra's range, and the words of other tools for one.
_RANGE = re.compile(r"(tag\(log, ?)?(interval|q?uniform|q?loguniform|randint)\(")
_NEEDS_QUOTES = re.compile(r"""[\s"'<>|&;]""")
_FORM = "An override has the form KEY=VALUE, as optim.lr=1e-3. Put a value with spaces in quotes."


def unreadable(overrides: Sequence[str], error: Exception) -> str:
    """Return the message about the wrong override; if a space split one override, how to type it."""
    if not isinstance(error, OverrideParseException) or error.override not in overrides:
        return f"{_reason(error)}. {_FORM}"
    parts = _parted(overrides, list(overrides).index(error.override))
    if len(parts) > 1:
        return (
            f"{' '.join(parts)}: spaces split this override into {len(parts)} arguments. Write "
            f"{shlex.quote(''.join(parts))} without spaces."
        )
    key, _, value = error.override.partition("=")
    sweep = as_sweep(value)
    if key and sweep is not None:
        return (
            f"{error.override}: separate several values by single commas, without brackets or spaces. "
            f"Use {key}={sweep}."
        )
    if key and _RANGE.match(value):
        return (
            f"{error.override}: a range of a search has a lowest and a highest value. Use {key}=interval(LOW,HIGH), or "
            f"over orders of magnitude {key}=tag(log,interval(LOW,HIGH))."
        )
    if _KEY.match(error.override) and _NEEDS_QUOTES.search(value):
        typed = shlex.quote(f"{key}={QuotedString(value, Quote.double).with_quotes()}")
        return f"{error.override}: Hydra's grammar does not accept this text. Put it into quotes of its own: {typed}."
    return f"{error.override}: Hydra's grammar does not accept this override: {_reason(error)}. {_FORM}"


def _reason(error: Exception) -> str:
    """Return the first line of Hydra's message that says more than that there is an error."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Error parsing override")]
    line = lines[0].replace("LexerNoViableAltException: ", "no key and value in ") if lines else "it has no form"
    return line[:_LONGEST].rstrip(".")


def _parted(arguments: Sequence[str], index: int) -> Sequence[str]:
    """Return the arguments around `index` that a space split from one override: `a=1,` `2`, or `a` `=1`."""
    first, last = index, index
    while first > 0 and _is_one(arguments[first - 1], arguments[first]):
        first -= 1
    while last + 1 < len(arguments) and _is_one(arguments[last], arguments[last + 1]):
        last += 1
    return arguments[first : last + 1]


def _is_one(left: str, right: str) -> bool:
    is_next = _KEY.match(right) is not None  # a comma too many before another override
    return (left.endswith(_OPEN) and not is_next) or right.startswith(_GOES_ON)


_MOST_MEANT = 3
_NEARLY = 0.75  # `sed` is seed (0.86); `steps` is not sweep (0.6)

_RESUME = (
    "A run resumes from its newest checkpoint by itself: repeat the same command. checkpoint.resume_from=FOLDER "
    "resumes from another run, init_from.path=FOLDER takes only its weights"
)
_STEPS = "train.num_steps (the length of a run in optimizer steps)"
_BATCH = "train.micro_batch_size (of a rank's forward pass) or train.global_batch_size (of an optimizer step)"
_OTHER_NAMES = {
    _RESUME: "resume auto_resume continue continue_from resume_training resume_from_checkpoint restart restore",
    _STEPS: "epochs num_epochs max_epochs n_epochs num_train_epochs steps max_steps total_steps iterations max_iters",
    _BATCH: "batch batch_size bs per_device_train_batch_size train_batch_size",
    "optim.lr": "learning_rate lr base_lr",
    "optim=NAME, as optim=sgd": "optimizer optimiser",
    "optim=sgd, which has optim.momentum": "momentum",
    "optim.weight_decay": "wd l2 weight_decay",
    "schedule=NAME, as schedule=cosine": "scheduler lr_scheduler lr_schedule",
    "schedule.warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "train.max_grad_norm": "grad_clip clip_grad gradient_clip_val gradient_clipping clip_norm max_norm",
    "train.grad_accum_steps": "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum accum",
    "precision=NAME, as precision=bf16": "amp mixed_precision bf16 fp16 dtype precision",
    "parallel=NAME, as parallel=fsdp": "strategy ddp fsdp distributed",
    "data=NAME, as data=digits": "dataset data_name",
    "data.num_workers": "workers num_workers dataloader_num_workers",
    "tracker=NAME, as tracker=wandb": "wandb mlflow tensorboard logger report_to",
    "hardware.gpus_per_node": "gpus num_gpus n_gpus ngpus gpu devices",
    "hardware.num_nodes": "nodes n_nodes nnodes num_nodes",
    "hardware.cpus_per_task (without GPUs) or hardware.cpus_per_gpu": "cpus num_cpus cpus_per_task cores",
    "hardware.mem_gb_per_node": "mem memory mem_gb ram",
    "hardware.time_limit_min": "time timelimit time_limit walltime timeout timeout_min max_time",
    "hardware.partition": "queue partition",
    "cluster.account": "account project",
    "checkpoint.every_steps": "save_steps save_every checkpoint_every save_interval",
    "train.eval_every_steps": "eval_steps eval_every eval_interval val_check_interval",
    "monitor.log_every_steps": "logging_steps log_every log_interval log_every_n_steps",
    "paths.runs_dir": "output_dir out_dir log_dir logdir save_dir runs_dir default_root_dir",
    "seed": "seed random_seed manual_seed random_state",
}
_MEANT = {word: meant for meant, names in _OTHER_NAMES.items() for word in names.split()}


def key_meant(key: str, names: Iterable[str]) -> str:
    """Return a sentence that suggests an existing key, with a space after it; "" if no key is similar.

    Args:
        key: the key that does not exist, with its section if it has one.
        names: the keys that exist in that place.
    """
    import difflib  # imported late, as in errors.py: most commands have no misspelled key

    parent, _, name = key.rpartition(".")
    word = name.lower().replace("-", "_")
    meant = _MEANT.get(word)
    if meant is not None and meant != key:
        return f"{meant}. " if meant is _RESUME else f"Did you mean {meant}? "
    inner: dict[str, list[str]] = {}
    for key_name in DECLARED:
        inner.setdefault(key_name.rpartition(".")[2], []).append(key_name)
    own = difflib.get_close_matches(word, names, n=1, cutoff=0.6 if parent else _NEARLY)
    if own and (parent or name not in inner):
        return f"Did you mean {own[0]}? "
    close = [name] if name in inner else [] if parent else difflib.get_close_matches(name, inner, n=_MOST_MEANT)
    others = [other for close_name in close for other in inner[close_name] if other != key][:_MOST_MEANT]
    return f"Did you mean {' or '.join(others)}? " if others else ""


def hydra_problem(error: Exception, parsed: Sequence[Override]) -> str:
    """Return Hydra's own message, or a better one."""
    for override in parsed:
        if override.is_delete() and "Could not delete" in str(error):
            return not_deleted(override)
        key, way = override.key_or_group, f"Use {override.key_or_group}={override.value()}."
        if override.is_add() and str(error).startswith(
            (f"Multiple values for {key}.", f"{key} appears more than once")
        ):
            return f"{override.input_line}: {key} already has a choice, which + cannot replace. {way}"
        if override.package is not None and "Could not override" in str(error):
            return f"{override.input_line}: no choice was made for @{override.package}. {way}"
    return str(error).strip()


def not_deleted(override: Override) -> str:
    """Return the message about an override that removes a key."""
    key = override.key_or_group
    if key in DECLARED:
        return f"{override.input_line}: a key cannot be removed. Set it instead, as {key}=VALUE."
    return f"{override.input_line}: there is no {key} to remove. {did_you_mean(key, DECLARED)}".rstrip()


def unresolved(key: str, message: str, parsed: Sequence[Override]) -> str:
    """Return the message about an interpolation that cannot be resolved."""
    given = [override.input_line for override in parsed if override.key_or_group == key]
    what = f"{given[-1] if given else key}: the interpolation cannot be resolved"
    nowhere = re.fullmatch(r"Interpolation key '(.*)' not found", message)
    if nowhere:
        hint = did_you_mean(nowhere[1], DECLARED) or "Write a key in full, as ${train.num_steps}."
        return f"{what}: there is no key {nowhere[1]}. {hint}".rstrip()
    variable = re.search(r"Environment variable '(.*)' not found", message)
    if variable:
        way = f"Set it, or give a default: ${{oc.env:{variable[1]},VALUE}}."
        return f"{what}: the environment has no {variable[1]}. {way}"
    message = re.sub(r"Value '.*' of type", "its value of type", message)
    return f"{what}: {message.removesuffix('.')}. Name one key with one value, as ${{train.num_steps}}."
