"""The files that the commands of docs/data_records.md name, made small."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from hpc_trainer.data.tokens.files import write_tokens

COUNT = 100
"""Rows: a batch of the defaults and more."""


def write_records(folder: Path) -> None:
    """Makes them in `folder`."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    for name in ("corpus", "code", "books"):
        for split in ("train", "eval"):
            write_tokens(folder / name / split, [np.arange(20_000) % 250], vocab_size=257, end_of_document=256)
    numbers, classes = np.arange(COUNT * 4, dtype=np.float32).reshape(COUNT, 4), np.arange(COUNT) % 10
    np.savez(folder / "digits.npz", inputs=numbers, targets=classes)
    (folder / "pictures").mkdir()
    np.save(folder / "pictures/inputs.npy", np.zeros((COUNT, 3, 8, 8), dtype=np.uint8))
    np.save(folder / "pictures/targets.npy", classes)
    parquet.write_table(pa.table({"inputs": numbers.tolist(), "targets": numbers[:, 0]}), folder / "waves.parquet")
    csv.write_csv(pa.table({"rooms": numbers[:, 0], "price": numbers[:, 1]}), folder / "houses.csv")
    parquet.write_table(pa.table({"age": numbers[:, 0], "job": ["cook", "poet"] * 50}), folder / "people.parquet")
    _write_hf(folder, numbers)


def _write_hf(folder: Path, numbers: np.ndarray) -> None:
    import datasets
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "PNG")
    pictures = {"image": [{"bytes": file.getvalue(), "path": None}] * COUNT, "label": [0, 1] * (COUNT // 2)}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    datasets.disable_progress_bars()
    for name, found in (
        ("pets", datasets.Dataset.from_dict(pictures, features=features)),
        ("waves", datasets.Dataset.from_dict({"values": numbers.tolist(), "height": numbers[:, 0].tolist()})),
        ("stories", datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * COUNT})),
    ):
        found.save_to_disk(str(folder / name))
