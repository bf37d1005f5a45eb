"""`optim=muon`: orthogonalized momenta for hidden matrices."""

from collections.abc import Iterator

from hpc_trainer.config.schema.model import Trait
from hpc_trainer.config.schema.optim import MuonConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.config.table.feature import Feature, Row, models


def _problems(config: TrainConfig) -> Iterator[str]:
    optim = config.optim
    assert isinstance(optim, MuonConfig)
    everything = next((name for name in optim.adamw_weights if name and not name.strip("*")), None)
    if everything is not None:
        yield (
            f"optim.adamw_weights holds {everything!r}, which leaves no hidden matrix to optim=muon. Use names of some "
            "weights, or optim=adamw."
        )


FEATURE = Feature(
    on="optim=muon",
    off="optim=adamw or sgd",
    example="optim=muon",
    excludes=(
        Row(
            models(having=[Trait.convolutions], without=[Trait.block_matrices]),
            "it is for hidden matrices, and the model has only convolutions",
            use="model=gpt",
        ),
        Row(
            "model=mlp & model.num_layers=0",
            "it is for hidden matrices, and the model has only an output layer",
            use="model.num_layers=1",
        ),
    ),
    problems=_problems,
)
