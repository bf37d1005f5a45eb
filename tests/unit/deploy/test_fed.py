"""New data become a model's inputs as in its training: compared with plain PIL, numpy and tokenizers, kind by kind."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from hpc_trainer.config.load import to_plain
from hpc_trainer.data.prepare.job import Settings
from hpc_trainer.data.prepare.tokens import TokenOptions, prepare_tokens
from hpc_trainer.deploy import evaluate as ask_model
from hpc_trainer.deploy import evaluate_torch as torch_side
from hpc_trainer.deploy.evaluate import Target, predict
from hpc_trainer.deploy.export_torch import export
from hpc_trainer.deploy.request import facts_of_run, new_data
from hpc_trainer.errors import ConfigError, DataError
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.ability import abilities
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.contract import ResumeContract
from tests.composed import composed
from tests.unit.data.images.making import encoded

MLP = ["model=mlp", "model.hidden_dim=8"]
GPT = ["model=gpt", "model.num_layers=1", "model.num_heads=2", "model.embed_dim=8"]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer in this process what another process would be asked, with the question passed through JSON."""

    def ask(module: str, verb: str, asked: dict[str, Any]) -> dict[str, Any]:
        answer = {"eval": torch_side.evaluate_model, "predict": torch_side.predict}[verb]
        return answer(json.loads(json.dumps(asked)))

    monkeypatch.setattr(ask_model, "ask", ask)


@dataclasses.dataclass
class Served:
    """An export of a run that has made no step."""

    folder: Path
    card: dict[str, Any]
    inputs: torch.Tensor
    """Of the run's evaluation samples, as the data set makes them."""

    @property
    def load(self) -> dict[str, Any]:
        return runpy.run_path(str(self.folder / "load.py"))

    def outputs(self, words: list[str]) -> tuple[dict[str, np.ndarray], list[str]]:
        """What `predict` writes of other data, and its notes."""
        output = self.folder.parent / f"said-{len(list(self.folder.parent.glob('said-*')))}.npz"
        told = predict(Target(name=str(self.folder), runs_dir=self.folder, overrides=words), output)
        with np.load(output) as said:
            return dict(said), told["notes"]

    def expected(self, inputs: Any) -> np.ndarray:
        model = self.load["model"]
        return torch.softmax(model(torch.as_tensor(inputs)).detach(), -1).numpy()


