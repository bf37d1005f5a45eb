"""Draws of Optuna's samplers equal those of a study that Optuna itself has run.

hydra-optuna-sweeper, which other tests need, wants an older Optuna. `make` therefore installs Optuna 5 into a folder of
its own, and a child process puts it first on its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

OPTUNA = warm.OPTUNA

_CHILD = r"""
import json, math, sys, time, warnings
warnings.simplefilter("ignore")
from dataclasses import replace
import optuna
from hpc_trainer.config.compose.search_axes import split_axes
from hpc_trainer.config.schema.train import Sampler
from hpc_trainer.search.samplers import Told, distribution, draw, optuna_sampler, seed_of_draw
from hpc_trainer.search.space import read_space

optuna.logging.set_verbosity(optuna.logging.ERROR)
kind, count = Sampler(sys.argv[1]), int(sys.argv[2])
axes = ["params.lr=tag(log,interval(1e-4,1e-1))", "params.width=int(interval(8,64))", "params.model=mlp,cnn",
        "params.drop=range(0,0.6,0.1)"]
# With a condition, Optuna's own study is defined by its run: a trial of a cnn has no dropout.
is_conditional = kind is Sampler.asha_tpe
space = read_space(split_axes(axes)[1], ["params.drop if params.model == 'mlp'"] if is_conditional else [])
distributions = {each.key: distribution(optuna, each) for each in space}

def ask():
    if not is_conditional:
        return study.ask(distributions)
    trial = study.ask()
    trial.suggest_float("params.lr", 1e-4, 1e-1, log=True)
    trial.suggest_int("params.width", 8, 64)
    if trial.suggest_categorical("params.model", ["mlp", "cnn"]) == "mlp":
        trial.suggest_float("params.drop", 0, 0.5, step=0.1)
    return trial

def loss(params):
    return abs(math.log10(params["params.lr"]) + 2) + abs(params["params.width"] - 32) / 32

# Optuna's own study: each trial is asked by a sampler of its draw's seed; every fourth stays at work for a while.
study = optuna.create_study(direction="minimize")
told, trials, differences, kept = [], [], [], 0
for number in range(count):
    seed = seed_of_draw(3, number)
    is_cma = kind is Sampler.cma_es
    study.sampler = optuna.samplers.CmaEsSampler(seed=seed) if is_cma else optuna_sampler(optuna, kind, seed)
    theirs = ask()
    ours = draw(space, kind, told, seed=3, is_max=False)
    if ours.params != theirs.params:
        differences.append([number, ours.params, theirs.params])
    trials.append(theirs)
    # What later draws need goes through a file.
    attributes = json.loads(json.dumps(ours.attributes))
    kept += "cma:optimizer" in attributes
    told.append(Told(params=ours.params, attributes=attributes))
    for ended in ([number] if number % 4 else [number - 4] if number >= 4 else []):
        if ended % 7 == 6:
            study.tell(trials[ended], state=optuna.trial.TrialState.FAIL)
            told[ended] = replace(told[ended], has_failed=True)
        elif ended % 5 == 4:
            value = loss(told[ended].params) + 1
            trials[ended].report(value, 16)
            study.tell(trials[ended], state=optuna.trial.TrialState.PRUNED)
            told[ended] = replace(told[ended], at_rungs={16: value})
        else:
            study.tell(trials[ended], loss(told[ended].params))
            told[ended] = replace(told[ended], value=loss(told[ended].params))
print(json.dumps({"differences": differences, "distinct": len({json.dumps(t.params) for t in told}),
                  "kept": kept, "states": sorted({t.state.name for t in study.get_trials()})}))
