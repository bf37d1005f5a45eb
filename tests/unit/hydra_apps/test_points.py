"""What is composed for the points of an app's grid is, to the letter, what Hydra composes for each of them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_trainer.config.compose.hydra_parts import own_hydra
from hpc_trainer.hydra_apps.points import HYDRA, PointComposer
from tests.seeds import chosen_seed
from tests.unit.hydra_apps.random_apps import RandomApp, register

APPS, SAMPLE, POINTS = 60, 1, 10
FIXED = ["hydra.sweep.dir=out", "++hydra.callbacks.one.x=1"]


class _Hydra:
    """Hydra as an app has begun it."""

    def __init__(self, config_name: str) -> None:
        loader = GlobalHydra.instance().config_loader()
        self.loader: ConfigLoader = loader
        self.base = loader.load_configuration(config_name, FIXED, run_mode=RunMode.MULTIRUN)

    def composer(self) -> PointComposer:
        return PointComposer(self.loader, self.base)

    def says(self, words: Sequence[str]) -> DictConfig | Exception:
        """Hydra's own answer, without any of ours."""
        try:
            return self.loader.load_sweep_config(self.base, list(words))
        except Exception as error:
            return error


@contextmanager
def _app(folder: Path, config_name: str = "config") -> Iterator[_Hydra]:
    with own_hydra(), initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        setup_globals()
        register()
        yield _Hydra(config_name)


def _text(config: DictConfig) -> str:
    """The configuration as it is frozen, in the order of its keys."""
    plain: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    return json.dumps({key: value for key, value in plain.items() if key != "hydra"}, default=str)


def _exact(node: Any) -> Any:
    """All that OmegaConf knows of a node."""
    content = node.__dict__.get("_content", node._value())
    if isinstance(content, dict):
        content = [(key, _exact(child)) for key, child in content.items()]
    elif isinstance(content, list):
        content = [_exact(child) for child in content]
    elif hasattr(content, "_metadata"):
        content = _exact(content)
    known = {name: value for name, value in vars(node._metadata).items() if name != "resolver_cache"}
    return type(node).__name__, repr(known), content if isinstance(content, list | tuple) else repr(content)


def _write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


FILES = {
    "config": "defaults: [model: a, data: a, _self_]\nseed: 0\ncopy: ${data}\ntags: [x, '${model.name}']\nnone: null\n",
    **{f"model/{name}": f"name: {name}\nwidth: 1\nof: ${{data.shape}}\ndeep: {{x: 1}}\n" for name in "abc"},
    **{f"data/{name}": f"name: {name}\nshape: {{{name}: 1}}\npath: ${{oc.env:HOME}}/{name}\n" for name in "ab"},
    "experiment/plain": "# @package _global_\ndefaults: [override /data: b, _self_]\nseed: 5\nmodel: {width: 9}\n",
    "experiment/elsewhere": "# @package _global_\nmodel: {of: {more: 2}}\n",
    "experiment/counted": "# @package _global_\nmodel: {of: '${counted:}'}\n",
    "experiment/over": "# @package _global_\ndefaults: [counted, _self_]\nmodel: {of: {more: 2}}\n",
    "model/own": "defaults: [typed_base, _self_]\nname: own\n",
}  # fmt: skip
_GRID = [["model=a", "model=b"], ["data=a", "data=b"], ["seed=1", "seed=2"]]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("axes", "ways"),
    [
        (_GRID, {"parts": 8}),
        ([*_GRID, ["model.width=2", "model.width=null"], ["+model.new={a:1}", "+model.deep.y=[1,'${seed}']"]],
         {"parts": 16, "loader": 16}),
        ([["+experiment=plain", "+experiment=elsewhere"], *_GRID[:2]], {"parts": 8}),  # `of` holds what `data` chose
        ([["~model", "~data=a"], ["seed=1", "seed='${none}'"]], {"parts": 4}),
        ([["model=own"], ["model.color=RED", "model.color=BLUE"], ["model.x=1", "++model.table.b=2"]], {"parts": 4}),
        ([["++copy.shape=1", "copy={shape:2}"], ["data=b"]], {"loader": 2}),  # set through an interpolation
        ([["+new.a=1"], ["+new.b=2", "new.a=3"]], {"loader": 2}),  # they meet
        ([["+new.a=1", "++fresh=[1]"], ["++seed=7", "~seed"], ["none=1", "~tags"]], {"parts": 8}),
        ([["~deep"], ["+deep=3"]], {}),
        ([["tags.0=y", "tags=[z]"], ["~copy", "copy=null"]], {"loader": 4}),
        ([["hydra.job.name=other"], _GRID[0]], {"loader": 2}),
        ([["+model@second=b", "+model@second.third=c"], ["model=c"], ["++second.width=3", "seed=1"]], {"parts": 4}),
    ],
)  # fmt: skip
def test_a_grid_is_composed_as_by_hydra(axes: list[list[str]], ways: dict[str, int], tmp_path: Path) -> None:
    with _app(_write(tmp_path / "conf", FILES)) as hydra:
        points = [list(point) for point in itertools.product(*axes)]
        expected = [hydra.says(words) for words in points]
        composer = hydra.composer()
        if not ways:
            _assert_refused(hydra, points[0], expected[0])
            return
        for config, plain in zip(expected, composer.plain(points), strict=True):
            assert isinstance(config, DictConfig), config
            assert json.dumps(plain) == _text(config)
        assert composer.counts == Counter(ways)
        for config, whole in zip(expected, hydra.composer().whole(points), strict=True):
            assert _exact(whole) == _exact(config)


