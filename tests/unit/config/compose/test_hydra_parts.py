"""The private parts of Hydra that are used are there, as they are used. A new release of Hydra is tried here first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hydra import initialize
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import getbase
from omegaconf import Container, Node, OmegaConf
from packaging.version import Version

from hpc_trainer.config.compose.composer import ROOT, Composer
from hpc_trainer.config.compose.hydra_parts import HydraParts, own_hydra


@pytest.fixture(scope="module")
def composer() -> Iterator[Composer]:
    with Composer() as composer:
        yield composer


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (ConfigLoaderImpl._parse_overrides_and_create_caching_repo, ["self", "config_name", "overrides"]),
        (ConfigLoaderImpl._compose_config_from_defaults_list, ["self", "defaults", "repo"]),
        (ConfigLoaderImpl._apply_overrides_to_config, ["overrides", "cfg"]),
        (ConfigLoaderImpl._load_single_config, ["self", "default", "repo"]),
        (ConfigLoaderImpl.load_sweep_config, ["self", "master_config", "sweep_overrides"]),
        (Node._maybe_dereference_node, ["self", "throw_on_resolution_failure", "memo"]),
        (Container._resolve_node_interpolation, ["self", "inter_key", "memo"]),
        (
            Container._evaluate_custom_resolver,
            ["self", "key", "node", "inter_type", "inter_args", "inter_args_str"],
        ),
        (CachingConfigRepository.load_config, ["self", "config_path"]),
        (CachingConfigRepository.group_exists, ["self", "config_path"]),
        (CachingConfigRepository.get_schema_source, ["self"]),
        (
            defaults_list.create_defaults_list,
            ["repo", "config_name", "overrides_list", "prepend_hydra", "skip_missing"],
        ),
        (BasicSweeper.__init__, ["self", "max_batch_size", "params"]),
        (BasicSweeper.validate_batch_is_legal, ["self", "batch"]),
        (defaults_list._create_interpolation_map, ["overrides", "defaults_list", "self_added"]),
    ],
)
def test_the_parts_have_their_parameters(function: Callable[..., Any], names: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == names


def test_the_merge_asks_the_repository_for_two_things_only() -> None:
    # `_Copies` has no more than these.
    source = inspect.getsource(ConfigLoaderImpl._compose_config_from_defaults_list) + inspect.getsource(
        ConfigLoaderImpl._load_single_config
    )
    assert source.count("repo.") == source.count("repo.load_config") + source.count("repo.get_schema_source") == 2


def test_a_point_is_composed_by_what_a_sweep_remembers() -> None:
    # `SweepLoader` answers for these, and for no other look at the files.
    source = inspect.getsource(ConfigLoaderImpl._load_configuration_impl)
    used = {name: source.count(name) for name in ("create_defaults_list(", "_parse_overrides_and_create_caching_repo(")}
    assert used == dict.fromkeys(used, 1)
    assert source.count("caching_repo.") == source.count("caching_repo.get_sources()") == 1
    assert source.count("self._compose_config_from_defaults_list(") == source.count("skip_missing=") == 1
    assert "config_overrides" in source


def test_what_is_merged_leaves_the_files_as_they_were_read(composer: Composer) -> None:
    parts = HydraParts(ROOT)
    chosen = composer.parse(["experiment=digits", "optim=sgd"])
    first = OmegaConf.to_yaml(parts.compose(parts.defaults(chosen).entries))
    composed = parts.compose(parts.defaults(chosen).entries)
    parts.apply(composer.parse(["optim.lr=7", "train.num_steps=1", "+cluster.env.A=1"]), composed)
    assert OmegaConf.to_yaml(parts.compose(parts.defaults(chosen).entries)) == first
    assert OmegaConf.to_yaml(composer.compose_untyped(["experiment=digits", "optim=sgd"])) == first


def test_the_choices_are_those_that_hydra_reports(composer: Composer) -> None:
    lines = ["experiment=digits", "optim=sgd"]
    theirs = {key: value for key, value in composer.choices_made(lines).items() if not key.startswith("hydra/")}
    mine = dict(HydraParts(ROOT).defaults(composer.parse(lines)).choices)
    assert {key: mine.get(key) for key in theirs} == theirs
    assert theirs["model"] == "cnn"


def test_hydras_own_function_stands_again_after_use(composer: Composer) -> None:
    before = defaults_list._create_interpolation_map
    HydraParts(ROOT).defaults(composer.parse(["model=cnn"]))
    assert defaults_list._create_interpolation_map is before


def test_an_apps_hydra_and_ours_do_not_meet() -> None:
    """An app has begun in this process, and has a group of our name."""
    with own_hydra(), initialize(version_base="1.2", config_path=None):  # own: apart from other tests
        begun, store = GlobalHydra.instance(), ConfigStore.instance()
        store.store(group="hardware", name="of_the_app", node={"kind": "x"})
        with own_hydra(), Composer() as composer:
            assert "of_the_app" not in composer.choices("hardware")
            assert composer.compose(["model=mlp"]).model.name == "mlp"
        assert (GlobalHydra.instance(), ConfigStore.instance()) == (begun, store)
        assert begun.is_initialized()
        assert getbase() == Version("1.2")
        assert set(store.repo["hardware"]) == {"of_the_app.yaml"}
