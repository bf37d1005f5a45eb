"""The runs of a Hydra app: their words, their names, and what makes them other runs. Its own Hydra has no part here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import Grid
from hpc_trainer.launch.hydra_app import (
    NUMBER,
    OUTPUT,
    AppPoint,
    HydraApp,
    _explained,
    freeze_app,
    read_app,
    read_points,
    split_flags,
    start_of,
    told_points,
)
from hpc_trainer.record.spec import append_specs
from hpc_trainer.worker.program_start import words_of


def _app(*words: str, name: str = "train", **more: Any) -> HydraApp:
    point: dict[str, Any] = {"words": words, "axes": {"lr": "0.1"}, "config": {"lr": 0.1}, "number": 0, **more}
    return HydraApp(
        name=name, start=("python", "train.py"), more=("hydra.job.chdir=True",), points=(AppPoint(**point),)
    )


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("train.py").touch()

    def freeze(app: HydraApp, *ours: str) -> Grid:
        return freeze_app(app, ["cluster=local", *ours])

    return freeze


def test_options_are_apart_from_overrides() -> None:
    words = ["-m", "a=1", "--config-name", "other", "b=2", "-cn=third", "--multirun", "--config-dir"]
    assert split_flags(words) == (["--config-name", "other", "-cn=third", "--config-dir"], ["a=1", "b=2"])
    assert start_of("my/train.py") == ("python", "my/train.py")
    assert start_of("my.train") == ("python", "-m", "my.train")


def test_a_section_that_points_share_is_told_once() -> None:
    shared = {"width": 64, "names": ["a", None, 1.5]}
    points = tuple(
        AppPoint(words=(f"lr={lr}",), axes={"lr": lr}, config={"lr": float(lr), "model": shared}, number=number)
        for number, lr in enumerate(("0.1", "0.2"))
    )
    text = told_points("train", ["hydra.job.chdir=True"], points)
    assert text.count("width") == 1
    app = read_points(text, ("python", "train.py"))
    assert app == HydraApp(name="train", start=("python", "train.py"), more=("hydra.job.chdir=True",), points=points)
    assert [list(point.config) for point in app.points] == [["lr", "model"]] * 2
    assert app.points[0].config["model"] is app.points[1].config["model"]


def test_the_words_of_a_run_are_the_apps_letter_by_letter(frozen: Any) -> None:
    words = ("a={x: 1, y: [2]}", "b='it''s, ${lr}'", 'c="two words"', "d=$HOME{{}}", "~e", "+f@g=h", "i={run.dir}")
    grid = frozen(_app(*words))
    (spec,) = grid.specs
    started = words_of(spec.typed(), grid.sweep.run(spec.run_id), {})
    assert started[: len(words) + 3] == ["python", "train.py", "hydra.job.chdir=True", *words]
    assert "hydra.mode=RUN" in started
    assert (grid.sweep.name, spec.axes) == ("train", {"params.lr": "0.1"})


def test_a_run_is_what_its_configuration_says_and_not_where_it_stands_in_a_grid(frozen: Any) -> None:
    (first,) = frozen(_app("lr=0.1")).specs
    (moved,) = frozen(_app("lr=0.1", number=7, output="/elsewhere"), "sweep_name=other").specs
    (changed,) = frozen(_app("lr=0.1", config={"lr": 0.1, "width": 64})).specs
    assert first.run_id == moved.run_id != changed.run_id
    assert first.run_id.startswith("train-lr0.1-s0-")
    assert first.config["cluster"]["env"] == {NUMBER: "0"}
    assert moved.config["cluster"]["env"] == {NUMBER: "7", OUTPUT: "/elsewhere"}


def test_the_overrides_of_a_run_are_ours_and_the_apps_as_parameters(frozen: Any) -> None:
    (spec,) = frozen(_app("lr=0.1", "+x=2", "~e"), "seed=3").specs
    assert spec.overrides == (
        "cluster=local", "seed=3", "sweep_name=train", "params.lr=0.1", "+params.x=2", "~params.e",
    )  # fmt: skip


def test_a_secret_stands_in_no_name_of_a_run(frozen: Any) -> None:
    token = "hf_" + "AbCd1234" * 4
    app = _app("lr=0.1", f"+hub.token={token}", config={"lr": 0.1, "hub": {"token": token}})
    grid = frozen(app)
    (spec,) = grid.specs
    assert spec.run_id.startswith("train-lr0.1-token-s0-")
    before = dataclasses.replace(spec, run_id=f"train-lr0.1-token{token}-s0-{spec.digest[:10]}")
    grid.sweep.folder.mkdir(parents=True)
    append_specs(grid.sweep, [before])
    assert [each.run_id for each in frozen(app).specs] == [before.run_id], "a run keeps the name that the sweep knows"


def test_our_axes_and_the_apps_make_one_grid(frozen: Any) -> None:
    one = _app("lr=0.1")
    two = dataclasses.replace(one, points=(*one.points, *_app("lr=0.2", config={"lr": 0.2}).points, *one.points))
    grid = frozen(two, "hardware=cpu_x1,cpu_x2")
    assert [(spec.hardware, spec.config["params"]["lr"]) for spec in grid.specs] == [
        ("cpu_x1", 0.1), ("cpu_x1", 0.2), ("cpu_x2", 0.1), ("cpu_x2", 0.2),
    ]  # fmt: skip
    assert grid.num_duplicates == 2


@pytest.mark.parametrize("word", ["params.lr=1", "train.command=true", "train.main=my.main", "train.command_dir=/"])
def test_what_is_the_apps_to_say_is_refused_among_ours(frozen: Any, word: str) -> None:
    with pytest.raises(ConfigError, match="is decided by the app"):
        frozen(_app("lr=0.1"), word)


FULL = """Traceback (most recent call last):
  File "train.py", line 37, in <module>
    main()
  File "/env/hydra/_internal/defaults_list.py", line 799, in config_not_found_error
    raise MissingConfigException(
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
hydra.errors.MissingConfigException: In 'config': Could not find 'model/lime'

Available options in 'model':
\tcubic
\tline
Config search path:
\tprovider=main, path=file:///home/me/conf
"""


def test_the_error_of_a_traceback_is_told_with_all_its_lines() -> None:
    """As with HYDRA_FULL_ERROR=1; the last line alone would be `line`."""
    told = _explained("train.py", [], ["model=lime"], FULL)
    assert told == (
        "does not compose: In 'config': Could not find 'model/lime'\n"
        "Available options in 'model':\ncubic\nline\nTry it: python train.py model=lime --cfg job"
    )


def test_the_name_of_a_run_begins_with_what_its_sweeper_chose(frozen: Any) -> None:
    fixed = [f"group{number}.a_long_name=a_long_value" for number in range(9)]
    points = [
        _app("~callbacks", *fixed, f"lr={lr}", axes={"lr": lr}, config={"lr": float(lr)}).points[0]
        for lr in ("0.1", "0.2")
    ]
    app = dataclasses.replace(_app("lr=0.1"), points=tuple(points))
    assert [spec.run_id[:27] for spec in frozen(app).specs] == [
        "train-lr0.1-a_long_namea_lo",
        "train-lr0.2-a_long_namea_lo",
    ]


def test_a_point_of_another_grid_keeps_the_name_that_the_sweep_has(frozen: Any) -> None:
    point = {"config": {"lr": 0.1, "size": 3}}
    grid = frozen(_app("lr=0.1", "size=3", axes={"lr": "0.1"}, **point), "sweep_name=one")
    grid.sweep.folder.mkdir(parents=True)
    append_specs(grid.sweep, grid.specs)
    (again,) = frozen(_app("lr=0.1", "size=3", axes={"size": "3"}, **point), "sweep_name=one").specs
    assert again.run_id == grid.specs[0].run_id
    (elsewhere,) = frozen(_app("lr=0.1", "size=3", axes={"size": "3"}, **point), "sweep_name=two").specs
    assert elsewhere.run_id.startswith("train-size3-lr0.1-s0-")


def test_an_app_that_is_not_there_is_told_from_words_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--app train.py: .* has no such file"):
        read_app("train.py lr=0.1")
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match=r"--info comes after --app train.py"):
        read_app("train.py lr=0.1 --info")
    with pytest.raises(ConfigError, match=r"--info comes after --app my_lab.train"):  # no file, but a module
        read_app("my_lab.train lr=0.1 --info")
    with pytest.raises(ConfigError, match="takes a Hydra app and its overrides"):
        read_app("train.py 'lr=0.1")
