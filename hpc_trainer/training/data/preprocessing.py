"""Preprocessing of a run: how raw data become the model's inputs, as a mapping that fits into JSON. No torch.

The mapping has these keys besides `kind`:

    kind       keys
    picture    num_channels, resize, crop, mean, std; then_crop where `augment.size` cuts once more
    table      target, numeric, categorical, encoding, missing
    tokens     tokenizer, tokenizer_sha256, vocab_size, seq_len
    array      input_scale

A data set states the mapping in its attribute `preprocessing`. Checkpoints and the card of an export keep the mapping
beside the class names. New data for the model become inputs in the same way, unless a key of `data.*` changes it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hpc_trainer.config.load import plain_value
from hpc_trainer.config.schema.data import ARRAY, BYTES, PICTURE, TABLE, TOKENS, DataConfig
from hpc_trainer.errors import DataError

_KEYS = {
    PICTURE: frozenset({"num_channels", "resize", "crop", "mean", "std"}),
    TABLE: frozenset({"target", "numeric", "categorical", "encoding", "missing"}),
    TOKENS: frozenset({"tokenizer", "tokenizer_sha256", "vocab_size", "seq_len"}),
    ARRAY: frozenset({"input_scale"}),
}
_LARGEST = 2**20
"""Most characters of JSON that are kept, because a column with a million categories would burden each checkpoint."""
_MOST_NAMES = 8
_KEY_OF = {"crop": "image_size"}


def kind_of(made: Mapping[str, Any] | None) -> str | None:
    """Return the kind of a preprocessing; None if keys of its kind are missing, as in a user's data set."""
    kind = None if made is None else made.get("kind")
    return kind if made is not None and isinstance(kind, str) and made.keys() >= _KEYS.get(kind, {""}) else None


