"""One export in this process: what stands in the folder, and what is refused before anything is there."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.schema.data import CustomDataConfig, DigitsConfig
from hpc_trainer.config.schema.model import CustomModelConfig, MlpConfig
from hpc_trainer.config.schema.optim import AdamwConfig
from hpc_trainer.config.schema.task import CustomTaskConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.deploy import trained as deployed
from hpc_trainer.deploy.card import as_page, size
from hpc_trainer.deploy.evaluate_torch import evaluate_model
from hpc_trainer.deploy.export_torch import counts, export, latencies
from hpc_trainer.errors import ConfigError
from hpc_trainer.models.mlp import Mlp
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.ability import Ability
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.deploy.own_parts import TwoInputs

CONFIG = TrainConfig(model=MlpConfig(hidden_dim=16, num_layers=1), data=DigitsConfig(num_eval=20), optim=AdamwConfig())


def _asked(folder: Path, model: nn.Module, **changes: Any) -> dict[str, Any]:
    store = CheckpointStore(folder / "checkpoints", group=RankGroup(), keep_last=1, attempt=0)
    made_with = {"dataset": {"input_shape": [1, 8, 8], "num_classes": 10}}
    store.save(
        3, replicated={"step": 3, "objects": {"model": model.state_dict()}}, per_rank={}, meta={"made_with": made_with}
    )
    (folder / "out").mkdir()
    return {
        "config": to_plain(CONFIG), "checkpoints": str(folder / "checkpoints"), "run_id": "mlp-1", "step": 3,
        "name": "model", "over": None, "is_model": True, "folder": str(folder / "out"), "to": "safetensors",
        "quantize": None, "prune": None, "measure": True, "tolerance": None, "title": "mlp-1, step 3", **changes,
    }  # fmt: skip


def _mlp() -> Mlp:
    torch.manual_seed(1)
    return Mlp(CONFIG.model, input_shape=(1, 8, 8), num_classes=10)


def test_the_card_says_what_the_file_is(tmp_path: Path) -> None:
    model = _mlp()
    model.layers[1].weight.data[:4] = 0
    told = export(_asked(tmp_path, model))
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["card.json", "card.md", "load.py", "model.safetensors"]
    card = json.loads((out / "card.json").read_text())
    assert card == json.loads(json.dumps(told["card"]))
    total = sum(each.numel() for each in model.parameters())
    assert (card["model"]["num_numbers"], told["num_elements"]) == (total, total)
    assert card["model"]["sparsity"] == pytest.approx(4 * 64 / total)
    assert card["built_for"] == {"input_shape": [1, 8, 8], "num_classes": 10}
    assert (card["inputs"], card["outputs"]["shape"]) == ({"dtype": "float32", "shape": [1, 8, 8]}, [10])
    assert card["same"]["max_abs_difference"] == 0
    assert card["measured"]["num_samples"] == 20
    assert card["measured"]["original"]["metrics"] == card["measured"]["exported"]["metrics"]
    page = (out / "card.md").read_text()
    assert page == as_page(card)
    assert f"| mlp (`hpc_trainer.models.mlp.Mlp`), {total:,} elements, {4 * 64 / total:.1%} of them zero |" in page


def test_numbers_keep_the_format_of_the_checkpoint(tmp_path: Path) -> None:
    """As of precision=bf16_sr, whose weights are of 16 bits; the model that they are proved in has 32."""
    card = export(_asked(tmp_path, _mlp().bfloat16()))["card"]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {each.dtype for each in saved.values()} == {torch.bfloat16}
    assert card["model"]["num_bytes"] == 2 * card["model"]["num_numbers"]
    assert card["same"]["max_abs_difference"] == 0


def test_without_measuring_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    card = export(_asked(tmp_path, _mlp(), measure=False))["card"]
    assert (card["measured"], card["same"], card["inputs"]) == (None, None, None)
    assert card["built_for"] is not None, "eval can build it"


def test_fewer_bits_that_are_too_far_off_are_refused(tmp_path: Path) -> None:
    asked = _asked(tmp_path, _mlp(), to="torch", quantize="int8", measure=False)
    with pytest.raises(ConfigError, match=r"differ from the model's by up to .* or a larger --tolerance"):
        export({**asked, "tolerance": 1e-9})
    (tmp_path / "out" / "model.pt").unlink()
    card = export(asked)["card"]
    assert card["num_quantized"] == 64 * 16 + 16 * 10


def test_what_an_export_says_to_trust_is_not_asked(tmp_path: Path) -> None:
    card = export(_asked(tmp_path, _mlp()))["card"]
    own = dataclasses.replace(CONFIG, model=CustomModelConfig(_target_="os.system", kwargs={"command": "true"}))
    asked = {"config": to_plain(own), "card": card, "folder": str(tmp_path / "out")}
    with pytest.raises(ConfigError, match=r"model._target_=os.system: this package is not on the allow-list"):
        evaluate_model(asked)
    told = evaluate_model({**asked, "config": to_plain(CONFIG)})
    assert told["metrics"] == card["measured"]["exported"]["metrics"]


def test_a_model_of_two_inputs_has_weights_and_no_graph(tmp_path: Path) -> None:
    here = "tests.unit.deploy.own_parts"
    config = dataclasses.replace(
        CONFIG, model=CustomModelConfig(_target_=f"{here}.TwoInputs"), data=CustomDataConfig(_target_=f"{here}.Rows"),
        task=CustomTaskConfig(_target_=f"{here}.Fit"), trust=["tests"],
    )  # fmt: skip
    asked = _asked(tmp_path, TwoInputs(), config=to_plain(config))
    with pytest.raises(ConfigError, match="task=custom calls the model with other arguments than one tensor"):
        export({**asked, "to": "torch_export"})
    card = export(asked)["card"]
    assert card["notes"][0].startswith("Not measured: task=custom calls")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["layer.bias", "layer.weight"]


class NarrowingAbility(Ability):
    """Its deployed model has half the hidden units: another one than the class builds."""

    def deployed(self, model: nn.Module) -> nn.Module:
        small = Mlp(MlpConfig(hidden_dim=8, num_layers=1), input_shape=(1, 8, 8), num_classes=10)
        with torch.no_grad():
            small.layers[1].weight.copy_(model.layers[1].weight[:8])
            small.layers[1].bias.copy_(model.layers[1].bias[:8])
            small.layers[4].weight.copy_(model.layers[4].weight[:, :8])
            small.layers[4].bias.copy_(model.layers[4].bias)
        return small


@pytest.mark.long
def test_a_model_that_is_deployed_smaller_needs_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the run's own list of features, as a pruned run would have it."""
    monkeypatch.setattr(deployed, "abilities", lambda config: [NarrowingAbility(config)])
    model = _mlp()
    model.layers[1].weight.data[8:] = 0
    model.layers[1].bias.data[8:] = 0
    asked = _asked(tmp_path, model, measure=False)
    with pytest.raises(ConfigError, match=r"layers.1.weight is \[8, 64\] in the export and \[16, 64\] in that class"):
        export(asked)
    card = export({**asked, "to": "torch_export"})["card"]
    assert card["model"]["num_numbers"] == 8 * 64 + 8 + 8 * 10 + 10
    saved = runpy.run_path(str(tmp_path / "out" / "load.py"))["model"]
    inputs = torch.randn(3, 1, 8, 8)
    assert torch.allclose(saved(inputs), model.eval()(inputs), atol=1e-6)


