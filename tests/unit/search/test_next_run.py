"""Choice of the next run: exactly once under races, promotion as published, and what stops a search."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_trainer.config.schema.train import FailedTrial, SearchConfig
from hpc_trainer.errors import RunStateError
from hpc_trainer.record.files import write_json
from hpc_trainer.record.rungs import promotions
from hpc_trainer.record.spec import append_specs, read_spec, read_specs
from hpc_trainer.record.states import CANCEL, RunState
from hpc_trainer.record.status import read_status
from hpc_trainer.search.commands import best_of, best_paused, status_lines
from hpc_trainer.search.folder import Trial, value_for_sampler
from hpc_trainer.search.next_run import SearchStoppedError, bracket_of, brackets, is_over, states_at_end
from tests.unit.search.searches import SearchOnDisk

ASHA = ("search=asha", "search.rungs=[4,16]", "search.eta=4")


def _value(lr: float) -> float:
    """A loss that is smallest at a learning rate of 0.01."""
    return abs(math.log10(lr) + 2)


def test_trials_are_ordinary_runs_with_the_values_that_were_drawn(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=3")
    made = [disk.next() for _ in range(3)]
    assert disk.next() is None, "search.trials is met exactly"
    specs = read_specs(disk.paths)
    assert [chosen.spec.run_id for chosen in made if chosen] == list(specs)
    for trial in disk.known():
        spec = read_spec(disk.paths, trial.run_id)
        config = spec.typed()  # its digest fits its content
        assert config.optim.lr == trial.params["optim.lr"]
        assert trial.state is RunState.RUNNING
        assert f"optim.lr={config.optim.lr!r}" in spec.overrides


def test_the_same_draw_is_made_anywhere(tmp_path: Path) -> None:
    """Also from records that another process wrote, and whatever a process drew before."""
    draws = []
    for name in ("one", "other"):
        disk = SearchOnDisk(tmp_path / name, "search=random", "search.trials=9", "search.seed=5")
        for _ in range(9):
            if name == "other":
                disk = SearchOnDisk(tmp_path / name, "search=random", "search.trials=9", "search.seed=5")
            disk.next()
        draws.append([trial.params for trial in disk.known()])
    assert draws[0] == draws[1]


_RACER = """
import sys
from pathlib import Path
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.search.folder import Trials, read_search
from hpc_trainer.search.next_run import next_run
paths = SweepPaths(Path(sys.argv[1]))
search = read_search(paths)
trials = Trials(paths, search)
while (chosen := next_run(paths, search, trials)) is not None:
    print(chosen.number, chosen.spec.run_id)
