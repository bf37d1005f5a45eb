"""`model=hf`: a model of transformers (Hugging Face), by the name of its class or from a folder; no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, SAFE, key
from hpc_trainer.config.schema.model.shipped import ModelConfig

CONFIG_FILE = "config.json"
"""Name of the file in which transformers keeps a model's configuration, beside its weights."""


@dataclass(kw_only=True, slots=True)
class HfConfig(ModelConfig):
    name: str = "hf"
    _target_: str = "hpc_trainer.models.hf.build"
    path: str | None = key(None, ALWAYS, APART, SAFE)
    """Folder with a config.json, as save_pretrained writes it. It is read when the run is planned, and its values are
    in `config` from then on. Weights come by `init_from=FOLDER`."""
    architecture: str | None = key(None, ALWAYS, COUNTS)
    """Name of a class of transformers, such as LlamaForCausalLM; null: the class that the folder's config.json
    names."""
    config: dict[str, Any] = key({}, ALWAYS, COUNTS)
    """Values of the model's own configuration, as {n_layer: 2}. They win over those of the folder, which win over the
    defaults of transformers."""

    @property
    def has_labels(self) -> bool:
        """True for a classifier; the other models are language models."""
        return "ForSequenceClassification" in str(self.architecture) or self.reads_images

    @property
    def reads_images(self) -> bool:
        """True for a classifier of images; the other models read tokens."""
        return "ForImageClassification" in str(self.architecture)

    def values_for(self, input_shape: tuple[int, ...], num_classes: int) -> dict[str, Any]:
        """Return the values of a planned model's own configuration; values that nobody has set follow from the data."""
        values = {**self.config}
        if not self.has_labels:
            values.setdefault("vocab_size", num_classes)
        elif len(values.get("id2label") or ()) != num_classes:  # labels of other data
            names = {str(label): f"LABEL_{label}" for label in range(num_classes)}
            values |= {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}}
        if self.reads_images and len(input_shape) == 3:
            values = {"image_size": input_shape[1], "num_channels": input_shape[0], **values}
        return values

    def file_for(self, input_shape: tuple[int, ...], num_classes: int) -> dict[str, Any]:
        """Return the config.json beside weights of this model, for `from_pretrained`."""
        return {**self.values_for(input_shape, num_classes), "architectures": [self.architecture], "dtype": "float32"}