@pytest.mark.parametrize(
    ("to", "prune", "zero", "smaller"),
    [("safetensors", "0.5", 0.5, 1.0), ("torch_export", "2:4", 0.5, 1.0), ("torch_export", "channels:0.25", 0.0, 0.75)],
)
def test_what_is_pruned_at_export_stands_beside_the_original(
    tmp_path: Path, to: str, prune: str, zero: float, smaller: float
) -> None:
    model = _mlp()
    card = export(_asked(tmp_path, model, to=to, prune=prune))["card"]
    matrices = sum(each.numel() for each in model.parameters() if each.ndim > 1)
    total = sum(each.numel() for each in model.parameters())
    assert card["prune"] == prune
    assert card["model"]["sparsity"] == pytest.approx(zero * matrices / total, abs=1e-3)
    assert card["model"]["num_numbers"] == pytest.approx(smaller * total, rel=0.01)
    measured = card["measured"]
    assert measured["original"]["metrics"]["eval_loss"] != measured["exported"]["metrics"]["eval_loss"]
    assert measured["original"]["num_bytes"] == 4 * total
    assert card["same"]["max_abs_difference"] <= card["same"]["tolerance"]
    assert f"pruned {prune}" in (tmp_path / "out" / "card.md").read_text()


def test_weights_alone_of_fewer_channels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Use --to torch_export or --to onnx"):
        export(_asked(tmp_path, _mlp(), prune="channels:0.5"))
    with pytest.raises(ConfigError, match="finds no channel of"):
        export(_asked(tmp_path / "one", Mlp(MlpConfig(hidden_dim=1, num_layers=1), input_shape=(1, 8, 8),
               num_classes=10), config=to_plain(dataclasses.replace(CONFIG, model=MlpConfig(hidden_dim=1,
               num_layers=1))), to="torch_export", prune="channels:0.5"))  # fmt: skip


def test_models_take_turns() -> None:
    calls: list[tuple[str, int]] = []
    models = {name: lambda batch, name=name: calls.append((name, len(batch))) for name in ("one", "other")}
    told = latencies(models, torch.zeros(5, 2))
    assert [told[name][batch]["n"] for name in models for batch in ("1", "64")] == [50] * 4
    assert {count for _, count in calls} == {1, 64}
    turns = [name for name, count in calls if count == 1]
    assert turns[:4] == ["other", "one", "one", "other"], "neither is always the first"
    assert all(each["low_s"] <= each["median_s"] <= each["high_s"] for side in told.values() for each in side.values())


def test_counts_and_sizes() -> None:
    state = {"a": torch.tensor([0.0, 1.0]), "b": torch.zeros(2, dtype=torch.int64), "c": "words"}
    assert counts(state) == {"num_numbers": 2, "num_bytes": 8, "sparsity": 0.5}
    assert (size(999), size(8_715_996), size(1e15)) == ("999 B", "8.72 MB", "1e+03 TB")
