"""Model card of an exported file: its content, inputs and quality, in `card.json`, and as a page in `card.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpc_trainer.datasets.preprocessing import text_of

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
        ("model", f"{model['name']} (`{model['class']}`), {model['num_numbers']:,} numbers"
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


def _time(told: Mapping[str, Any]) -> str:
    low, middle, high = (1e3 * told[name] for name in ("low_s", "median_s", "high_s"))
    return f"{middle:.3g} ms ({low:.3g} to {high:.3g}, n={told['n']})"


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, such as `8.72 MB`."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"
