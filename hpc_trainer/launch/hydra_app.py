"""Frozen runs of a user's unchanged Hydra app, as composed by the app's own Hydra.

Each point of the app's grid is a run of a program (`train.command`): the app with the overrides of the point. The app's
whole configuration is `params` of the run, so that a changed file of the app makes another run (docs/hydra_apps.md).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.compose.overrides import override_value
from hpc_trainer.config.identity import config_digest, run_id_of
from hpc_trainer.config.load import Memo
from hpc_trainer.config.resume_contract import flatten
from hpc_trainer.config.schema.key import is_secret_value
from hpc_trainer.config.script_words import argument_problem, plain
from hpc_trainer.errors import ConfigError, did_you_mean
from hpc_trainer.launch.freeze import Grid, by_known_names, freeze_grid
from hpc_trainer.record.spec import RunSpec, join_shapes

POINTS = "HPC_TRAINER_APP_POINTS"
"""Variable that names a file, into which our launcher writes the points of the app's grid without starting them."""
OUTPUT, NUMBER, PICKLE = "HPC_TRAINER_APP_OUTPUT", "HPC_TRAINER_APP_NUMBER", "HPC_TRAINER_APP_PICKLE"
"""Variables of a run: the app's output folder, its number in the grid, and its pickled task."""
CALLBACK = "hpc_trainer.hydra_apps.returns.Returns"
# `hydra.mode`: the configuration may say MULTIRUN. Values that depend on the run are in its environment, so that the
# command is the same in every folder and for every number of points.
_OF_EACH_RUN = (
    "hydra.mode=RUN",
    f"hydra.run.dir='${{oc.env:{OUTPUT},${{oc.env:HPC_TRAINER_RUN_DIR}}}}'",
    f"hydra.job.num=${{oc.env:{NUMBER}}}",
    "hydra.job.id=${oc.env:HPC_TRAINER_RUN_ID}",
    f"++hydra.callbacks.hpc_trainer._target_={CALLBACK}",
)
_FLAGS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
_LAST_LINES = 12
# Lines of Hydra's messages that add nothing for the user.
_NO_HELP = (
    "Set the environment variable HYDRA", "Config search path", "provider=", "full_key:", "object_type=", "See https",
)  # fmt: skip
_ERROR = re.compile(r'^  File "[^\n]*\n(?: [^\n]*\n)*', re.MULTILINE)
_OF_HYDRA = re.compile(r"\A\s*(?:hydra|omegaconf)\.[\w.]+: ")
_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
_OF_THE_APP = re.compile(r"[+~]*(params|train\.(command|command_dir|main))\b")
_NOT_OF_A_POINT = ("-m", "--multirun", "--run", "-r")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppPoint:
    """Point of the app's grid."""

    words: tuple[str, ...]
    """The app's overrides."""
    axes: Mapping[str, str]
    """The values that the app's sweeper chose."""
    config: Mapping[str, Any]
    """The app's composed configuration, with interpolations unresolved."""
    number: int
    output: str | None = None
    """The app's output folder; None: the folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraApp:
    """An app and the points of its grid."""

    name: str
    """Name of the app in Hydra (`hydra.job.name`)."""
    start: tuple[str, ...]
    """Command that starts the app, without an override."""
    more: tuple[str, ...]
    """Options and overrides of Hydra's own configuration, the same on all points."""
    points: tuple[AppPoint, ...]
    pickle: str | None = None
    """Name of the file with its pickled task; None: `start` starts the app itself."""