"""


def child(code: str, *words: str) -> Any:
    if not OPTUNA.is_dir():
        pytest.skip(f"there is no {OPTUNA}: make .venv installs it")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OPTUNA), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("sampler", "count"),
    [("tpe", 40), ("cma_es", 48), ("asha_tpe", 24), pytest.param("gp", 14, marks=pytest.mark.long)],
)
def test_each_draw_is_what_optuna_draws(sampler: str, count: int) -> None:
    """With complete, failed and pruned trials, trials at work, and (asha_tpe) an axis that some trials lack."""
    made = child(_CHILD, sampler, str(count))
    assert made["differences"] == []
    assert made["states"] == ["COMPLETE", "FAIL", "PRUNED", "RUNNING"]
    assert made["distinct"] > 0.9 * count
    if sampler == "cma_es":
        assert made["kept"] >= 4, "the distribution was updated by several generations"


_OLD = """
import json, sys
from hpc_trainer.config.schema.train import Sampler
from hpc_trainer.search import samplers
versions = {"optuna": "2.10.1"}
samplers.importlib.metadata.version = versions.__getitem__
old = samplers.find_packages(Sampler.tpe)
samplers.importlib.util.find_spec = lambda name: None
print(json.dumps([old, samplers.find_packages(Sampler.tpe), "optuna" in sys.modules]))
"""


def test_a_missing_and_an_old_optuna_are_named_before_anything_is_submitted() -> None:
    old, missing, is_imported = child(_OLD)
    assert "needs optuna of version 4 or newer, and 2.10.1 is installed" in old
    assert "pip install 'hpc_trainer[search]'" in missing
    assert not is_imported


_FROM = r"""
import json, sys
from pathlib import Path
from hpc_trainer.config.schema.train import Sampler
from hpc_trainer.errors import ConfigError
from hpc_trainer.search.folder import read_search
from hpc_trainer.search.samplers import draw
from tests.unit.search.searches import SearchOnDisk

folder = Path(sys.argv[1])
OLD, NEW = ("search=random", "search.trials=16", "sweep_name=old"), ("search=tpe", "search.trials=2", "sweep_name=new")
AXES = ["optim.lr=tag(log,interval(1e-3,1))", "optim.weight_decay=interval(0,0.1)"]
old = SearchOnDisk(folder, *OLD, axes=["optim.lr=tag(log,interval(5e-4,1e-1))"])
for number in range(16):
    run_id = old.next().spec.run_id
    old.completes(run_id, float(number)) if number else None  # the first is still at work
refused = []
for words, axes in (
    ((*NEW, "search.from=none"), AXES), ((*NEW, "search.from=new"), AXES),
    ((*NEW, "search.from=old", "search.metric=eval_accuracy"), AXES),
    ((*NEW, "search.from=old"), ["optim.lr=interval(2,3)"]), ((*OLD, "search.from=old"), AXES),
):
    try:
        SearchOnDisk(folder, *words, axes=axes)
        refused.append(None)
    except ConfigError as error:
        refused.append(str(error))
new = SearchOnDisk(folder, *NEW, "search.from=old", axes=AXES)
chosen = new.next()
(trial,) = new.known()
read = read_search(new.paths)
drawn = draw(new.search.space, Sampler.tpe, new.search.earlier, seed=0, is_max=False, number=0)
alone = draw(new.search.space, Sampler.tpe, [], seed=0, is_max=False)
print(json.dumps({
    "lrs": [each.params["optim.lr"] for each in old.known()], "refused": refused,
    "earlier": [[each.params, each.value] for each in new.search.earlier],
    "is_kept": read.earlier == new.search.earlier,
    "decay": old.trials.spec(0).config["optim"]["weight_decay"], "params": trial.params, "drawn": drawn.params,
    "alone": alone.params,
}))
"""


def test_the_sampler_of_a_search_knows_the_trials_of_an_earlier_one(tmp_path: Path) -> None:
    made = child(_FROM, str(tmp_path))
    inside = [[lr, float(number)] for number, lr in enumerate(made["lrs"]) if lr >= 1e-3 and number]
    assert [[params["optim.lr"], value] for params, value in made["earlier"]] == inside
    assert 10 <= len(inside) < 15, "some trials lie outside, and TPE learns from ten on"
    assert {params["optim.weight_decay"] for params, _ in made["earlier"]} == {made["decay"]}
    assert made["is_kept"]
    assert made["params"] == made["drawn"] != made["alone"]
    nowhere, itself, metric, outside, random = made["refused"]
    assert "search.from=none is not the sweep of another search" in nowhere
    assert "search.from=new is not the sweep of another search" in itself
    assert "that search looked for the smallest eval_loss" in metric
    assert "none of its 16 trials has a result and fits into this space" in outside
    assert "search.from_sweep" in random