"""


def test_slots_that_race_draw_each_trial_once(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=60")
    racers = [
        subprocess.Popen([sys.executable, "-c", _RACER, str(disk.paths.folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    lines = [line for racer in racers for line in racer.communicate()[0].splitlines()]
    assert sorted(int(line.split()[0]) for line in lines) == list(range(60))
    assert len({line.split()[1] for line in lines}) == 60
    assert len(disk.known()) == 60


def test_a_point_of_a_finite_space_is_tried_once(tmp_path: Path) -> None:
    axes = ("model=mlp,cnn", "train.global_batch_size=16,32,64")
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=6", axes=axes)
    for _ in range(6):
        assert disk.next() is not None
    assert disk.next() is None
    points = {(trial.params["model"], trial.params["train.global_batch_size"]) for trial in disk.known()}
    assert len(points) == 6
    names = {trial.run_id.split("-")[0] for trial in disk.known()}
    assert names == {"mlp", "cnn"}, "each choice of a group is the frozen run of its own files"


def test_asha_promotes_the_best_quarter_of_a_rung_before_it_draws(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, *ASHA, "search.trials=16")
    first = [disk.next() for _ in range(4)]
    values = [0.4, 0.1, 0.3, 0.2]
    for chosen, value in zip(first, values, strict=True):
        assert chosen is not None
        assert chosen.is_new
        assert chosen.spec.config["search"]["rungs"] == [4, 16]
        disk.pauses(chosen.spec.run_id, 4, value)
    assert first[1] is not None
    paused = best_paused(disk.search, disk.known())
    assert paused is not None
    assert (paused[0].run_id, paused[1]) == (first[1].spec.run_id, 4), "what `best` shows while none is complete"
    promoted = disk.next()
    assert promoted is not None
    assert (promoted.is_new, promoted.spec.run_id) == (False, first[1].spec.run_id)
    names = [path.name for path in disk.paths.run(promoted.spec.run_id).folder.iterdir()]
    assert promotions(names) == [16]
    after = disk.next()
    assert after is not None
    assert after.is_new, "one quarter of four is promoted once"


def test_asha_to_its_end_trains_as_many_at_each_rung_as_published(tmp_path: Path) -> None:
    """At least 64, 16 and 4 results, as with halving that waits, and a few that were promoted early."""
    disk = SearchOnDisk(tmp_path, *ASHA, "search.trials=64")
    generator = random.Random(1)
    at_work: list[tuple[str, float]] = []
    results = {4: 0, 16: 0, 64: 0}
    while True:
        while len(at_work) < 3 and (chosen := disk.next()) is not None:
            lr = float(chosen.spec.config["optim"]["lr"])
            at_work.append((chosen.spec.run_id, _value(lr)))
        if not at_work:
            break
        run_id, value = at_work.pop(generator.randrange(len(at_work)))
        (trial,) = [trial for trial in disk.known() if trial.run_id == run_id]
        results[trial.until or 64] += 1
        disk.completes(run_id, value) if trial.until is None else disk.pauses(run_id, trial.until, value)
        assert states_at_end(disk.paths) == {} or (not at_work and disk.next() is None)
    known = disk.known()
    assert is_over(disk.search, known)
    assert states_at_end(disk.paths) == {"PAUSED": 64 - results[64], "COMPLETED": results[64]}
    assert results[4] == 64
    assert 16 <= results[16] <= 24
    assert 4 <= results[64] <= 12, "some are promoted before better ones are known"
    best = min(known, key=lambda trial: _value(float(trial.params["optim.lr"] or 0)))
    assert best.state is RunState.COMPLETED, "the best trial of all reached the end"


def test_a_trial_whose_metric_is_nan_at_a_rung_is_not_promoted(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=asha", "search.rungs=[4]", "search.eta=2", "search.trials=2")
    first, second = disk.next(), disk.next()
    assert first is not None
    assert second is not None
    disk.pauses(first.spec.run_id, 4, None)  # metrics.jsonl has null for NaN
    disk.pauses(second.spec.run_id, 4, 9.0)
    promoted = disk.next()
    assert promoted is not None
    assert promoted.spec.run_id == second.spec.run_id


@pytest.mark.parametrize(("failed", "of_bad"), [("worst", 7.0), ("skip", None)])
def test_a_trial_that_failed_or_ended_with_nan_is_the_worst_or_left_out(failed: str, of_bad: float | None) -> None:
    ends = [(RunState.COMPLETED, 7.0), (RunState.COMPLETED, math.nan), (RunState.FAILED, None),
            (RunState.COMPLETED, 2.0), (RunState.RUNNING, None), (RunState.CANCELLED, None)]  # fmt: skip
    trials = [Trial(number=number, run_id=str(number), params={}, rungs=(), state=state, value=value)
              for number, (state, value) in enumerate(ends)]  # fmt: skip
    values = value_for_sampler(trials, SearchConfig(failed=FailedTrial(failed)), is_max=False)
    assert values == [7.0, of_bad, of_bad, 2.0, None, None]


def test_hyperband_fills_brackets_of_the_published_sizes(tmp_path: Path) -> None:
    """For R / r = 81 and eta = 3, table 1 of Li et al. 2018 has 81, 34, 15, 8 and 5 configurations."""
    words = ("search=hyperband", "train.num_steps=81", "search.eta=3", "search.trials=143")
    disk = SearchOnDisk(tmp_path, *words)
    assert disk.search.settings.rungs == [1, 3, 9, 27]
    made = brackets(disk.search)
    sizes = [sum(bracket_of(disk.search, number) == bracket for number in range(143)) for bracket in made]
    assert sizes == [81, 34, 15, 8, 5]


def test_a_median_rule_lets_the_first_five_and_then_the_better_half_continue(tmp_path: Path) -> None:
    words = ("search=random", "search.median=true", "search.rungs=[4]", "search.trials=8")
    disk = SearchOnDisk(tmp_path, *words)
    first = [disk.next() for _ in range(5)]
    for place, chosen in enumerate(first):
        assert chosen is not None
        assert chosen.is_new
        disk.pauses(chosen.spec.run_id, 4, float(place))
    promoted = [disk.next() for _ in range(5)]
    assert [chosen.is_new for chosen in promoted if chosen] == [False] * 5, "five values say little about a median"
    for value, continues in ((9.0, False), (0.5, True), (8.0, False)):
        chosen = disk.next()
        assert chosen is not None
        assert chosen.is_new
        disk.pauses(chosen.spec.run_id, 4, value)
        if continues:
            after = disk.next()
            assert after is not None
            assert (after.is_new, after.spec.run_id) == (False, chosen.spec.run_id)
    assert disk.next() is None
    assert [trial.state is RunState.PAUSED for trial in disk.known()] == [False] * 5 + [True, False, True]


def test_a_program_is_promoted_beyond_its_last_rung_without_a_known_last_step(tmp_path: Path) -> None:
    words = ("search=asha", "search.eta=2", "search.rungs=[10]", "search.trials=2", "search.metric=loss",
             "train.command='true {params.x}'")  # fmt: skip
    disk = SearchOnDisk(tmp_path, *words, axes=("params.x=interval(0,1)",), base=("cluster=local",))
    assert disk.search.num_steps == 0
    first, second = disk.next(), disk.next()
    assert first is not None
    assert second is not None
    disk.pauses(second.spec.run_id, 12, 2.0)  # it logs every 4 steps: its first value beyond the rung stops it
    disk.pauses(first.spec.run_id, 12, 1.0)
    assert [trial.at_rungs for trial in disk.known()] == [{10: 1.0}, {10: 2.0}]
    promoted = disk.next()
    assert promoted is not None
    assert promoted.spec.run_id == first.spec.run_id
    (trial, _) = disk.known()
    assert (trial.state, trial.until) == (RunState.RUNNING, None), "it trains to its end"


def test_a_search_stops_after_the_first_trial_without_the_metric(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=8")
    chosen = disk.next()
    assert chosen is not None
    disk.completes(chosen.spec.run_id, None, eval_accuracy=0.5)
    with pytest.raises(SearchStoppedError, match="has no eval_loss; it has eval_accuracy"):
        disk.next()


def test_a_search_stops_if_all_of_the_first_trials_fail_and_goes_on_otherwise(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=8")
    for _ in range(5):
        chosen = disk.next()
        assert chosen is not None
        disk.fails(chosen.spec.run_id)
    with pytest.raises(SearchStoppedError, match="the first 5 trials have all failed"):
        disk.next()
    disk.completes(disk.known()[2].run_id, 0.5)  # it was retried
    assert disk.next() is not None


def test_a_search_stops_though_other_slots_are_at_work(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=8")
    made = [chosen.spec.run_id for _ in range(7) if (chosen := disk.next()) is not None]
    for run_id in made[:5]:
        disk.fails(run_id)
    with pytest.raises(SearchStoppedError, match="the first 5 trials have all failed"):
        disk.next()
    disk.completes(made[5], 0.5)
    assert disk.next() is not None


def test_a_search_stops_if_none_of_the_first_trials_has_a_finite_value(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=asha", "search.rungs=[16]", "search.trials=8")
    made = [chosen.spec.run_id for _ in range(5) if (chosen := disk.next()) is not None]
    disk.fails(made[0])
    disk.pauses(made[1], 16, math.nan)
    for run_id in made[2:4]:
        disk.completes(run_id, math.nan)
    with pytest.raises(RunStateError, match=r"no trial of search has a finite eval_loss: 3 have NaN or infinity\."):
        best_of(disk.paths)
    assert disk.next() is not None
    disk.completes(made[4], math.inf)
    with pytest.raises(SearchStoppedError, match="none of the first 5 trials has a finite eval_loss: 4 have"):
        disk.next()


def test_the_status_tells_of_a_rung_that_no_trial_reaches(tmp_path: Path) -> None:
    words = (
        "search=asha",
        "search.metric=loss",
        "search.rungs=[10,200]",
        "search.trials=4",
        "train.command='ls {params.x}'",
    )
    disk = SearchOnDisk(tmp_path, *words, axes=("params.x=interval(0,1)",), base=("cluster=local", "sweep_name=search"))
    first, second = disk.next(), disk.next()
    assert first is not None
    assert second is not None
    disk.pauses(second.spec.run_id, 10, 2.0)
    append_specs(disk.paths, [first.spec, second.spec])
    assert not any("has not reached" in line for line in status_lines(read_status(disk.paths)))
    disk.completes(first.spec.run_id, 1.0)  # at step 64
    (note,) = (line for line in status_lines(read_status(disk.paths)) if "has not reached" in line)
    assert note.startswith(
        f"Note: trial 0 ({first.spec.run_id}) is complete and has not reached the rung of step 200: "
    )


def test_a_cancelled_search_draws_nothing_and_a_cancelled_trial_stops_nothing(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=8")
    first, second = disk.next(), disk.next()
    assert first is not None
    assert second is not None
    for chosen in (first, second):
        disk.begins(chosen.spec.run_id)
    write_json(disk.paths.run(first.spec.run_id).marker(CANCEL), {"time": 0})
    assert disk.next() is not None
    write_json(disk.paths.run(second.spec.run_id).marker(CANCEL), {"time": 0, "with_sweep": True})
    with pytest.raises(SearchStoppedError, match="was cancelled"):
        disk.next()


def test_the_record_of_a_draw_names_what_was_known_and_at_work(tmp_path: Path) -> None:
    disk = SearchOnDisk(tmp_path, "search=random", "search.trials=8")
    made = [disk.next() for _ in range(3)]
    assert made[1] is not None
    disk.completes(made[1].spec.run_id, 0.5)
    disk.next()
    record = json.loads((disk.paths.drawn / "000003.jsonl").read_text().splitlines()[1])
    assert (record["known"], record["at_work"]) == ([1], [0, 2])