def serve(folder: Path, words: list[str], forget: Callable[[dict[str, Any]], Any] = lambda meta: None) -> Served:
    """Exports a run of these words; `forget` takes from its checkpoint's `meta` what an older version had not."""
    is_text = any(word in words for word in ("data=tokens", "data=text_bytes"))
    config, paths = composed(["cluster=local", *(GPT if is_text else MLP), *words]), RunPaths(folder / "run")
    task, active = build_task(config), abilities(config)
    train, held_out = (build_dataset(config, split, task, active) for split in ("train", "eval"))
    torch.manual_seed(5)
    model = build_model(config, train)
    contract = ResumeContract.of(config, RankGroup())
    contract.describe({"dataset": train, "eval_dataset": held_out})
    meta = contract.meta()
    forget(meta)
    store = CheckpointStore(paths.checkpoints, group=RankGroup(), keep_last=1, attempt=0)
    store.save(3, replicated={"step": 3, "objects": {"model": model.state_dict()}}, per_rank={}, meta=meta)
    out = folder / "served"
    out.mkdir()
    asked = {
        "checkpoints": str(paths.checkpoints), "run_id": "mlp-1", "step": 3, "name": "model", "over": None,
        "is_model": True, "folder": str(out), "to": "safetensors", "quantize": None, "prune": None, "measure": True,
        "tolerance": None, "title": "mlp-1, step 3", **new_data(config, facts_of_run(paths, config, 3)).request(),
    }  # fmt: skip
    card = export(json.loads(json.dumps(asked)))["card"]
    (out / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    inputs = held_out.__getitems__(range(len(held_out)))[0]
    return Served(out, json.loads(json.dumps(card)), inputs)


# --- pictures ---

CLASSES = ("ant", "bee", "cat")


def _photo(seed: int, height: int, width: int) -> np.ndarray:
    """Smooth, so that a resize has something to keep."""
    across, down = np.meshgrid(np.linspace(0, 5, width), np.linspace(0, 4, height))
    waves = [np.sin((seed + 1) * across + channel) * np.cos(down * (channel + 1)) for channel in range(3)]
    return ((np.stack(waves, -1) + 1) * 127).astype(np.uint8)


def pictures(root: Path, classes: tuple[str, ...] = CLASSES, count: int = 4, extension: str = "png") -> Path:
    for split in ("train", "eval"):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                data = encoded(_photo(7 * label + number, 40 + number, 56 - number), extension)
                (root / split / name / f"{number}.{extension}").write_bytes(data)
    return root


def independent(path: Path, *, resize: int, size: int, mode: str, mean: list[float], std: list[float]) -> np.ndarray:
    """torchvision's Resize and CenterCrop on a picture, by Pillow alone: all of it is resized, then cut."""
    image = Image.open(path)
    if path.suffix == ".jpg":
        image.draft(mode, (image.width // 2, image.height // 2))  # what is made much smaller is decoded smaller
    image = image.convert(mode)
    short = min(image.size)
    image = image.resize(tuple(int(resize * side / short) for side in image.size), Image.Resampling.BILINEAR)
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.float64) / 255
    pixels = pixels.reshape(size, size, -1)
    return ((pixels - mean) / std).transpose(2, 0, 1).astype(np.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("channels", "mean", "std", "extension"),
    [(3, [0.3, 0.5, 0.6], [0.2, 0.1, 0.3], "png"), (1, [0.4], [0.25], "png"), (3, [0.1] * 3, [0.5] * 3, "jpg")],
)
def test_pictures(tmp_path: Path, channels: int, mean: list[float], std: list[float], extension: str) -> None:
    old = pictures(tmp_path / "old", extension=extension)
    (old / "statistics.json").write_text(json.dumps({"mean": mean, "std": std}))
    words = ["data=image_folder", f"data.path={old}", "data.image_size=12", f"data.num_channels={channels}"]
    served = serve(tmp_path, [*words, "data.resize=20"])
    made = served.card["preprocessing"]
    assert {name: made[name] for name in ("num_channels", "resize", "crop", "mean", "std")} == {
        "num_channels": channels, "resize": 20, "crop": [12, 12], "mean": mean, "std": std,
    }  # fmt: skip
    page = (served.folder / "card.md").read_text()
    assert "resize: 20 pixels of the shorter side" in page
    assert "crop: the centre, 12 x 12 pixels" in page

    paths = sorted((old / "eval").rglob(f"*.{extension}"))
    prepare = served.load["prepare"]
    assert torch.allclose(torch.cat([prepare(path) for path in paths]), served.inputs, atol=1e-6)
    mode = {1: "L", 3: "RGB"}[channels]
    for path, inputs in zip(paths, served.inputs.numpy(), strict=True):
        wanted = independent(path, resize=20, size=12, mode=mode, mean=mean, std=std)
        off = np.abs(inputs - wanted) * np.array(std, np.float32)[:, None, None] * 255
        assert off.max() < 2.1, "levels of 255: resizing only what is cut out rounds otherwise"

    new = pictures(tmp_path / "new", extension=extension)
    said, notes = served.outputs(["data=image_folder", f"data.path={new}"])
    assert notes == []
    assert said["probabilities"] == pytest.approx(served.expected(served.inputs), abs=1e-6)
    said, notes = served.outputs([f"data.path={new}"])
    assert notes == []
    assert said["probabilities"] == pytest.approx(served.expected(served.inputs), abs=1e-6)


def test_what_the_user_gives_takes_precedence_and_is_noted(tmp_path: Path) -> None:
    old = pictures(tmp_path / "old")
    words = ["data=image_folder", f"data.path={old}", "data.image_size=12", "data.mean=[0.3,0.3,0.3]"]
    served = serve(tmp_path, words)
    paths = sorted((old / "eval").rglob("*.png"))
    said, notes = served.outputs(
        ["data=image_folder", f"data.path={old}", "data.mean=[0.1,0.2,0.5]", "data.resize=30", "data.std=[0.5,0.5,0.5]"]
    )
    assert sorted(notes) == [
        "data.mean=[0.1, 0.2, 0.5], and the model was trained with [0.3, 0.3, 0.3].",
        "data.resize=30, and the model was trained with 14.",
    ]
    rest = {"size": 12, "mode": "RGB", "mean": [0.1, 0.2, 0.5], "std": [0.5] * 3}
    inputs = np.stack([independent(path, resize=30, **rest) for path in paths])
    assert said["probabilities"] == pytest.approx(served.expected(inputs), abs=5e-3)
    with pytest.raises(ConfigError, match=r"inputs of the shape \[3, 16, 16\]"):
        served.outputs(["data=image_folder", f"data.path={old}", "data.image_size=16"])


def test_an_augmented_run_crops_once_more(tmp_path: Path) -> None:
    old = pictures(tmp_path / "old")
    words = ["data=image_folder", f"data.path={old}", "data.image_size=16", "augment.crop=padded", "augment.size=10"]
    served = serve(tmp_path, words)
    assert (served.card["preprocessing"]["crop"], served.card["preprocessing"]["then_crop"]) == ([16, 16], [10, 10])
    paths = sorted((old / "eval").rglob("*.png"))
    made = torch.cat([served.load["prepare"](path) for path in paths])
    assert torch.allclose(made, served.inputs, atol=1e-6)
    said, notes = served.outputs(["data=image_folder", f"data.path={old}"])
    assert notes == []
    assert said["probabilities"] == pytest.approx(served.expected(served.inputs), abs=1e-6)


def test_classes_are_the_models_by_their_names(tmp_path: Path) -> None:
    served = serve(tmp_path, ["data=image_folder", f"data.path={pictures(tmp_path / 'old')}", "data.image_size=12"])
    few = pictures(tmp_path / "few", ("bee", "cat"))
    said, notes = served.outputs(["data=image_folder", f"data.path={few}"])
    assert (sorted(set(said["target"].tolist())), notes) == ([1, 2], [])
    with pytest.raises(DataError, match=r"has the class 'dog', and the model knows ant, bee, cat"):
        served.outputs(["data=image_folder", f"data.path={pictures(tmp_path / 'more', ('bee', 'dog'))}"])
    others = pictures(tmp_path / "others", ("x", "y", "z"))
    said, notes = served.outputs(["data=image_folder", f"data.path={others}"])
    assert sorted(set(said["target"].tolist())) == [0, 1, 2]
    assert notes[0].endswith("so classes are matched by number: x is ant.")


# --- Hugging Face ---


def hf_folder(root: Path, classes: tuple[str, ...] = CLASSES, count: int = 4) -> Path:
    """The pictures of `pictures`, of both splits alike."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets

    rows = [(label, number) for label in range(len(classes)) for number in range(count)]
    cells = [{"bytes": encoded(_photo(7 * label + n, 40 + n, 56 - n)), "path": None} for label, n in rows]
    features = datasets.Features({"photo": datasets.Image(), "kind": datasets.ClassLabel(names=list(classes))})
    made = datasets.Dataset.from_dict({"photo": cells, "kind": [label for label, _ in rows]}, features=features)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(root))
    return root


HF = ["data=hf_dataset", "data.input=photo", "data.target=kind", "data.eval_split=test"]


@pytest.mark.long
def test_hugging_face_pictures(tmp_path: Path) -> None:
    old, new = hf_folder(tmp_path / "old"), hf_folder(tmp_path / "new", ("bee", "ant", "cat"))
    served = serve(tmp_path, [*HF, f"data.path={old}", "data.image_size=10"])
    wanted = []
    for label, number in [(label, number) for label in range(3) for number in range(4)]:
        image = Image.fromarray(_photo(7 * label + number, 40 + number, 56 - number))
        pixels = np.asarray(image.resize((10, 10), Image.Resampling.BILINEAR), np.float32) / 255
        wanted.append(pixels.transpose(2, 0, 1))
    assert served.inputs.numpy() == pytest.approx(np.stack(wanted), abs=1e-6)
    said, notes = served.outputs(["data=hf_dataset", f"data.path={new}", "data.eval_split=test"])
    assert notes == []
    assert said["probabilities"] == pytest.approx(served.expected(np.stack(wanted)), abs=1e-6)
    assert said["target"].tolist() == [1] * 4 + [0] * 4 + [2] * 4, "numbers of the model's classes"
    path = tmp_path / "one.png"
    path.write_bytes(encoded(_photo(0, 40, 56)))
    assert served.load["prepare"](path).numpy() == pytest.approx(wanted[0][None], abs=1e-6)

    said, notes = served.outputs(["data=image_folder", f"data.path={pictures(tmp_path / 'folder')}"])
    assert notes == []
    assert said["probabilities"] == pytest.approx(served.expected(np.stack(wanted)), abs=1e-5)


def test_pictures_of_folders_in_a_hugging_face_set(tmp_path: Path) -> None:
    old = pictures(tmp_path / "old")
    words = ["data=image_folder", f"data.path={old}", "data.image_size=12", "data.mean=[0.3,0.2,0.1]"]
    served = serve(tmp_path, words)
    said, notes = served.outputs([*HF, f"data.path={hf_folder(tmp_path / 'hf')}"])
    assert notes == []
    assert said["probabilities"] == pytest.approx(served.expected(served.inputs), abs=1e-6)


# --- tables, arrays ---

TOWNS = ("Ulm", "Bonn", "Jena")


def table(path: Path, first: int, columns: tuple[str, ...] = ("rooms", "town", "area", "job")) -> list[dict[str, Any]]:
    """Twenty rows, of which each file has others."""
    rows = [
        {"rooms": each, "town": TOWNS[each % 3], "area": each * each / 7, "job": ("cook", "smith")[each % 2]}
        for each in range(first, first + 20)
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({name: row.get(name, 1) for name in columns} for row in rows)
    return rows


@pytest.mark.few(1)
@pytest.mark.parametrize("encoding", ["one_hot", "ordinal"])
def test_tables(tmp_path: Path, encoding: str) -> None:
    rows = table(tmp_path / "old.csv", 0)
    table(tmp_path / "held_out.csv", 3)
    words = ["data=table", f"data.path={tmp_path / 'old.csv'}", "data.target=job", f"data.encoding={encoding}"]
    served = serve(tmp_path, [*words, f"data.eval_path={tmp_path / 'held_out.csv'}"])

    def encode(row: dict[str, Any]) -> list[float]:
        line = []
        for name in ("rooms", "area"):
            known = np.array([each[name] for each in rows], np.float64)
            line.append((row[name] - known.mean()) / known.std())
        towns = sorted(TOWNS)
        code = towns.index(row["town"]) if row["town"] in towns else 3
        return line + ([float(code == at) for at in range(4)] if encoding == "one_hot" else [code / 3])

    # Other rows and another order of columns, with one that the model never saw.
    new = table(tmp_path / "new.csv", 40, ("job", "area", "colour", "town", "rooms"))
    wanted = np.array([encode(row) for row in new], np.float32)
    where = [f"data.path={tmp_path / 'new.csv'}", f"data.eval_path={tmp_path / 'new.csv'}"]
    for words in (["data=table", *where], where):
        said, notes = served.outputs(words)
        assert notes == []
        assert said["probabilities"] == pytest.approx(served.expected(wanted), abs=1e-5)
        assert said["target"].tolist() == [each % 2 for each in range(20)]
    with (tmp_path / "new.csv").open() as file:
        made = served.load["prepare"](csv.DictReader(file)).numpy()
    assert made == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(ValueError, match="rooms has no value"):
        served.load["prepare"]([{**new[0], "rooms": ""}])
    page = (served.folder / "card.md").read_text()
    assert f"rooms ((x - 9.5) / {math.sqrt(33.25):.6g})" in page
    assert "town (Bonn, Jena, Ulm)" in page
    said, notes = served.outputs([*where, "data.numeric=[area,rooms]"])
    assert notes == ["data.numeric=[area, rooms], and the model was trained with [rooms, area]."]
    assert said["probabilities"] == pytest.approx(
        served.expected(wanted[:, [1, 0, *range(2, wanted.shape[1])]]), abs=1e-5
    )


def test_a_class_that_a_tables_model_does_not_know(tmp_path: Path) -> None:
    table(tmp_path / "old.csv", 0)
    served = serve(tmp_path, ["data=table", f"data.path={tmp_path / 'old.csv'}", "data.target=job"])
    text = (tmp_path / "old.csv").read_text().replace("cook", "baker")
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"job=baker, which the model does not know. Classes are cook, smith."):
        served.outputs([f"data.path={tmp_path / 'new.csv'}", f"data.eval_path={tmp_path / 'new.csv'}"])


def test_arrays(tmp_path: Path) -> None:
    values = np.arange(240, dtype=np.uint8).reshape(20, 12)
    for name in ("old", "new"):
        np.savez(tmp_path / f"{name}.npz", pixels=values, kinds=np.arange(20) % 3)
    names = ["data.inputs=pixels", "data.targets=kinds"]
    served = serve(tmp_path, ["data=arrays", f"data.path={tmp_path / 'old.npz'}", *names, "data.input_scale=0.01"])
    new = ["data=arrays", f"data.path={tmp_path / 'new.npz'}", f"data.eval_path={tmp_path / 'new.npz'}"]
    said, notes = served.outputs(new)
    assert notes == []
    assert said["probabilities"] == pytest.approx(served.expected(values.astype(np.float32) * 0.01), abs=1e-6)
    assert served.load["prepare"](values).numpy() == pytest.approx(values * 0.01, rel=1e-6)
    said, notes = served.outputs([*new, "data.input_scale=0.02"])
    assert notes == ["data.input_scale=0.02, and the model was trained with 0.01."]


# --- texts ---


def _tokenizer(path: Path, text: str) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    )
    made.save(str(path))
    return path


def _prepared(folder: Path, tokenizer: str, text: str) -> Path:
    source = folder.with_suffix(".txt")
    source.write_text("\n".join(f"{text} {number}" for number in range(60)))
    options = TokenOptions(tokenizer=tokenizer, document="line", eval_fraction=0.4)
    prepare_tokens([str(source)], folder, options, Settings(), lambda *_: None)
    return folder


@pytest.mark.long
def test_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    mine = _tokenizer(tmp_path / "mine.json", "the cat sat on the mat " * 9)
    other = _tokenizer(tmp_path / "other.json", "quick brown foxes jump over " * 9)
    old = _prepared(tmp_path / "old", str(mine), "the cat sat on the mat")
    served = serve(tmp_path, ["data=tokens", f"data.path={old}", "data.seq_len=8", "task=language_model"])
    made = served.card["preprocessing"]
    assert (made["tokenizer"], made["seq_len"], made["vocab_size"] > 256) == ("mine.json", 8, True)
    assert made["tokenizer_sha256"] in (served.folder / "card.md").read_text()
    text = "the mat sat on the cat, and on and on"
    ids = Tokenizer.from_file(str(mine)).encode(text, add_special_tokens=False).ids
    found = served.load["prepare"](text)
    assert found.shape[1:] == (8,)
    assert found.flatten().tolist()[: len(ids)] == ids
    assert not any(found.flatten().tolist()[len(ids) :])

    new = _prepared(tmp_path / "new", str(mine), "on the mat the cat")
    said, notes = served.outputs(["data=tokens", f"data.path={new}"])
    assert (notes, said["class"].shape[1]) == ([], 8), "with the run's length"
    with pytest.raises(DataError, match=r"has tokens of the tokenizer other.json .* trained with mine.json"):
        served.outputs(["data=tokens", f"data.path={_prepared(tmp_path / 'wrong', str(other), 'the cat sat')}"])


def test_bytes(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / f"{name}.txt").write_text(f"{name} words, ünd more " * 40)
    served = serve(tmp_path, ["data=text_bytes", f"data.path={tmp_path / 'old.txt'}", "data.seq_len=16"])
    said, notes = served.outputs(["data=text_bytes", f"data.path={tmp_path / 'new.txt'}"])
    assert (notes, said["class"].shape[1]) == ([], 16)
    found = served.load["prepare"]("zwölf Wörter")
    assert bytes(found.flatten().tolist()).rstrip(b"\0").decode() == "zwölf Wörter"
    assert served.load["model"](found).shape == (1, 16, 256)


# --- what older versions wrote ---


def test_a_run_and_an_export_of_before_know_mean_and_std_by_their_facts(tmp_path: Path) -> None:
    old = pictures(tmp_path / "old")
    statistics = json.dumps({"mean": [0.3, 0.5, 0.6], "std": [0.2, 0.1, 0.3]})
    (old / "statistics.json").write_text(statistics)
    words = ["data=image_folder", f"data.path={old}", "data.image_size=12"]
    served = serve(tmp_path, words, forget=lambda meta: meta.pop("fed_with"))
    made = dict(served.card["preprocessing"])
    assert made["mean"] == [0.3, 0.5, 0.6]
    new = pictures(tmp_path / "new")
    card = {name: made[name] for name in ("pixels", "mean", "std", "inputs")}  # as it was written
    (served.folder / "card.json").write_text(json.dumps({**served.card, "preprocessing": card}))
    said, notes = served.outputs(["data=image_folder", f"data.path={new}"])
    assert notes == []
    assert said["probabilities"] == pytest.approx(served.expected(served.inputs), abs=1e-6)
    (served.folder / "card.json").write_text(json.dumps({**served.card, "preprocessing": None}))
    said, notes = served.outputs(["data=image_folder", f"data.path={new}"])
    assert notes == [
        "An older version did not record the model's mean and std, so data=image_folder is read by its own files and "
        "keys. Set data.mean and data.std."
    ]
    (served.folder / "card.json").write_text(json.dumps({**served.card, "preprocessing": None}))
    _, notes = served.outputs([])
    assert notes == [], "its own data have their own statistics"


def test_a_table_of_before_is_scaled_by_the_runs_own_rows(tmp_path: Path) -> None:
    table(tmp_path / "old.csv", 0)
    served = serve(
        tmp_path, ["data=table", f"data.path={tmp_path / 'old.csv'}", "data.target=job"],
        forget=lambda meta: meta.pop("fed_with"),
    )  # fmt: skip
    (served.folder / "card.json").write_text(json.dumps({**served.card, "preprocessing": None, "classes": None}))
    (tmp_path / "again.csv").write_text((tmp_path / "old.csv").read_text())
    table(tmp_path / "new.csv", 40)
    words = [f"data.path={tmp_path / 'new.csv'}", f"data.eval_path={tmp_path / 'new.csv'}"]
    said, notes = served.outputs(words)
    assert notes == [
        "The scaling of the model's inputs is not recorded: it is taken from "
        f"data.path={tmp_path / 'old.csv'} as that file is now."
    ]
    (tmp_path / "old.csv").unlink()
    unscaled, notes = served.outputs(words)
    assert notes[0].startswith(
        "The scaling of the model's inputs is not recorded, and its own table cannot be read, so the new rows are"
    )
    assert unscaled["probabilities"] != pytest.approx(said["probabilities"], abs=1e-3)
    (tmp_path / "old.csv").write_text((tmp_path / "again.csv").read_text())
