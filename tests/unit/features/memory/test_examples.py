"""`plan --memory` has an estimate for the example of each feature, for each shipped model, and for models in use."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.load import to_plain
from hpc_trainer.config.rules.validate import validate
from hpc_trainer.runtime.own_process import OwnProcess
from tests import warm
from tests.composed import composed
from tests.unit.config.table import pairs
from tests.unit.training.built_parts import with_first_weights

SEED, SAMPLE = 26, 3
_STEPS = ("train.num_steps=2", "train.global_batch_size=16", "cluster=slurm")
_TEXT = (*_STEPS, "data=text_bytes", "data.seq_len=16", "data.eval_fraction=0.01")
_IMAGES = (*_STEPS, "data=synthetic_images", "data.num_samples=40", "data.num_eval=8", "data.image_size=32")
_GPT = (*_TEXT, "model=gpt", "model.num_layers=2", "model.embed_dim=16", "model.num_heads=2")
_HF_GPT = (*_TEXT, *pairs.FEATURES["hf_model"].example.split())
_HF_VIT = (
    *_IMAGES, "model=hf", "model.architecture=ViTForImageClassification",
    "+model.config={num_hidden_layers:2,hidden_size:16,intermediate_size:32,num_attention_heads:2,patch_size:8}",
)  # fmt: skip
_FSDP, _LORA = ("hardware=gpu_x2", "parallel=fsdp"), ("train.lora.rank=4",)
CONVERTED = (*_IMAGES, "model=custom", "model._target_=tests.unit.features.memory.estimates.Converted")
CASES: Mapping[str, tuple[str, ...]] = {
    "lora": (*_GPT, *_LORA),
    "lora, fsdp": (*_GPT, *_FSDP, *_LORA),
    "lora, hf": (*_HF_GPT, *_LORA),
    "lora, hf, fsdp, bf16": (*_HF_GPT, *_FSDP, *_LORA, "precision=bf16"),
    "lora, vit": (*_IMAGES, "model=vit_tiny", *_LORA),
    "hf vit": _HF_VIT,
    "converted": CONVERTED,
    "task that reads a count": (*_GPT, "task=custom", "task._target_=hpc_trainer.tasks.cross_entropy.CrossEntropy"),
}
"""Models whose layers are converted, and code that reads values of tensors; each failed once."""
_MODELS = sorted(path.stem for path in (Path(__file__).parents[4] / "conf" / "model").glob("*.yaml"))
_WORDS_OF = {
    "custom": CONVERTED,
    "hf": _HF_GPT,
    "gpt": _GPT,
    "mlp": (*_STEPS, "model=mlp"),
    "cnn": (*_STEPS, "model=cnn"),
}


@pytest.fixture(autouse=True)
def _warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess.Popen, "_execute_child", warm.execute_child)


def _check_estimates(cases: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Estimate all cases in one process, which is forked for each; none fails or is empty."""
    failed = {}
    with OwnProcess("tests.unit.features.memory.estimates") as process:
        for name, words in cases.items():
            config = composed(with_first_weights(folder / f"{len(name)}.safetensors", [*words]))
            config.trust = ["tests"]
            validate(config)
            found: dict[str, Any] = process.ask({"config": to_plain(config), "has_evaluation": True})
            if "error" in found or not min(found["weights"], found["activations"], found["checkpoint"]):
                failed[name] = found
    assert failed == {}


def _examples() -> dict[str, list[str]]:
    """The words of each feature's example, on its first ground."""
    found = {}
    for name, feature in pairs.FEATURES.items():
        ground = pairs.home(feature)
        assert ground is not None, name
        kind, rank = ("cpu", "tasks") if ground.is_cpu else ("gpu", "gpus")
        hardware = [f"hardware={kind}_x1", f"hardware.{rank}_per_node={ground.ranks}"]
        found[name] = [*pairs.words(ground, feature), "cluster=slurm", *hardware]
    return found


@pytest.mark.long
def test_models_in_use_and_a_sample_of_the_examples_are_estimated(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    examples = _examples()
    _check_estimates(
        CASES | {name: examples[name] for name in random.Random(SEED).sample(sorted(examples), SAMPLE)}, tmp_path
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_example_of_every_feature_is_estimated(tmp_path: Path) -> None:
    _check_estimates(_examples(), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_shipped_model_is_estimated(tmp_path: Path) -> None:
    _check_estimates({name: _WORDS_OF.get(name, [*_IMAGES, f"model={name}"]) for name in _MODELS}, tmp_path)
