"""What an override that is being typed may become: the same groups, choices and keys that composing knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.config.compose.completion import choices_in, overrides_like
from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.own_files import conf_dir
from hpc_trainer.config.store import DECLARED


def _like(word: str, *said: str, config_dirs: tuple[Path, ...] = ()) -> list[str]:
    return overrides_like(word, said, config_dirs)


def test_nothing_typed_offers_groups_keys_of_the_root_and_sections() -> None:
    found = _like("")
    assert {"model=", "experiment=", "debug=", "seed=", "sweep_name=", "optim.", "train."} <= set(found)
    assert len(found) == len(set(found))
    assert not any("." in each[:-1] for each in found), "keys of sections come after their point"


def test_groups_are_those_that_composing_knows() -> None:
    with Composer() as composer:
        groups = composer.choices_of_root()
        assert set(groups) <= {each[:-1] for each in _like("")}
        for group in groups:
            assert _like(f"{group}=") == [f"{group}={name}" for name in composer.choices(group)]


def test_every_key_is_offered_while_it_is_typed() -> None:
    keys = [name for name, each in DECLARED.items() if each.section is None]
    assert len(keys) > 200
    offered = {section: _like(f"{section}." if section else "") for section in {key.rpartition(".")[0] for key in keys}}
    assert [key for key in keys if f"{key}=" not in offered[key.rpartition(".")[0]]] == []
    assert [key for key in keys for each in _like(f"{key}=") if not each.startswith(f"{key}=")] == []


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("model=resnet", ["model=resnet18", "model=resnet34", "model=resnet50"]),
        ("model=mlp,resnet", ["model=mlp,resnet18", "model=mlp,resnet34", "model=mlp,resnet50"]),
        ("model=resnet18,resnet", ["model=resnet18,resnet34", "model=resnet18,resnet50"]),
        ("model=nothing", []),
        ("optim.l", ["optim.lr=", "optim.lr_of=", "optim.lr_scaling=", "optim.lr_base_batch=", "optim.layer_decay="]),
        ("cluster.exec", ["cluster.executor=", "cluster.executor=slurm", "cluster.executor=local"]),
        ("cluster.executor=s", ["cluster.executor=slurm"]),
        ("train.deterministic=", ["train.deterministic=true", "train.deterministic=false"]),
        ("hardware.partition=", ["hardware.partition=null"]),
        ("train.early", ["train.early_stop.metric=", "train.early_stop.mode=", "train.early_stop.patience="]),
        ("optim.nothing", []),
        ("optim.nothing=", []),
        ("optim=adamw.", []),
        ("nothing", []),
        ("+model.kwargs.a", []),
        ("=", []),
    ],
)
def test_what_a_word_may_become(word: str, found: list[str]) -> None:
    assert sorted(_like(word)) == sorted(found)


def test_the_last_key_comes_with_its_default_so_that_no_shell_ends_the_word() -> None:
    assert _like("seed") == ["seed=", "seed=0"]
    assert _like("optim.momentu", "optim=sgd") == ["optim.momentum=", "optim.momentum=0.9"]
    assert _like("optim.momentum=") == ["optim.momentum=0.9", "optim.momentum=0.95"], "sgd's and muon's"


def test_keys_are_those_of_the_chosen_variant() -> None:
    assert {"optim.betas=", "optim.momentum="} <= set(_like("optim."))
    by_sgd = _like("optim.", "optim=sgd")
    assert "optim.momentum=" in by_sgd
    assert "optim.betas=" not in by_sgd
    assert "model.small_input_below=" in _like("model.", "model=resnet18")
    assert "model.num_heads=" not in _like("model.", "model=resnet18")


def test_choices_of_ones_own_are_offered_and_odd_names_are_not(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for name in ("my_study", "my study", "$(touch x)", "my'study", "my`study"):
        (tmp_path / "experiment" / f"{name}.yaml").write_text("this is not even YAML: [")
    assert _like("experiment=my", config_dirs=(tmp_path,)) == ["experiment=my_study"]
    assert not [each for each in _like("experiment=", config_dirs=(tmp_path,)) if "$" in each or " " in each]
    assert "my study" in choices_in("experiment", [conf_dir(), tmp_path]), "a message may name it"


def test_neither_hydra_nor_omegaconf_is_waited_for() -> None:
    code = (
        "import sys; from hpc_trainer.config.compose.completion import overrides_like\n"
        "overrides_like('optim.lr=', [], []); overrides_like('', [], [])\n"
        "print([m for m in ('hydra', 'omegaconf', 'yaml', 'torch', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
