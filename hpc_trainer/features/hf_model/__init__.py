"""`model=hf`: a model of transformers. Its folder's configuration is copied into the run's when a run is planned."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_trainer.config.load import Memo
from hpc_trainer.config.packages import missing
from hpc_trainer.config.schema.data import DataConfig, DigitsConfig
from hpc_trainer.config.schema.model import CONFIG_FILE, HfConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row
from hpc_trainer.config.user_files import read_given
from hpc_trainer.errors import ConfigError, did_you_mean


def _problems(config: TrainConfig) -> Iterator[str]:
    assert isinstance(config.model, HfConfig)
    try:
        described(config.model, config.data)
    except ConfigError as error:
        yield str(error)


def _fill(config: TrainConfig, memo: Memo) -> None:
    assert isinstance(config.model, HfConfig)
    config.model = memo.of(described, config.model, config.data)


FEATURE = Feature(
    on="model=hf",
    off="model=gpt",
    example="model=hf model.architecture=GPT2LMHeadModel +model.config={n_layer:2,n_embd:16,n_head:2,"
    "resid_pdrop:0,embd_pdrop:0,attn_pdrop:0,tie_word_embeddings:false}",
    excludes=(
        Row(
            "parallel.tensor_parallel",
            "it shares layers out by the model's plan, and the model has none",
            use="parallel=fsdp",
        ),
        Row(
            "parallel.pipeline_parallel",
            "it cuts a model by the parts that the model names, and this model names none",
            use="parallel=fsdp",
        ),
        Row("train.loss_chunk_size", "it runs the output layer separately, which the model does not support"),
        Row("train.channels_last", "the combination is untested"),
        Row("task=multi_label|regression", "its last layer returns classes", use="task=classification"),
    ),
    problems=_problems,
    fill=_fill,
)

_NOT_KEPT = ("architectures", "transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Keys that say nothing about the model, or only how its file was written: weights are fp32 here."""


class Kind(enum.Enum):
    """Kind of output of a class of transformers; the value is the table of transformers that lists the classes."""

    causal_lm = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    sequence_classification = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    image_classification = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"


def described(model: HfConfig, data: DataConfig) -> HfConfig:
    """Return `model` with its `architecture` and whole `config`: given values first, then those of the folder.

    A model that is described already stays the same, also if its folder is gone.

    Raises:
        ConfigError: transformers is missing or does not know the class, the folder has no config.json, or the data do
            not fit such a model.
    """
    problem = missing("model=hf", "transformers")
    if problem is not None:
        raise ConfigError(f"{problem}, or choose another model.")
    tables = _tables()
    content = _read(model)
    if "auto_map" in content:
        raise ConfigError(
            f"model.path={model.path}: its {CONFIG_FILE} names code of its own (auto_map), which is never run. Use a "
            "model whose class is in transformers, or your own code: model=custom."
        )
    named = content.get("architectures") or [None]
    architecture = model.architecture or named[0]
    if not isinstance(architecture, str):
        raise ConfigError(
            "model=hf needs the name of a class: model.architecture=GPT2LMHeadModel, or model.path=FOLDER with a "
            f"{CONFIG_FILE} that names one."
        )
    if architecture not in tables:
        raise ConfigError(
            f"model.architecture={architecture} is not a class of transformers for texts (..ForCausalLM, "
            f"..ForSequenceClassification) or images (..ForImageClassification). {did_you_mean(architecture, tables)}"
        )
    types, kind = tables[architecture]
    usual = next((candidate for candidate in types if architecture.lower().startswith(candidate)), types[0])
    model_type = content.get("model_type", usual)
    if model_type not in types:
        raise ConfigError(
            f"model.architecture={architecture} is of the type {usual}, and model.path={model.path} says {model_type}. "
            "Leave out model.architecture, or name a class of that type."
        )
    _check_data(architecture, kind, data)
    kept = {name: value for name, value in content.items() if name not in _NOT_KEPT}
    path = None if model.path is None else str(Path(model.path).expanduser().absolute())
    config = {**kept, **model.config, "model_type": model_type}
    return dataclasses.replace(model, path=path, architecture=architecture, config=config)


def _read(model: HfConfig) -> Mapping[str, Any]:
    """Return config.json of the folder; {} without a folder, or for a model that is described already."""
    if model.path is None or (model.architecture is not None and "model_type" in model.config):
        return {}
    place = Path(model.path).expanduser() / CONFIG_FILE
    try:
        content = json.loads(read_given(place))
        if not isinstance(content, dict):
            raise ValueError("it is not a mapping")
    except OSError as error:
        raise ConfigError(
            f"model.path={model.path} must be a folder with a {CONFIG_FILE}, as save_pretrained writes it: "
            f"{error.strerror or error}. Nothing is downloaded: copy the folder here, or use model.architecture=CLASS."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is damaged: {error}. Copy the folder again.") from error
    return content


def _check_data(architecture: str, kind: Kind, data: DataConfig) -> None:
    """Raise ConfigError if the data do not fit the kind of model, as far as the configuration describes them."""
    has_images = isinstance(data, DigitsConfig) or hasattr(data, "image_size")
    has_tokens = data.vocabulary() is not None
    if kind is Kind.image_classification and has_tokens:
        raise ConfigError(
            f"model.architecture={architecture} reads images, and data={data.name} is text. Use data=digits, or "
            "a class for texts."
        )
    if kind is not Kind.image_classification and has_images:
        raise ConfigError(
            f"model.architecture={architecture} reads text, and data={data.name} has images. Use data=text_bytes, or a "
            "class for images."
        )


@functools.cache
def _tables() -> Mapping[str, tuple[list[str], Kind]]:
    """Return the classes of transformers: name -> (types of configuration that go with it, kind)."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0], "models", "auto", "modeling_auto.py")
    tables = {kind.value: kind for kind in Kind}
    table: dict[str, tuple[list[str], Kind]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [target.id for target in targets if isinstance(target, ast.Name) and target.id in tables]
        if not names or not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        for model_type, classes in ast.literal_eval(node.value.args[0]):
            for class_name in (classes,) if isinstance(classes, str) else classes:
                table.setdefault(class_name, ([], tables[names[0]]))[0].append(model_type)
    return table
