"""Files beside an exported model: the model card (`card.json`, and `card.md` as a page) and `load.py`.

The card says what the file is, what it takes and how good it is. `load.py` uses the file without a trainer.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from hpc_trainer.config.schema.data import ARRAY, BYTES, PICTURE, TABLE, TOKENIZER, TOKENS
from hpc_trainer.config.schema.model import CustomModelConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.deploy.exported import FORMATS
from hpc_trainer.deploy.trained import DataShape
from hpc_trainer.training.data.preprocessing import kind_of, text_of

_UNITS = ("B", "kB", "MB", "GB", "TB")
_MOST_CLASSES = 20


def form_of(batch: torch.Tensor) -> dict[str, Any]:
    """Return the number format of a batch, and its shape without the first dimension."""
    return {"dtype": str(batch.dtype).removeprefix("torch."), "shape": list(batch.shape[1:])}


def form_text(form: Mapping[str, Any]) -> str:
    """Return the text of a form, such as `float32 [batch, 3, 32, 32]`."""
    return f"{form['dtype']} [{', '.join(['batch', *map(str, form['shape'])])}]"


def as_page(card: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    lines = [f"# {card['run_id']}, step {card['step']}", "", *_facts(card), ""]
    measured = card["measured"]
    if measured is not None:
        lines += [*_table(measured), ""]
        machine = measured["machine"]
        lines += [
            f"Metrics: {measured['num_samples']} validation samples of data={measured['data']}. Latency: median of a "
            "batch, and the quartiles beside it; both models in turns, in one process, on "
            f"{machine['processor']} ({machine['num_threads']} thread(s), torch {machine['torch']}).",
            "",
        ]
    same = card["same"]
    if same is not None:
        lines += [
            f"The file gives the model's answers: on {same['num_samples']} validation samples they differ by at most "
            f"{same['max_abs_difference']:.3g}; allowed was {same['tolerance']:.3g}, and the largest output is "
            f"{same['largest_output']:.3g}.",
            "",
        ]
    lines += [f"Note: {note}" for note in card["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _facts(card: Mapping[str, Any]) -> list[str]:
    model = card["model"]
    ways = [card["quantize"], f"pruned {card['prune']}" if card["prune"] else None]
    rows = [
        ("file", ", ".join([f"`{card['file']}`", card["to"], *filter(None, ways), size(card["num_bytes"])])),
        ("model", f"{model['name']} (`{model['class']}`), {model['num_numbers']:,} elements"
                  + (f", {model['sparsity']:.1%} of them zero" if model["sparsity"] else "")),
        ("weights", "averaged (train.ema_decay)" if card["weights"] == "average" else "as trained"),
    ]  # fmt: skip
    rows += [(name, form_text(card[name])) for name in ("inputs", "outputs") if card[name] is not None]
    if card["preprocessing"]:
        rows.append(("preprocessing", text_of(card["preprocessing"])))
    if card["classes"]:
        shown = ", ".join(card["classes"][:_MOST_CLASSES])
        rows.append(("classes", shown + (", .." if len(card["classes"]) > _MOST_CLASSES else "")))
    rows.append(("SHA-256", f"`{card['sha256']}`"))
    return ["| | |", "|---|---|", *(f"| {name} | {text.replace('|', '/')} |" for name, text in rows)]


def _table(measured: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table with a column each for the original and the exported model."""
    was, now = measured["original"], measured["exported"]
    rows = [("size", size(was["num_bytes"]), size(now["num_bytes"]), f"{was['num_bytes'] / now['num_bytes']:.2f}")]
    for name in was["metrics"]:
        one, other = was["metrics"][name], now["metrics"].get(name, float("nan"))
        rows.append((name, f"{one:.4f}", f"{other:.4f}", f"difference {other - one:+.4f}"))
    for batch in was["latency"]:
        one, other = was["latency"][batch], now["latency"][batch]
        rows.append((f"latency, batch {batch}", _time(one), _time(other), f"{one['median_s'] / other['median_s']:.2f}"))
    head = ["| | original, fp32 in PyTorch | exported | original / exported |", "|---|---|---|---|"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def _time(figures: Mapping[str, Any]) -> str:
    low, middle, high = (1e3 * figures[name] for name in ("low_s", "median_s", "high_s"))
    return f"{middle:.3g} ms ({low:.3g} to {high:.3g}, n={figures['n']})"


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, such as `8.72 MB`."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"


_HERE = "here = Path(__file__).parent\n"
_ONNX = """session = onnxruntime.InferenceSession(here / "{file}", providers=["CPUExecutionProvider"])


def model(inputs):
    \"\"\"numpy to numpy: {inputs} to outputs {outputs}.\"\"\"
    return session.run(None, {{"inputs": inputs}})[0]
"""


# Packages are imported when `prepare` is called, so that users with ready inputs need none of them.
_PICTURE = """

def prepare(picture):
    \"\"\"A picture's file to inputs float32 [1, {channels}, {height}, {width}], as in training.\"\"\"
{imports}    image = Image.open(picture)
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"{{picture}} has more than 8 bits a channel")
{resize}    pixels = np.asarray(image, np.float32).reshape(image.height, image.width, {channels}) / 255
{then}    mean, std = np.float32({mean}), np.float32({std})
    inputs = np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1)[None])
    return {result}
"""
_SHORTER_SIDE = """    scale = {resize} / min(image.size)
    image.draft("{mode}", (math.ceil(image.width * scale), math.ceil(image.height * scale)))
    image = ImageOps.exif_transpose(image).convert("{mode}")
    short = min(image.size)
    width, height = ({resize} if side == short else int({resize} * side / short) for side in image.size)
    left, top = round((width - {width}) / 2), round((height - {height}) / 2)
    across, down = image.width / width, image.height / height
    box = (left * across, top * down, (left + {width}) * across, (top + {height}) * down)
    image = image.resize(({width}, {height}), Image.Resampling.BILINEAR, box)
"""
_UPRIGHT = """    image = ImageOps.exif_transpose(image).convert("{mode}")
"""
_BOTH_SIDES = """    image = image.resize(({resize[1]}, {resize[0]}), Image.Resampling.BILINEAR)
"""
_THEN_CROP = """    top, left = (pixels.shape[0] - {then[0]}) // 2, (pixels.shape[1] - {then[1]}) // 2
    pixels = pixels[top : top + {then[0]}, left : left + {then[1]}]
"""
_TABLE = """

def prepare(rows):
    \"\"\"Rows (mappings of columns, as of csv.DictReader) to inputs float32 [rows, ..], as in training.\"\"\"
{imports}    facts = json.loads((here / "card.json").read_text(encoding="utf-8"))["preprocessing"]
    lines = []
    for row in rows:
        line, missing = [], []
        for column in facts["numeric"]:
            value = row.get(column["column"])
            number = float("nan") if value in (None, "") else float(value)
            missing += [column["column"]] if number != number else []
            line.append(0.0 if number != number else (number - column["mean"]) / column["std"])
        for column in facts["categorical"]:
            value, known = row.get(column["column"]), column["categories"]
            missing += [column["column"]] if value in (None, "") else []
            text = str(value).lower() if isinstance(value, bool) else str(value)
            code = known.index(text) if text in known else len(known)
            is_one_hot = facts["encoding"] == "one_hot"
            line += [float(code == at) for at in range(len(known) + 1)] if is_one_hot else [code / max(len(known), 1)]
        if missing and facts["missing"] == "refuse":
            raise ValueError(f"{missing[0]} has no value in {row}")
        lines.append(line)
    inputs = np.array(lines, np.float32)
    return {result}
"""
_TOKENS = """

def prepare({takes}):
    \"\"\"{doc} to inputs int64 [windows, {seq_len}], as in training; zeros follow the end.\"\"\"
{imports}{encode}    rest = [0] * (-len(tokens) % {seq_len})
    inputs = np.array([*tokens, *rest], np.int64).reshape(-1, {seq_len})
    return {result}
"""
_ARRAY = """

def prepare(values):
    \"\"\"Values [batch, ..] to inputs float32, as in training.\"\"\"
{imports}    inputs = np.asarray(values, np.float32) * np.float32({input_scale!r})
    return {result}
"""
_UNKNOWN = """
# Only the data set defines how raw data become inputs; card.json holds its description as "preprocessing".
"""


def prepare_lines(made: Mapping[str, Any] | None, to: str, inputs: Sequence[int], *, has_tokenizer: bool) -> str:
    """Return the text of `prepare` for the preprocessing `made`; "" if the data state none.

    Args:
        inputs: shape of the model's inputs without the batch.
        has_tokenizer: True if the tokenizer's file is in the folder.
    """
    result = "inputs" if to == "onnx" else "torch.from_numpy(inputs)"
    kind = kind_of(made)
    if made is None:
        return ""
    if kind == PICTURE and made["mean"] is not None and made["std"] is not None and len(inputs) == 3:
        math = ["import math"] if isinstance(made["resize"], int) else []
        imports = _imports(to, *math, "from PIL import Image, ImageOps")
        return _picture_lines(made, inputs).replace("{result}", result).replace("{imports}", imports)
    if kind == TABLE:
        return _TABLE.replace("{result}", result).replace("{imports}", _imports(to, "import json"))
    if kind == TOKENS:
        takes, doc, encode, more = "text", "A text", "    tokens = list(text.encode())\n", []
        if has_tokenizer:
            encode = f'    tokenizer = Tokenizer.from_file(str(here / "{TOKENIZER}"))\n'
            encode += "    tokens = tokenizer.encode(text, add_special_tokens=False).ids\n"
            more = ["from tokenizers import Tokenizer"]
        elif made["tokenizer"] != BYTES:
            takes, encode = "tokens", ""
            named = re.sub(r"[^\w.+-]", "_", made["tokenizer"] or "")  # from a data folder, and becomes code
            doc = f"Tokens of {named or 'the tokenizer of the training data'}"
        imports = _imports(to, *more)
        seq_len = int(made["seq_len"])
        return _TOKENS.format(takes=takes, doc=doc, encode=encode, seq_len=seq_len, result=result, imports=imports)
    if kind == ARRAY:
        return _ARRAY.format(result=result, input_scale=float(made["input_scale"]), imports=_imports(to))
    return _UNKNOWN


def _imports(to: str, *more: str) -> str:
    lines = {"import numpy as np", *more, *([] if to == "onnx" else ["import torch"])}
    standard = lines & {"import json", "import math"}
    groups = [sorted(group, key=lambda line: (line.startswith("from"), line)) for group in (standard, lines - standard)]
    return "\n\n".join("\n".join(f"    {line}" for line in group) for group in groups if group) + "\n\n"


def _picture_lines(made: Mapping[str, Any], inputs: Sequence[int]) -> str:
    channels, height, width = inputs
    resize, crop, then = made["resize"], made["crop"], made.get("then_crop")
    mode = {1: "L", 3: "RGB"}.get(channels, "RGB")
    if isinstance(resize, int):
        steps = _SHORTER_SIDE.format(resize=resize, mode=mode, height=crop[0], width=crop[1])
    else:
        steps = _UPRIGHT.format(mode=mode) + ("" if resize is None else _BOTH_SIDES.format(resize=resize))
    return _PICTURE.format(
        channels=channels, height=height, width=width, resize=steps, mean=[*map(float, made["mean"])],
        std=[*map(float, made["std"])],
        then="" if then is None else _THEN_CROP.format(then=then), result="{result}", imports="{imports}",
    )  # fmt: skip


def load_lines(title: str, to: str, quantize: str | None, record: Mapping[str, Any]) -> str:
    """Return load.py for a file with a graph.

    Args:
        record: the card's entries about the model's inputs and outputs.
    """
    file = FORMATS[to].file
    takes, gives = (form_text(record[name]) for name in ("inputs", "outputs"))
    if to == "onnx":
        body = _ONNX.format(file=file, inputs=takes, outputs=gives)
        return f'"""{title}."""\n\nfrom pathlib import Path\n\nimport onnxruntime\n\n{_HERE}{body}'
    more = "import torchao.quantization  # noqa: F401 -- operations of the file are torchao's\n" if quantize else ""
    return (
        f'"""{title}: {takes} to outputs {gives}."""\n\nfrom pathlib import Path\n\nimport torch\n{more}\n'
        f'{_HERE}model = torch.export.load(here / "{file}").module()\n'
    )


def weights_lines(title: str, config: TrainConfig, to: str, quantize: str | None, shape: DataShape | None) -> str:
    """Return load.py for a file of weights, which builds the model and loads them.

    If it is not known how the model is built, the weights are loaded into a dictionary.

    Args:
        shape: shape of the data; None if it is not known, or the loop is the user's own.
    """
    reader, read = "from safetensors.torch import load_file", f'load_file(here / "{FORMATS[to].file}")'
    if to == "torch":
        reader, read = "import torch", f'torch.load(here / "{FORMATS[to].file}", weights_only=True)'
    if config.train.main is not None or shape is None:
        return (
            f'"""{title}."""\n\nfrom pathlib import Path\n\n{reader}\n\n{_HERE}'
            f"weights = {read}\n# Build the model as {config.train.main or 'the run'} does, then: "
            "model.load_state_dict(weights)\n"
        )
    module, _, name = config.model._target_.rpartition(".")
    model = config.model
    kind = type(model)
    given: dict[str, Any] = {} if shape.input_shape is None else {"input_shape": shape.input_shape}
    if shape.num_classes is not None:
        given["num_classes"] = shape.num_classes
    imports = [reader, f"from {module} import {name}"]
    standard = "from pathlib import Path"
    if isinstance(model, CustomModelConfig):
        where = f"\n\nRun it where {module.partition('.')[0]} can be imported."
        built = f"model = {name}(**{model.kwargs!r})"
        if given:
            standard, built = f"import inspect\n{standard}", _built_own(name, given, model.kwargs)
    else:
        where, names = "", [field.name for field in fields(kind) if field.name not in ("name", "_target_")]
        values = {key: getattr(model, key) for key in names}
        enums = [type(value) for value in values.values() if isinstance(value, enum.Enum)]
        for source in sorted({cls.__module__ for cls in (kind, *enums)}):
            here = {cls.__name__ for cls in (kind, *enums) if cls.__module__ == source}
            imports.append(f"from {source} import {', '.join(sorted(here))}")
        listed = ", ".join(f"{key}={_written(value)}" for key, value in values.items())
        arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
        built = f"model = {name}({kind.__name__}({listed}), {arguments})"
    assign = ""
    if quantize:
        imports.append("import torchao.quantization  # noqa: F401 -- tensors of the file are torchao's")
        assign = ", assign=True"
    return (
        f'"""{title}.{where}"""\n\n{standard}\n\n' + "\n".join(sorted(imports)) + "\n\n"
        f"{_HERE}{built}\nmodel.load_state_dict({read}{assign})\nmodel.eval()\n"
    )


def _built_own(name: str, given: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str:
    """Return code that passes a class the values that it has arguments for, as in the run.

    The arguments are looked up by the generated code, because the class may not be importable here.
    """
    return (
        f"shape = {given!r}\n"
        f"arguments = inspect.signature({name}).parameters\n"
        "takes_all = any(each.kind is each.VAR_KEYWORD for each in arguments.values())\n"
        "given = {name: value for name, value in shape.items() if takes_all or name in arguments}\n"
        f"model = {name}(**given, **{kwargs!r})"
    )


def _written(value: Any) -> str:
    """Return a value as Python source."""
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
