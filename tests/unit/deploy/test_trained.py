"""The data that a deployed model is asked about are those that the run was evaluated on."""

from __future__ import annotations

from hpc_trainer.deploy.trained import open_data
from tests.composed import composed


def test_features_see_to_the_samples_as_in_the_run() -> None:
    """A run with `augment.size` is evaluated on the middle of its images, and its model is built for that."""
    config = composed(["experiment=digits", "model=mlp", "augment.crop=padded", "augment.size=6", "cluster=local"])
    samples = open_data(config).samples
    assert samples.input_shape == (1, 6, 6)
    assert samples.__getitems__([0, 1])[0].shape == (2, 1, 6, 6)
    assert list(samples.classes) == list("0123456789")  # type: ignore[attr-defined]
    whole = open_data(composed(["experiment=digits", "model=mlp", "cluster=local"])).samples
    assert whole.input_shape == (1, 8, 8)
