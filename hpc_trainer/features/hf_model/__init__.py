"""`model=hf`: a model of transformers. Its folder's configuration is copied into the run's when a run is planned."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_trainer.config.load import Memo
from hpc_trainer.config.schema.model import HfConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row
from hpc_trainer.errors import ConfigError
from hpc_trainer.features.hf_model.reading import described


def _problems(config: TrainConfig) -> Iterator[str]:
    if not isinstance(config.model, HfConfig):
        return
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
            "it shares layers out by the model's plan, and there is none",
            use="parallel=fsdp",
        ),
        Row("parallel.pipeline_parallel", "it cuts a model by its own parts, and names none", use="parallel=fsdp"),
        Row("train.loss_chunk_size", "it runs the output layer apart, which the model does not show"),
        Row("train.channels_last", "nobody has tried both"),
        Row("task=multi_label|regression", "its last layer is one of classes", use="task=classification"),
    ),
    problems=_problems,
    fill=_fill,
)
