"""Paths that this machine cannot look at: one sentence that names the key, as of a file that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.errors import ConfigError
from tests.composed import composed

# Too long for a name: as of a folder that this user may not enter, the file system refuses to say (root may enter all).
PATH = f"/tmp/{'a' * 300}"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("data=text_bytes", "model=gpt", f"data.path={PATH}"), "data.path=.* must be a readable file"),
        (("data=image_folder", "model=cnn", f"data.path={PATH}"), "data.path=.* must be a readable folder"),
        (("data=tokens", "model=gpt", f"data.path={PATH}"), "a{300}.* cannot be read: File name too long"),
        (
            ("data=arrays", f"data.path={PATH}"),
            "data.path=.* there is no such file",
        ),
        (("data=hf_dataset", f"data.path={PATH}"), "a{300} must be a folder that Dataset.save_to_disk made"),
        ((f"checkpoint.resume_from={PATH}",), "checkpoint.resume_from=.* must be the folder of a run"),
        (("train.command='python x.py'", f"train.command_dir={PATH}"), "train.command_dir=.*: there is no such folder"),
        ((f"train.command='python {PATH}.py'",), "has no such file"),
    ],
)
def test_a_rule_names_the_key(overrides: tuple[str, ...], told: str) -> None:
    problems = "\n".join(find_problems(composed(overrides)))
    with pytest.raises(ConfigError, match=told):
        raise ConfigError(problems)


def test_a_config_dir_that_cannot_be_looked_at_is_none() -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        Composer([Path(PATH)])
