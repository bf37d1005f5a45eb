"""`model=hf`: a model of transformers, built from its configuration alone; `init_from` loads weights.

The model keeps the library's class, with its names of layers and weights, so files of the library's format can be
loaded and saved as they are. Only `forward` differs: it takes only the inputs, and returns only the logits.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from hpc_trainer.config.packages import optional
from hpc_trainer.config.schema.model import HfConfig
from hpc_trainer.errors import ConfigError
from hpc_trainer.models import check_num_classes


def build(config: HfConfig, *, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build the model with random weights, always in fp32.

    The model maps tokens int64 [batch, seq] to logits [batch, seq, vocabulary] (..ForCausalLM) or [batch, num_classes]
    (..ForSequenceClassification), or images float32 [batch, C, H, W] to logits [batch, num_classes].

    Raises:
        ConfigError: transformers is missing or refuses a value, or the model is too small for the data.
    """
    check_num_classes(num_classes)
    kind = _class_of(config)
    values = config.values_for(input_shape, num_classes)
    values.pop("model_type", None)
    try:
        described = kind.config_class(**values)
        _check(described, config, input_shape, num_classes)
        if hasattr(described, "use_cache"):
            described.use_cache = False  # a cache of keys and values, for generation only
        model: nn.Module = _with_logits(kind)(described)
    except ConfigError:
        raise
    except Exception as error:  # the library checks values in many ways
        raise ConfigError(
            f"model.architecture={config.architecture}: transformers cannot build it from model.config: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model


def _class_of(config: HfConfig) -> Any:
    """Return the class of transformers. Raises ConfigError if there is none, or if the package is missing."""
    transformers = optional("transformers", "model=hf")
    kind = getattr(transformers, config.architecture or "", None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ConfigError(
            f"model.architecture={config.architecture} is not a model of transformers {transformers.__version__}."
        )
    return kind


def _check(described: Any, config: HfConfig, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Check that the model can use the data. Raises ConfigError if it reads other data, or is too small for these."""
    wanted = 3 if config.reads_images else 1
    if len(input_shape) != wanted:
        reads = "images (channels, height, width)" if wanted == 3 else "tokens (seq_len,)"
        raise ConfigError(
            f"model.architecture={config.architecture} reads {reads}, and the data's input_shape is {input_shape}."
        )
    most = getattr(described, "max_position_embeddings", None)
    if wanted == 1 and isinstance(most, int) and input_shape[0] > most:
        raise ConfigError(
            f"model.architecture={config.architecture} has positions for {most} tokens, and a window has "
            f"{input_shape[0]}. Use data.seq_len={most}."
        )
    if not config.has_labels and described.vocab_size < num_classes:
        raise ConfigError(
            f"model.config.vocab_size={described.vocab_size} must be at least the {num_classes} tokens of the data. "
            f"Use model.config.vocab_size={num_classes}, or the model's own tokenizer for the data."
        )


@functools.cache
def _with_logits(kind: Any) -> Any:
    """Return a subclass of `kind` with the same name, whose `forward` takes only inputs and returns only logits."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        logits: Tensor = kind.forward(self, **{kind.main_input_name: inputs}).logits
        return logits

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
