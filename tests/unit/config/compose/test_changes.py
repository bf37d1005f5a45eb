"""Other data for a model that is trained: a choice composed anew, or single keys of the run's own."""

from __future__ import annotations

import pytest

from hpc_trainer.config.compose.changes import with_data
from hpc_trainer.config.schema.data import DigitsConfig
from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.data.text import TextBytesConfig
from hpc_trainer.errors import ConfigError

CONFIG = TrainConfig(data=DigitsConfig(num_eval=99))


def test_single_keys_change_the_runs_own_data() -> None:
    made, given = with_data(CONFIG, ["data.max_shift=1"])
    assert given == {"max_shift"}
    assert made.data == DigitsConfig(num_eval=99, max_shift=1)
    assert CONFIG.data == DigitsConfig(num_eval=99), "it stays as it was"
    assert made.optim == CONFIG.optim


def test_a_choice_begins_at_its_defaults() -> None:
    assert with_data(CONFIG, ["data=text_bytes", "data.seq_len=32"])[0].data == TextBytesConfig(seq_len=32)
    assert with_data(CONFIG, ["data=digits"])[0].data == DigitsConfig()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optim.lr=3", "optim.lr=3: only the data can be changed here"),
        ("data.num_eval=3,4", "each key to one value"),
        ("data.num_evel=3", "num_eval"),
        ("data.num_eval=many", "num_eval"),
        ("data=digitz", "digits"),
        ("+data.more=1", "more"),
    ],
)
def test_what_is_wrong_is_said(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_data(CONFIG, [word])
    assert said in str(error.value)