def picture(
    *, num_channels: int, resize: int | Sequence[int] | None, crop: Sequence[int] | None,
    mean: Sequence[float] | None, std: Sequence[float] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the preprocessing of pictures.

    Args:
        resize: pixels of the shorter side; [height, width] if both sides are set; None if pictures are not resized.
        crop: [height, width] of the centre crop; None without a crop.
        mean: mean of each channel; None if it is not known, as in exports that do not state it.
        std: standard deviation of each channel; None if it is not known.
    """
    return {
        "kind": PICTURE, "num_channels": num_channels, "resize": resize if resize is None else _plain(resize),
        "crop": crop if crop is None else list(crop), "pixels": "0 to 1", "mean": _numbers(mean), "std": _numbers(std),
        "inputs": "(pixels - mean) / std",
    }  # fmt: skip


def tokens(
    *, seq_len: int, vocab_size: int | None, tokenizer: str | None = None, sha256: str | None = None
) -> dict[str, Any]:
    """Return the preprocessing of windows of tokens.

    Args:
        tokenizer: name of the tokenizer's file, or `bytes`; None if it is not known.
        sha256: digest of the tokenizer's file; None if there is no file or it is not known.
    """
    return {
        "kind": TOKENS, "tokenizer": tokenizer, "tokenizer_sha256": sha256, "vocab_size": vocab_size,
        "seq_len": seq_len,
    }  # fmt: skip


def array(input_scale: float = 1.0) -> dict[str, Any]:
    """Return the preprocessing of arrays of numbers, which are multiplied by `input_scale`."""
    return {"kind": ARRAY, "input_scale": input_scale, "inputs": "float32(values) * input_scale"}


def described(samples: Any) -> dict[str, Any]:
    """Return the class names and the preprocessing that a data set states, as JSON values; None for a missing one.

    A data set that states only `pixel_mean` and `pixel_std` is described as pictures of the size `input_shape`.
    """
    classes, made = getattr(samples, "classes", None), getattr(samples, "preprocessing", None)
    mean, std = getattr(samples, "pixel_mean", None), getattr(samples, "pixel_std", None)
    if made is None and mean is not None and std is not None:
        shape = getattr(samples, "input_shape", None) or ()
        crop = shape[1:] if len(shape) == 3 else None
        made = picture(num_channels=len(mean), resize=None, crop=crop, mean=mean, std=std)
    return {
        "classes": _as_kept([str(name) for name in classes] if isinstance(classes, Sequence) else None),
        "preprocessing": _as_kept(dict(made) if isinstance(made, Mapping) else None),
    }


def _as_kept(value: Any) -> Any:
    """Return `value` after a round trip through JSON; None if it is too large, or JSON cannot represent it."""
    try:
        text = json.dumps(value, default=_as_json, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return json.loads(text) if len(text) <= _LARGEST else None


def inherited_keys(data: DataConfig, run: DataConfig, was: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the keys of `data`, with values, that make inputs as in training; keys in `given` are left out.

    Args:
        run: the `data` section of the run's configuration.
        was: the run's preprocessing; empty if it is not known.
    """
    kept = data.kept_keys if isinstance(run, type(data)) else ()
    keys = {name: plain_value(getattr(run, name)) for name in kept}
    return {
        name: value
        for name, value in {**keys, **data.keys_as(kind_of(was), was, given)}.items()
        if value is not None and name not in given
    }


def without(was: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the preprocessing `was`, with None for each value that a key of `data.*` in `given` decides.

    The preprocessing of a table stays complete: the keys only name columns, and each column keeps its encoding.
    """
    if kind_of(was) == TABLE:
        return dict(was)
    gone = {_of_key(name) for name in given} | ({"resize"} if "image_size" in given else set())
    return {name: None if name in gone else value for name, value in was.items()}


def differences(was: Mapping[str, Any], now: Mapping[str, Any] | None, name: str) -> Iterator[str]:
    """Yield a note for each difference between the inputs in training and those of new data.

    Args:
        was: preprocessing of the run.
        now: preprocessing of the new data; None if they do not state it.
        name: the choice of `data`, for messages.
    """
    kind, other = kind_of(was), kind_of(now)
    if now is None or kind != other:
        how = "does not say how its inputs are made" if other is None else f"gives inputs of the kind {other}"
        yield f"data={name} {how}; the model was trained on: {text_of(was)}."
        return
    for key in ("num_channels", "resize", "crop", "mean", "std", "input_scale", "encoding", "missing", "target"):
        here, there = now.get(key), was.get(key)
        if there is not None and here != there:
            yield f"data.{_KEY_OF.get(key, key)}={_short(here)}, and the model was trained with {_short(there)}."
    if kind == PICTURE and was.get("resize") is None and now.get("resize") is not None:
        yield f"data.resize={_short(now['resize'])}, and how the model's pictures were resized is not recorded."
    for key in ("numeric", "categorical"):
        if kind == TABLE and now.get(key) != was.get(key):
            yield from _columns_that_differ(key, was.get(key), now.get(key))


def _columns_that_differ(key: str, was: Any, now: Any) -> Iterator[str]:
    if was is None:
        yield (
            f"data.{key}: the columns are encoded by the new rows, because the encoding of the model's columns was not "
            "recorded."
        )
        return
    old_columns = {column["column"]: column for column in was}
    here = {column["column"]: column for column in now or ()}
    others = [name for name, column in here.items() if old_columns.get(name) != column]
    if others or [*old_columns] != [*here]:
        more = f"; encoded by the new rows: {_listed(others)}" if others else ""
        yield f"data.{key}=[{_listed([*here])}], and the model was trained with [{_listed([*old_columns])}]{more}."


def check_tokenizer(was: Mapping[str, Any], sha256: str | None, tokenizer: str, folder: str) -> None:
    """Raise DataError if the tokens in `folder` were made by another tokenizer than the model's."""
    expected = was.get("tokenizer")
    if expected is None or (was.get("tokenizer_sha256"), expected == BYTES) == (sha256, tokenizer == BYTES):
        return
    digests = [digest[:12] if digest else "none" for digest in (was.get("tokenizer_sha256"), sha256)]
    raise DataError(
        f"{folder} has tokens of the tokenizer {tokenizer} (SHA-256 {digests[1]}), and the model was trained with "
        f"{expected} (SHA-256 {digests[0]}): the same token number means another text. Prepare the text with the "
        "model's: hpc-trainer data prepare tokens TEXTS --to FOLDER --tokenizer "
        f"{'bytes' if expected == BYTES else f'PATH/{expected}'}"
    )


def class_numbers(trained: Sequence[str], here: Sequence[str], used: Collection[str], where: str) -> list[int] | None:
    """Return the model's number of each class in `here`; -1 for a class that neither the model nor a sample has.

    Args:
        trained: class names of the model.
        here: class names of the new data.
        used: class names that samples have.
        where: the data, for messages.

    Returns:
        None if no name is shared, as when one of the two has numbers for names. Classes are then matched by number.

    Raises:
        DataError: a sample has a class that the model does not know.
    """
    numbers = {name: number for number, name in enumerate(trained)}
    if not numbers.keys() & set(here):
        return None
    unknown = [name for name in here if name not in numbers and name in used]
    if unknown:
        raise DataError(
            f"{where} has the class {unknown[0]!r}{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}, and "
            f"the model knows {_listed(trained)}. Fix: rename the class, or remove its samples."
        )
    return [numbers.get(name, -1) for name in here]


def text_of(made: Mapping[str, Any]) -> str:
    """Return a text that describes the preprocessing, for a page or a note."""
    kind = kind_of(made)
    if kind == PICTURE:
        return ", ".join(_words_of_picture(made))
    if kind == TABLE:
        numbers = [
            f"{column['column']} ((x - {column['mean']:.6g}) / {column['std']:.6g})" for column in made["numeric"]
        ]
        texts = [f"{column['column']} ({_listed(column['categories'])})" for column in made["categorical"]]
        return (
            f"columns in this order: numbers {_listed(numbers) or 'none'}; categories as {made['encoding']} "
            f"{_listed(texts) or 'none'}; missing values: {made['missing']}"
        )
    if kind == TOKENS:
        digest = f" (SHA-256 {made['tokenizer_sha256']})" if made.get("tokenizer_sha256") else ""
        by = f"tokenizer {made['tokenizer']}{digest}" if made.get("tokenizer") else "a tokenizer that is not recorded"
        return f"{by}, vocabulary of {made.get('vocab_size')}, windows of {made.get('seq_len')} tokens"
    return ", ".join(f"{key}: {value}" for key, value in made.items() if key != "kind")


def _words_of_picture(made: Mapping[str, Any]) -> Iterator[str]:
    resize, crop = made.get("resize"), made.get("crop")
    yield "RGB" if made["num_channels"] == 3 else f"{made['num_channels']} channel(s)"
    if isinstance(resize, list):
        yield f"resized to {resize[0]} x {resize[1]} pixels (bilinear)"
    elif resize is not None:
        yield f"resize: {resize} pixels of the shorter side (bilinear with antialiasing)"
    for name in ("crop", "then_crop"):
        if made.get(name) is not None and (resize is not None or name == "then_crop"):
            yield f"{name.replace('_', ' ')}: the centre, {made[name][0]} x {made[name][1]} pixels"
    if resize is None and crop is not None:
        yield f"{crop[0]} x {crop[1]} pixels"
    yield "pixels: 0 to 1"
    if made.get("mean") is None or made.get("std") is None:
        yield "mean and std: not recorded"
    else:
        yield f"(pixels - mean) / std with mean: {_short(made['mean'])}, std: {_short(made['std'])}"


def _of_key(key: str) -> str:
    return next((name for name, of in _KEY_OF.items() if of == key), key)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_short(element) for element in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _numbers(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else [float(value) for value in values]


def _plain(value: int | Sequence[int]) -> int | list[int]:
    return value if isinstance(value, int) else list(value)


def _as_json(value: Any) -> Any:
    """Return a number or an array of numpy or torch as Python objects, and any other object as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