def start_of(app: str) -> tuple[str, ...]:
    """Return the command of an app: a script (`train.py`, `my/train.py`), or a module (`my.train`)."""
    return ("python", app) if app.endswith(".py") else ("python", "-m", app)


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's options for the place of the configuration, and all other arguments except those for a multirun.

    Hydra's command line takes options before or after the overrides, not among them.
    """
    flags: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in _FLAGS:
            flags += [word, *itertools.islice(rest, 1)]
        elif word.partition("=")[0] in _FLAGS and word.startswith("-"):
            flags.append(word)
        elif word not in _NOT_OF_A_POINT:
            others.append(word)
    return flags, others


def split_app(text: str) -> tuple[str, list[str], list[str]]:
    """Return the app that the words after `--app` name, Hydra's options for its configuration, and its overrides.

    Raises:
        ConfigError: a quote is not closed, or a word is no override of the app.
    """
    try:
        app, *words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--app takes a Hydra app and its overrides, such as --app train.py lr=1e-3,1e-2: {error}"
        ) from error
    flags, words = split_flags(words)
    option = next((word for word in words if word.startswith("-")), None)
    if option is not None:
        raise ConfigError(
            f"{option} comes after --app {app}, and what comes there is for the app: overrides, --config-name, "
            "--config-path and --config-dir. Options and overrides of hpc-trainer come before --app."
        )
    return app, flags, words


def read_app(text: str) -> HydraApp:
    """Return the points that the app's own Hydra makes of the arguments after `--app`. Runs the app up to its sweeper.

    Raises:
        ConfigError: the app's configuration does not compose, or the program is not a Hydra app.
    """
    app, flags, words = split_app(text)
    if app.endswith(".py") and not Path(app).is_file():
        raise ConfigError(f"--app {app}: {Path.cwd()} has no such file. Submit from the folder that it is relative to.")
    answer = _ask(app, flags, words)
    if isinstance(answer, str):
        raise ConfigError(f"--app {app} {_explained(app, flags, words, answer)}")
    return answer


def _ask(app: str, flags: Sequence[str], words: Sequence[str]) -> HydraApp | str:
    """Return the points that the app's own Hydra makes of these options and overrides, or its error message."""
    start = start_of(app)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "points.json")
        ask = ["hydra/launcher=hpc_trainer", "hydra/sweeper=hpc_trainer", f"hydra.sweep.dir={override_value(folder)}"]
        env = {**os.environ, "PYTHONWARNINGS": "ignore", POINTS: str(file)}  # the output becomes the error message
        done = subprocess.run(
            [sys.executable, *start[1:], "-m", *flags, *words, *ask], env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if not file.exists():
            return done.stderr if done.returncode else ""
        return read_points(file.read_text(), start)


def read_points(text: str, start: tuple[str, ...]) -> HydraApp:
    """Return the app that `told_points` has written as `text`, with the command that starts it."""
    content = json.loads(text)
    points = tuple(
        AppPoint(
            words=tuple(point["words"]), axes=point["axes"], number=point["number"], output=point["output"],
            config={key: value for place in point["config"] for key, value in content["sections"][place].items()},
        )
        for point in content["points"]
    )  # fmt: skip
    return HydraApp(name=content["name"], start=start, more=tuple(content["more"]), points=points)


def told_points(name: str, more: Sequence[str], points: Iterable[AppPoint]) -> str:
    """Return the content of our launcher's file `POINTS`; a section that several points share is written once.

    Args:
        name: the name of the app.
        more: options and overrides of Hydra's own configuration, the same on all points.
        points: the points.
    """
    memo, texts, listed = Memo(), dict[str, int](), []
    for point in points:
        sections = (memo.of(_section_text, key, value) for key, value in point.config.items())
        config = [texts.setdefault(text, len(texts)) for text in sections]
        listed.append(
            {"words": point.words, "axes": point.axes, "number": point.number, "output": point.output, "config": config}
        )
    head = json.dumps({"name": name, "more": more, "points": listed})
    return f'{head[:-1]}, "sections": [{", ".join(texts)}]}}'


def _section_text(key: str, value: Any) -> str:
    return json.dumps({key: value})


def _explained(app: str, flags: Sequence[str], words: Sequence[str], said: str) -> str:
    """Return the error of an app that wrote no points: Hydra's own message, and the key nearest to an unknown one."""
    if not said:
        return "is not a Hydra app: it ended without reading its overrides. Use --command for any program."
    # Keep only the error of a traceback (an app's own, or with HYDRA_FULL_ERROR); it may have several lines.
    error = _OF_HYDRA.sub("", _ERROR.split(said)[-1])
    lines = [line.strip() for line in error.splitlines() if line.strip() and not line.strip().startswith(_NO_HELP)]
    message = "\n".join(lines[-_LAST_LINES:])
    unknown = _UNKNOWN_KEY.search(said)
    plain_app = _ask(app, flags, []) if unknown else ""
    if unknown and isinstance(plain_app, HydraApp):
        config = plain_app.points[0].config
        message += f"\n{did_you_mean(unknown[1], [*flatten(config), *config])}"
    return f"does not compose: {message.rstrip()}\nTry it: {shlex.join([*start_of(app), *flags, *words])} --cfg job"


def freeze_app(
    app: HydraApp, overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), trust: Sequence[str] = ()
) -> Grid:
    """Return the grid of each point of the app with each point of our own overrides (hardware, cluster and so on).

    Raises:
        ConfigError: as in `freeze_grid`, or an override sets a value that the app decides.
    """
    grid = _grid_of_app(app, overrides, config_dirs, trust)
    specs: dict[str, RunSpec] = {}
    for base in grid.specs:
        for spec in specs_of(app, base):
            specs.setdefault(spec.run_id, spec)
    specs = by_known_names(grid.sweep, specs, hangs_on_grid=True)
    num_points = len(grid.specs) * len(app.points)
    return dataclasses.replace(
        grid, specs=tuple(specs.values()), num_duplicates=grid.num_duplicates + num_points - len(specs)
    )