def _assert_refused(hydra: _Hydra, words: list[str], error: DictConfig | Exception) -> None:
    assert isinstance(error, Exception)
    for way in (hydra.composer().plain, hydra.composer().whole):
        with pytest.raises(type(error)) as caught:
            way([words])
        assert str(caught.value) == str(error), words


def test_each_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    with _app(_write(tmp_path / "conf", FILES)) as hydra:
        (kind,) = {type(source) for source in hydra.loader.get_sources() if source.scheme() == "file"}
        original = kind.load_config

        def load_config(source: Any, config_path: str) -> Any:
            read[config_path] += 1
            return original(source, config_path)

        monkeypatch.setattr(kind, "load_config", load_config)
        points = [list(point) for point in itertools.product(*_GRID)]
        hydra.composer().plain(points)
        assert read == dict.fromkeys(("config", "model/a", "model/b", "data/a", "data/b"), 1)
        read.clear()
        hydra.composer().whole(points)
        assert set(read.values()) == {1}


def test_what_hangs_on_a_resolver_is_composed_by_hydra_each_time(tmp_path: Path) -> None:
    numbers = itertools.count()
    with _app(_write(tmp_path / "conf", FILES)) as hydra:
        OmegaConf.register_new_resolver("counted", lambda: OmegaConf.create({"number": next(numbers)}), replace=True)
        composer = hydra.composer()
        made = composer.plain([["+experiment=over", f"seed={seed}"] for seed in range(3)])
        assert composer.counts == {HYDRA: 3}
        drawn = [each["model"]["of"]["number"] for each in made]
        assert sorted(set(drawn)) == drawn, "each point has drawn a number of its own"
        # The value of a resolver that no file looks into is drawn when the run starts.
        composer = hydra.composer()
        assert composer.plain([["+experiment=counted"]])[0]["model"]["of"] == "${counted:}"
        assert composer.counts == {"parts": 1}


def test_the_error_is_that_of_the_first_point_that_has_one(tmp_path: Path) -> None:
    with _app(_write(tmp_path / "conf", FILES)) as hydra:
        points = [["model=a", "seed=1"], ["model=b", "sed=1"], ["model=a", "sed=2"], ["seed=(1"]]
        with pytest.raises(ConfigCompositionException, match=r"Could not override 'sed'.*\n.*\+sed=1"):
            hydra.composer().plain(points)


def test_points_share_what_is_equal(tmp_path: Path) -> None:
    with _app(_write(tmp_path / "conf", FILES)) as hydra:
        one, other = hydra.composer().plain([["model=a", "seed=1"], ["model=a", "seed=2"]])
        assert one["model"] is other["model"]
        assert (one["seed"], other["seed"]) == (1, 2)


def _random_app(folder: Path, seed: int) -> RandomApp:
    """Return an app that composes without an override: of one that does not, Hydra launches nothing."""
    for draw in itertools.count():
        app = RandomApp(folder / str(draw), seed * 1000 + draw)
        try:
            with _app(app.folder, app.config_name):
                print(f"seed {seed}, draw {draw}")
                return app
        except (HydraException, OmegaConfBaseException):
            continue
    raise AssertionError


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number < SAMPLE else pytest.mark.long) for number in range(APPS)]
)
def test_random_apps_are_composed_as_by_hydra(number: int, tmp_path: Path) -> None:
    app = _random_app(tmp_path, chosen_seed() * 1000 + number)
    with _app(app.folder, app.config_name) as hydra:
        points = app.points(POINTS, OmegaConf.to_container(hydra.base))
        expected = [hydra.says(words) for words in points]
        good = [(words, each) for words, each in zip(points, expected, strict=True) if isinstance(each, DictConfig)]
        composer = hydra.composer()
        made = composer.plain([words for words, _ in good])
        for (words, config), plain in zip(good, made, strict=True):
            assert json.dumps(plain) == json.dumps(json.loads(_text(config))), words
        whole = hydra.composer().whole([words for words, _ in good])
        for (words, config), again in zip(good, whole, strict=True):
            assert _exact(again) == _exact(config), words
        print(composer.counts, len(points) - len(good), "refused")
        refused = [(words, each) for words, each in zip(points, expected, strict=True) if isinstance(each, Exception)]
        for words, error in refused[:2]:
            _assert_refused(hydra, words, error)
