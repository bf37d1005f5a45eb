"""`_target_`: an allow-list decides before anything is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from hpc_trainer.config.rules.validate import find_problems, validate
from hpc_trainer.config.store import VARIANTS
from hpc_trainer.config.targets import TO_BE_FOUND, check_target, locate
from hpc_trainer.datasets import _HOMES
from hpc_trainer.errors import ConfigError
from tests.unit.record.builders import make_config


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "builtins.eval", "builtins.exec", "subprocess.Popen", "hydra.utils.instantiate", "torch.load",
        "torch.hub.load", "torch.nnx.Linear", "hpc_trainer.modelsX.Net", "hpc_trainer.models_evil.Net",
        "hpc_trainer.config.targets.locate", "hpc_trainer", "torch", "xtorch.nn.Linear", "TORCH.nn.Linear",
    ],
)  # fmt: skip
def test_what_is_not_on_the_list_is_refused(target: str) -> None:
    problem = check_target("model._target_", target)
    assert problem is not None
    assert target in problem
    if "." in target:
        assert f"--trust {target.split('.', maxsplit=1)[0]}" in problem


@pytest.mark.parametrize(
    "target",
    [
        "hpc_trainer.models..os.system", ".hpc_trainer.models.Net", "hpc_trainer.models.", "hpc_trainer.models.Net\n",
        "hpc_trainer.models.Net\nos.system", "hpc_trainer.models.Net()", "hpc_trainer.models/../os.system", "",
        "hpc_trainer.models.Net os.system", "hpc_trainer.models.__import__('os').system", "hpc_trainer.models.1x",
        "???", "torch.nn.Linear;os.system", "hpc_trainer.models\x00.Net",
    ],
)  # fmt: skip
def test_what_is_no_dotted_name_is_refused(target: str) -> None:
    problem = check_target("data._target_", target, ["os", "builtins"])
    assert problem is not None
    assert problem.startswith("data._target_=")
    assert "dotted name" in problem
    assert "\n" not in problem, "a message must not be broken by the value"


@pytest.mark.parametrize("target", ["hpc_trainer.models.mlp.Mlp", "torch.nn.Linear", "torch.optim.AdamW"])
def test_ours_and_torch_are_on_the_list(target: str) -> None:
    assert check_target("model._target_", target) is None


def test_the_public_name_of_each_data_set_leads_to_its_builder_wherever_that_is() -> None:
    """Frozen runs and a user's own configurations have these names, so they stay when files move."""
    targets = {kind()._target_ for kind in VARIANTS["data"].values()} - {"???"}
    assert len(targets) >= 9
    for target in targets:
        assert target.startswith("hpc_trainer.datasets.")
        assert callable(locate("data._target_", target))


def test_a_public_name_is_the_module_itself() -> None:
    from hpc_trainer.datasets.problem import Problem
    from hpc_trainer.datasets.records.token_files import write_tokens

    from hpc_trainer.datasets import MapDataset, digits

    assert digits is importlib.import_module("hpc_trainer.training.data.digits")
    assert digits.__name__ == digits.__spec__.name == "hpc_trainer.training.data.digits"
    assert MapDataset.__module__ == "hpc_trainer.training.data.protocol"
    assert Problem.__module__ == "hpc_trainer.data.files"
    assert write_tokens.__module__ == "hpc_trainer.data.tokens.files"
    for name in _HOMES:
        importlib.import_module(f"hpc_trainer.datasets.{name}")
    with pytest.raises(ConfigError, match=r"was not found: No module named 'hpc_trainer\.datasets\.nothing'"):
        locate("data._target_", "hpc_trainer.datasets.nothing.build")
    with pytest.raises(ImportError, match="nothing"):
        from hpc_trainer.datasets import nothing  # noqa: F401


def test_a_trusted_prefix_covers_whole_parts_only() -> None:
    assert check_target("model._target_", "my_lab.nets.Net", ["my_lab"]) is None
    assert check_target("model._target_", "my_laboratory.Net", ["my_lab"]) is not None
    assert check_target("model._target_", "os.system", [""]) is not None


def test_a_refused_name_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_module.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nNet = object\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="--trust evil_module"):
        locate("model._target_", "evil_module.Net")
    config = make_config()
    config.model._target_ = "evil_module.Net"
    with pytest.raises(ConfigError, match=r"model\._target_=evil_module\.Net: this package is not on the allow-list"):
        validate(config)
    assert "evil_module" not in sys.modules
    assert not (tmp_path / "ran").exists()
    # The other way round: trusted, it is imported, so the test above can fail.
    assert locate("model._target_", "evil_module.Net", ["evil_module"]) is object
    assert (tmp_path / "ran").exists()
    del sys.modules["evil_module"]


@pytest.mark.parametrize("target", ["json.nowhere.build", "json.decoder.nothing", "json.nothing"])
def test_a_name_that_leads_nowhere(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\._target_={target} was not found"):
        locate("data._target_", target, ["json"])


def test_what_leads_nowhere_names_where_it_looked_and_the_nearest_or_the_ways() -> None:
    with pytest.raises(ConfigError) as caught:
        locate("model._target_", "nowhere_at_all.net.Net", ["nowhere_at_all"])
    assert all(entry in str(caught.value) for entry in sys.path)
    assert str(caught.value).endswith(TO_BE_FOUND)
    with pytest.raises(ConfigError, match=r"No module named 'json\.nowhere'\. Looked in: \S+/json\."):
        locate("model._target_", "json.nowhere.Net", ["json"])
    with pytest.raises(ConfigError, match=r"Looked in: \S+/json/decoder\.py\. Did you mean JSONDecoder\?"):
        locate("model._target_", "json.decoder.JsonDecoder", ["json"])


def test_a_module_that_is_there_and_breaks_while_it_is_imported_is_not_said_to_be_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ConfigError) as caught:
        locate("model._target_", "needs_more.Net", ["needs_more"])
    told = "needs_more was found, but it imports not_installed_anywhere, which was not"
    assert told in str(caught.value)
    assert sys.executable in str(caught.value)
    (tmp_path / "breaks.py").write_text("import json\njson.no_such_function()\n")
    with pytest.raises(AttributeError, match="no_such_function"):  # with its own traceback
        locate("model._target_", "breaks.Net", ["breaks"])


@pytest.mark.parametrize(
    ("group", "target", "told"),
    [
        ("model", "my_lab.net.Net",
         "model._target_=my_lab.net.Net is for model=custom: model=mlp is built by hpc_trainer.models.mlp.Mlp. Use "
         "model=custom model._target_=my_lab.net.Net, or leave model._target_ out."),
        ("model", "hpc_trainer.models.cnn.Cnn", "Use model=cnn, or leave model._target_ out."),
        ("data", "my_lab.rings.build", "Use data=custom data._target_=my_lab.rings.build, or leave"),
        ("task", "my_lab.loss.Loss", "Use task=custom task._target_=my_lab.loss.Loss, or leave"),
    ],
)  # fmt: skip
def test_code_of_ones_own_beside_a_choice_that_is_built_otherwise_is_refused(
    group: str, target: str, told: str
) -> None:
    config = make_config("model=mlp")
    config.trust = ["my_lab"]
    getattr(config, group)._target_ = target
    with pytest.raises(ConfigError) as error:
        validate(config)
    assert told in str(error.value)
    config.train.main = "my_lab.loop.main"
    assert not any("_target_" in each for each in find_problems(config)), "one's own loop reads what it likes"