def _grid_of_app(
    app: HydraApp, overrides: Sequence[str], config_dirs: Sequence[Path], trust: Sequence[str], *,
    is_search: bool = False,
) -> Grid:  # fmt: skip
    """Return the grid of our own overrides alone, with the command that starts the app."""
    taken = next((word for word in overrides if _OF_THE_APP.match(word)), None)
    if taken is not None:
        raise ConfigError(
            f"{taken} is decided by the app: write the app's overrides after --app, with the app's own names."
        )
    is_named = any(word.startswith("sweep_name=") for word in overrides)
    named = [] if is_named else [f"sweep_name={plain(app.name) or 'app'}"]
    command = override_value(_as_command([*app.start, *app.more]).replace("${", "\\${"))
    words = [*overrides, *named, f"train.command={command}"]
    return freeze_grid(words, config_dirs=config_dirs, trust=trust, is_search=is_search)


def freeze_search_of_app(
    app: HydraApp, overrides: Sequence[str], drawn: Collection[str], passed_on: Sequence[str],
    config_dirs: Sequence[Path], trust: Sequence[str],
) -> tuple[Grid, list[dict[str, Any]]]:  # fmt: skip
    """Return the grid of our own overrides, and the configuration of a trial for each point of the app.

    Args:
        app: the app, with a point for each choice of its lists.
        overrides: our own overrides.
        drawn: keys of the app, as typed, that each trial sets anew.
        passed_on: words that give these keys to the app, with placeholders as `lr={params.lr}`.
        config_dirs: folders of your own conf/ files.
        trust: packages that `_target_` and `train.main` may name.

    Raises:
        ConfigError: as in `freeze_app`.
    """
    grid = _grid_of_app(app, overrides, config_dirs, trust, is_search=True)
    plain_config = grid.unsettled[grid.specs[0].run_id]
    configs = []
    for point in app.points:
        words = [word for word in point.words if word.partition("=")[0] not in drawn]
        of_run = [word for word in _OF_EACH_RUN if NUMBER not in word]  # trials have their numbers from the search
        command = " ".join([_as_command([*app.start, *app.more, *words]), *passed_on, _as_command(of_run)])
        for problem in argument_problem("--app", command):
            raise ConfigError(problem)
        train = {**plain_config["train"], "command": command}
        configs.append({**plain_config, "params": dict(point.config), "train": train})
    return grid, configs


def specs_of(app: HydraApp, base: RunSpec) -> list[RunSpec]:
    """Return a run for each point of the app; our own keys are equal in all of them."""
    return [join_shapes([_spec_of(app, point, spec) for spec in base.on_each()]) for point in app.points]


def _spec_of(app: HydraApp, point: AppPoint, base: RunSpec) -> RunSpec:
    command = _as_command([*app.start, *app.more, *point.words, *(() if app.pickle else _OF_EACH_RUN)])
    for problem in argument_problem("--app", command):
        raise ConfigError(problem)
    cluster = base.config["cluster"]
    of_run = {NUMBER: str(point.number), OUTPUT: point.output, PICKLE: app.pickle}
    env = {**cluster["env"], **{name: value for name, value in of_run.items() if value is not None}}
    config = {
        **base.config,
        "cluster": {**cluster, "env": env},
        "params": dict(point.config),
        "train": {**base.config["train"], "command": command},
    }
    digest = config_digest(config)
    label = "-".join([app.name, *map(_short, _telling_first(point))])
    run_id = run_id_of(re.sub(r"[^A-Za-z0-9._-]", "_", label), config["seed"], digest)
    axes = {**base.axes, **{f"params.{key}": value for key, value in point.axes.items()}}
    words = [re.sub(r"^([+~]*)", r"\1params.", word) for word in point.words]
    overrides = (*(word for word in base.overrides if not word.startswith("train.command=")), *words)
    return dataclasses.replace(base, run_id=run_id, digest=digest, axes=axes, overrides=overrides, config=config)


def _telling_first(point: AppPoint) -> list[str]:
    """Return the overrides of a point, the sweeper's first: a cut name then keeps what differs between points."""
    overrides = [word for word in point.words if not word.startswith("~")]
    keys = {word: word.lstrip("+").partition("=")[0].partition("@")[0].replace("/", ".") for word in overrides}
    return sorted(overrides, key=lambda word: keys[word] not in point.axes)


def _short(word: str) -> str:
    """Return `lr0.1` for `optim.lr=0.1`, as in the names of other runs."""
    key, _, value = word.lstrip("+~").partition("=")
    name = re.split(r"[./]", key)[-1].partition("@")[0]
    return name if is_secret_value(name, value) else name + value


def _as_command(words: Sequence[str]) -> str:
    """Return `train.command` for these arguments, with braces escaped so that none is a placeholder."""
    return shlex.join(words).replace("{", "{{").replace("}", "}}")
