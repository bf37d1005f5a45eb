"""What `plan` says of `augment`."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.choice import keys_of
from hpc_trainer.features.augment import FEATURE, OF_IMAGES, Crop
from tests.unit.record.builders import make_config

PHOTOGRAPHS = ("model=resnet18", "data=synthetic_images")


def _problems(*words: str) -> list[str]:
    return list(find_problems(make_config(*words)))


@pytest.mark.parametrize("choice", ["none", "flip_crop", "imagenet", "randaugment"])
def test_each_file_of_the_group_is_taken_for_photographs(choice: str) -> None:
    config = make_config(*PHOTOGRAPHS, f"augment={choice}")
    assert list(find_problems(config)) == []
    assert FEATURE.is_on(config) is config.augment.changes_images is (choice != "none")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["augment=imagenet"],
            "augment.saturation=0.4 is for colour images, and those of data=digits are grey. Use augment.saturation=0.",
        ),
        (
            [*PHOTOGRAPHS, "data.num_channels=1", "augment.hue=0.1"],
            "augment.hue=0.1 is for colour images, and those of data=synthetic_images are grey. Use augment.hue=0.",
        ),
        (
            ["augment=flip_crop", "augment.size=9"],
            "augment.size=9 must be at most 8, the side of the images of data=digits: evaluations crop their centre. "
            "Use augment.size=8.",
        ),
        (
            ["augment.run_on=device", "augment.label_noise=0.1"],
            "augment.run_on=device has no effect: no augmentation is set. Use augment.run_on=workers, or "
            "augment=flip_crop augment.run_on=device.",
        ),
        (
            ["augment.size=4"],
            "augment.size=4 is for augment.crop=resized or padded, and has no effect with augment.crop=none. Use "
            "augment.size=null, its default, or augment.crop=resized.",
        ),
        (
            ["augment.mix_share=0.5"],
            "augment.mix_share=0.5 is for augment.mixup_alpha=... or augment.cutmix_alpha=..., and has no effect with "
            "augment.mixup_alpha=0 augment.cutmix_alpha=0. Use augment.mix_share=1, its default, or another value of "
            "augment.mixup_alpha.",
        ),
        (
            ["task=language_model", "augment.mixup_alpha=0.2"],
            "augment.mixup_alpha=0.2 does not go with task=language_model: it mixes two classes. Use "
            "task=classification.",
        ),
        (
            ["augment.flip=0.5", "augment.run_on=device", "train.micro_batch_size=auto"],
            "augment.run_on=device does not go with train.micro_batch_size=auto: it measures only the memory of the "
            "model. Use augment.run_on=workers.",
        ),
    ],
)
def test_what_cannot_be_is_told_with_what_can(words: list[str], told: str) -> None:
    assert _problems(*words) == [told]


def test_text_is_not_augmented() -> None:
    problems = _problems("model=gpt", "data=text_bytes", "augment.label_noise=0.1")
    assert len(problems) == 2
    assert all("does not go with" in each and each.endswith("augment.label_noise=0.") for each in problems)


def test_colours_need_kornia_and_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "kornia" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert _problems("augment.brightness=0.2", "augment.randaugment_ops=2") == [
        "augment.brightness needs the package kornia: pip install 'hpc_trainer[images]', or augment.brightness=0 "
        "augment.randaugment_ops=0."
    ]
    assert _problems("augment=flip_crop", "augment.mixup_alpha=0.2", "augment.erasing=0.2") == []


def test_each_key_that_changes_images_turns_the_feature_on() -> None:
    assert set(keys_of(FEATURE.on)) == {*OF_IMAGES, "augment.label_noise"}
    values = {"crop": Crop.padded, "randaugment_ops": 1}
    for key in OF_IMAGES:
        config, name = TrainConfig(), key.removeprefix("augment.")
        assert not config.augment.changes_images
        assert not FEATURE.is_on(config)
        setattr(config.augment, name, values.get(name, 0.2))
        assert config.augment.changes_images, key
        assert FEATURE.is_on(config), key
