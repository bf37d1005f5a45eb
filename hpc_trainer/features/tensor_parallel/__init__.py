"""`parallel.tensor_parallel`: neighbours share each layer."""

from collections.abc import Iterator

from hpc_trainer.config.mesh import nearest_divisor
from hpc_trainer.config.schema.model import GptConfig, MlpKind, Trait, VitConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import OF_SHARED_LOOP, Feature, Row, models


def _problems(config: TrainConfig) -> Iterator[str]:
    tp, hardware, model = config.parallel.tensor_parallel, config.hardware, config.model
    stages = config.parallel.pipeline_parallel
    if stages < 1 or hardware.world_size % (tp * stages):  # the mesh checks the last two
        return
    if hardware.ranks_per_node % tp:
        yield (
            f"parallel.tensor_parallel={tp} must divide the {hardware.ranks_per_node} ranks of a node "
            f"(hardware={hardware.name}): its ranks communicate several times in each layer. Use "
            f"{nearest_divisor(hardware.ranks_per_node, tp)}."
        )
    if not isinstance(model, (GptConfig, VitConfig)):
        return
    sizes = {"model.num_heads": model.num_heads, "model.embed_dim": model.embed_dim}
    if isinstance(model, GptConfig) and model.num_kv_heads is not None:
        sizes["model.num_kv_heads"] = model.num_kv_heads
    if isinstance(model, GptConfig) and model.mlp == MlpKind.swiglu:
        sizes["the perceptron's width"] = model.mlp_dim
    vocabulary = config.data.vocabulary()
    if isinstance(model, GptConfig) and vocabulary is not None:
        sizes[f"vocabulary of data={config.data.name}"] = model.num_rows(vocabulary)
    for name, size in sizes.items():
        if size % tp:
            nearest = nearest_divisor(
                size, tp, lambda divisor: not any(size % divisor for size in (*sizes.values(), hardware.ranks_per_node))
            )
            yield f"parallel.tensor_parallel={tp} must divide {name}={size}, which it splits. Use {nearest}."


FEATURE = Feature(
    on="parallel.tensor_parallel>1",
    example="parallel.tensor_parallel=2",
    excludes=(
        Row(
            models(without=[Trait.tensor_parallel_plan]),
            "it shares layers out by the model's plan, and the model has none",
            use="model=gpt or vit_tiny, or a model of your own with a `tensor_parallel_plan`",
        ),
        Row(
            "train.compile & train.compile_mode!=default",
            "it would capture messages between ranks, which is untested",
            use="train.compile_mode=default",
        ),
        OF_SHARED_LOOP,
    ),
    problems=_problems,
)
