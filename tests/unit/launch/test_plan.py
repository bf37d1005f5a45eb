"""Grid -> arrays: what is submitted, and what is left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from hpc_trainer.config.rules.cluster_rules import site_notes
from hpc_trainer.config.schema.cluster import BudgetConfig, HardwareConfig
from hpc_trainer.launch.known import Known, timeless
from hpc_trainer.launch.plan import SweepPlan, build_plan, clear_exit_codes, specs_to_write
from hpc_trainer.record.spec import OtherShape, RunSpec
from hpc_trainer.record.states import RunState
from hpc_trainer.slurm.limits import Limits, NodeGroup, Partition
from tests.composed import composed
from tests.unit.launch.grids import make_grid, make_plan
from tests.unit.record.builders import make_spec, make_specs

SLURM = ("cluster=slurm",)


def test_runs_of_one_shape_become_one_array(tmp_path: Path) -> None:
    small = [make_spec(*SLURM, seed=seed) for seed in range(3)]
    large = [make_spec(*SLURM, "hardware=gpu_x16", seed=seed) for seed in range(2)]
    plan = make_plan(tmp_path, [small[0], large[0], small[1], large[1], small[2]])
    assert [(array.hardware, array.specs) for array in plan.arrays] == [
        ("cpu_x1", tuple(small)),
        ("gpu_x16", tuple(large)),
    ]
    assert plan.num_to_submit == 5
    assert plan.gpu_hours_max == 2 * 16.0
    assert set(plan.states.values()) == {RunState.NEW}


@pytest.mark.parametrize(
    "changes",
    [{"hardware__time_limit_min": 7}, {"hardware__partition": "x"}, {"cluster__account": "x"},
     {"cluster__setup": ["x"]}, {"cluster__srun_args": ["-x"]}, {"cluster__python": "x"},
     {"cluster__signal_lead_s": 9}],
)  # fmt: skip
def test_what_differs_in_the_script_is_another_array(tmp_path: Path, changes: dict[str, object]) -> None:
    specs = [make_spec(*SLURM, seed=0), make_spec(*SLURM, seed=1, **changes)]
    assert len(make_plan(tmp_path, specs).arrays) == 2


def test_what_the_worker_reads_from_the_spec_shares_an_array(tmp_path: Path) -> None:
    specs = [make_spec(*SLURM, seed=0), make_spec(*SLURM, seed=1, cluster__env={"A": "1"}, optim__lr=0.5)]
    assert len(make_plan(tmp_path, specs).arrays) == 1


SUBMITTED = {RunState.NEW, RunState.PREEMPTED, RunState.TIMEOUT, RunState.NODE_FAIL}


@pytest.mark.parametrize("state", RunState)
def test_which_states_are_submitted(tmp_path: Path, state: RunState) -> None:
    (spec,) = make_specs(1, *SLURM)
    grid = make_grid(tmp_path, [spec])
    assert build_plan(grid, Known(states={spec.run_id: state})).num_to_submit == (state in SUBMITTED)
    again = build_plan(grid, Known(states={spec.run_id: state}), retry_failed=True)
    assert again.num_to_submit == (state in SUBMITTED | {RunState.FAILED, RunState.OUT_OF_MEMORY})


def test_runs_that_left_the_grid_are_named_and_left_alone(tmp_path: Path) -> None:
    specs = make_specs(3, *SLURM)
    states = {spec.run_id: RunState.PENDING for spec in specs}
    plan = build_plan(make_grid(tmp_path, specs[:1]), Known(states=states))
    assert plan.no_longer_in_grid == tuple(spec.run_id for spec in specs[1:])
    assert plan.arrays == ()


def test_specs_are_written_once_and_again_when_they_ask_for_something_else(tmp_path: Path) -> None:
    specs = make_specs(2, *SLURM)
    plan = make_plan(tmp_path, specs)
    assert specs_to_write(plan, {}) == specs
    assert specs_to_write(plan, {spec.run_id: spec for spec in specs}) == []
    longer = [make_spec(*SLURM, seed=seed, hardware__time_limit_min=600) for seed in range(2)]
    assert specs_to_write(make_plan(tmp_path, longer), {spec.run_id: spec for spec in specs}) == longer


def test_specs_are_written_in_the_order_of_the_grid_whichever_array_has_them(tmp_path: Path) -> None:
    shapes = ("hardware=cpu_x1", "hardware=cpu_x2")
    specs = [make_spec(*SLURM, shape, seed=seed) for seed in range(2) for shape in shapes]
    plan = make_plan(tmp_path, specs)
    assert [spec.run_id for array in plan.arrays for spec in array.specs] != [spec.run_id for spec in specs]
    assert specs_to_write(plan, {}) == specs


def test_a_run_that_ran_out_of_memory_is_submitted_with_more(tmp_path: Path) -> None:
    """What `why` advises: it is the same run, whatever it asks Slurm for."""
    (before,) = make_specs(1, *SLURM)
    more = make_spec(*SLURM, seed=0, hardware__mem_gb_per_node=99.0)
    assert more.run_id == before.run_id
    grid, known = make_grid(tmp_path, [more]), Known(states={before.run_id: RunState.OUT_OF_MEMORY})
    assert build_plan(grid, known).num_to_submit == 0
    plan = build_plan(grid, known, retry_failed=True)
    assert plan.num_to_submit == 1
    assert specs_to_write(plan, {before.run_id: before}) == [more]


def test_models_that_cannot_fit_are_noted_each_once_and_a_few_of_them(tmp_path: Path) -> None:
    gpu = (*SLURM, "experiment=gpt_bytes", "hardware=gpu_x8", "hardware.gpu_type=t4", "model.num_heads=8")
    small = make_spec(*gpu)
    large = [make_spec(*gpu, "model.embed_dim=8192", seed=seed, model__num_layers=2 + seed // 2) for seed in range(12)]
    notes = make_plan(tmp_path, [small, *large[:2]]).notes
    assert len(notes) == 1
    assert notes[0].startswith("model=gpt needs at least 25.82 GB a rank (for weights, gradients and optimizer state")
    notes = make_plan(tmp_path, large).notes
    assert len(set(notes)) == len(notes) == 5
    assert notes[-1] == "2 more models do not fit."
    assert make_plan(tmp_path, [small]).notes == ()


def test_a_package_that_a_tracker_lacks_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(*words: str) -> tuple[str, ...]:
        return make_plan(tmp_path, make_specs(2, *SLURM, *words)).notes

    assert notes("tracker=wandb") == notes("tracker=mlflow") == notes("tracker=tensorboard") == ()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (wandb,), (tensorboard,) = notes("tracker=wandb"), notes("tracker=tensorboard")
    assert "pip install 'hpc_trainer[wandb]'; hpc-trainer sync needs it here" in wandb
    assert "pip install 'hpc_trainer[tensorboard]'" in tensorboard
    assert notes() == ()
    assert notes("tracker=tensorboard", "cluster.python=/env/bin/python") == (), "nobody knows what that one has"
    assert notes("tracker=mlflow", "cluster.python=/env/bin/python") != ()


def test_a_webhook_whose_variable_the_jobs_will_not_have_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def notes(*words: str) -> tuple[str, ...]:
        return make_plan(tmp_path, make_specs(2, *SLURM, "notify.webhook_env=MY_HOOK", *words)).notes

    monkeypatch.delenv("MY_HOOK", raising=False)
    (unset,) = notes()
    assert unset.startswith("notify.webhook_env=MY_HOOK: this shell has no variable MY_HOOK")
    assert notes("cluster.setup=['export MY_HOOK=$(cat ~/.hook)']") == ()
    monkeypatch.setenv("MY_HOOK", "secret.example.org/T0")
    (no_address,) = notes()
    assert "does not begin with https:// or http://" in no_address
    assert "secret" not in no_address
    monkeypatch.setenv("MY_HOOK", "https://secret.example.org/T0")
    assert notes() == ()
    (kept_out,) = notes("cluster.environment.inherit=false")
    assert "cluster.environment.inherit=false" in kept_out


def _budget_problems(states: tuple[RunState, ...] = (), **budget: float) -> list[str]:
    """Problems of three runs that take two GPU-hours each."""
    specs = make_specs(3, *SLURM, "hardware=gpu_x2", hardware__time_limit_min=60)
    grid = dataclasses.replace(make_grid(Path("/runs/sweep"), specs), budget=BudgetConfig(**budget))  # type: ignore[arg-type]
    known = Known(states={spec.run_id: state for spec, state in zip(specs, states, strict=False)})
    return [problem for problem in build_plan(grid, known).problems if problem.startswith("budget.")]


def test_a_budget_is_exceeded_above_its_limit_by_what_works_and_what_is_new() -> None:
    assert _budget_problems(max_jobs=3, max_gpu_hours=6.0) == []
    jobs = "budget.max_jobs=2: this grid would have 3 jobs in the queue. Raise it, or take fewer points."
    hours = (
        "budget.max_gpu_hours=5.9: this grid may take up to 6 GPU-hours (each run's time limit once). Raise it, "
        "shorten hardware.time_limit_min, or take fewer points."
    )
    assert _budget_problems(max_jobs=2) == [jobs]
    assert _budget_problems(max_gpu_hours=5.9) == [hours]
    assert _budget_problems(max_jobs=2, max_gpu_hours=5.9) == [jobs, hours]
    assert _budget_problems((RunState.RUNNING,), max_jobs=2) == [jobs], "it has a job already"
    assert _budget_problems((RunState.COMPLETED,), max_jobs=2, max_gpu_hours=4.0) == []
    nothing_new = (RunState.RUNNING, RunState.RUNNING, RunState.RUNNING)
    assert _budget_problems(nothing_new, max_jobs=1, max_gpu_hours=1.0) == []


def test_folders_that_keep_the_group_out_are_named_with_the_commands_that_open_them(tmp_path: Path) -> None:
    closed = tmp_path / "closed here"
    folder = closed / "sweep"
    folder.mkdir(parents=True)
    specs = make_specs(1, *SLURM)

    def notes(is_readable: bool = True) -> list[str]:
        grid = dataclasses.replace(make_grid(folder, specs), group_readable=is_readable)
        return [note for note in build_plan(grid).notes if str(closed) in note]

    for above, own, commands in (
        (0o700, 0o700, ("g+x", "-R")), (0o710, 0o700, ("-R",)), (0o701, 0o700, ("-R",)), (0o700, 0o740, ("g+x",)),
        (0o711, 0o750, ()),
    ):  # fmt: skip
        folder.chmod(own)
        closed.chmod(above)
        text = " ".join(notes())
        assert (f"chmod -R g+rX '{folder}'" in text) is ("-R" in commands), (above, own)
        assert (f"'{closed}'" in text.partition("chmod -R")[0]) is ("g+x" in commands), (above, own)
        assert bool(text) is bool(commands)
        assert notes(is_readable=False) == []


def _name_notes(spec: RunSpec, overrides: tuple[str, ...], **axes: str) -> list[str]:
    spec = dataclasses.replace(spec, overrides=overrides, axes=axes)
    return [note for note in make_plan(Path("/runs/sweep"), [spec]).notes if note.startswith("hardware=")]


def test_a_profile_whose_file_has_another_name_is_noted() -> None:
    (spec,) = make_specs(1, *SLURM)
    (note,) = _name_notes(spec, ("hardware=mine",))
    assert note == (
        "hardware=mine: its file has name: cpu_x1, by which plans, results and measured figures know it. Write "
        "name: mine into mine.yaml."
    )
    assert _name_notes(spec, (), hardware="mine") == [note], "an axis"
    assert _name_notes(spec, ("hardware=cpu_x1",)) == _name_notes(spec, ("seed=3",)) == []
    assert _name_notes(spec, ("hardware=mine", "hardware.name=cpu_x1")) == [], "the person says so"
    nameless = dataclasses.replace(spec, hardware=HardwareConfig().name)
    assert _name_notes(nameless, ("hardware=mine",))[0].startswith("hardware=mine: its file has no name, by which")
    other = OtherShape(hardware="cpu_x2", shape=spec.shape, sections={})
    both = dataclasses.replace(spec, others=(other,))
    assert _name_notes(both, ("hardware=first:cpu_x1,cpu_x2",)) == []
    (second,) = _name_notes(both, ("hardware=first:cpu_x1,mine",))
    assert second.startswith("hardware=mine: its file has name: cpu_x2")


def _planned(
    *, stop_s: float, mode: str = "REQUEUE", grace_s: int = 20, taken: frozenset[int] = frozenset()
) -> SweepPlan:
    (spec,) = make_specs(1, "cluster=slurm", "hardware.partition=spare")
    partition = Partition(name="spare", preempt_mode=mode, grace_s=grace_s)
    limits = Limits(partitions={"spare": partition}, kill_wait_s=30, requeue_exit=taken)
    grid = make_grid(Path("/runs/sweep"), [spec])
    return build_plan(grid, Known(stop_s={spec.shape: stop_s}), limits=limits)


def test_a_grace_that_is_too_short_for_a_save_is_said_with_its_figures() -> None:
    (note,) = _planned(stop_s=61.26).notes
    assert note.startswith("cpu_x1: a stop takes 61.3 s (a step and a save, the slowest 1 %), and partition spare")
    assert "gives 50 s (GraceTime=20, KillWait=30)" in note
    assert _planned(stop_s=49.0).notes == ()
    assert _planned(stop_s=61.0, grace_s=60).notes == ()
    assert _planned(stop_s=61.0, mode="OFF").notes == (), "nobody preempts its jobs"


def test_exit_codes_that_the_site_has_taken_are_left_to_it() -> None:
    plan = _planned(stop_s=1.0, taken=frozenset({75, 79, 99}))
    assert plan.exit_codes == ((75, 80),)
    assert "jobs end with 80 instead of 75" in plan.notes[0]
    assert _planned(stop_s=1.0, taken=frozenset({99})).exit_codes == ()
    every = clear_exit_codes(frozenset(range(64, 120)))
    assert [ours for ours, _ in every] == [74, 75, 76, 78]
    assert all(119 < instead < 126 for _, instead in every)
    assert len({instead for _, instead in every}) == 4


def _limit_notes(
    *words: str,
    start_s: float | None = None,
    longest_min: int | None = None,
    others: Mapping[str, int | None] = MappingProxyType({}),
) -> list[str]:
    (spec,) = make_specs(1, *words)
    partitions = {"spare": Partition(name="spare", is_default=True, max_time_min=longest_min)}
    partitions |= {name: Partition(name=name, is_default=False, max_time_min=most) for name, most in others.items()}
    known = Known() if start_s is None else Known(start_s={timeless(spec.shape): start_s})
    plan = build_plan(make_grid(Path("/runs/sweep"), [spec]), known, limits=Limits(partitions=partitions))
    return [note for note in plan.notes if "time_limit_min" in note]


def test_a_time_limit_that_leaves_nothing_for_training_is_noted_with_a_longer_one() -> None:
    (note,) = _limit_notes("cluster=slurm", "hardware.time_limit_min=1", "cluster.signal_lead_s=30")
    assert note == (
        "cpu_x1: hardware.time_limit_min=1 leaves 0 s for training. A start takes 30 s (assumed, because no run of "
        "this sweep has measured it); Slurm sends its warning 30 s before the limit (cluster.signal_lead_s) and may "
        "send it 60 s earlier. A run that is not done by then may do one step an attempt. Use "
        "hardware.time_limit_min=3 or more."
    )
    assert _limit_notes("cluster=slurm", "hardware.time_limit_min=3", "cluster.signal_lead_s=30") == []
    assert _limit_notes("cluster=local", "hardware.time_limit_min=1") == [], "nobody ends a run there"


def test_the_start_that_earlier_runs_had_decides_which_time_limit_is_too_short() -> None:
    words = ("cluster=slurm", "hardware.time_limit_min=5")
    assert _limit_notes(*words) == _limit_notes(*words, start_s=100.0) == []
    (note,) = _limit_notes(*words, start_s=160.0)
    assert "leaves 5 s for training. A start takes 160 s (the median of this sweep's runs)" in note
    assert note.endswith("Use hardware.time_limit_min=6 or more.")
    assert _limit_notes("cluster=slurm", "hardware.time_limit_min=6", start_s=160.0) == []
    assert _limit_notes(*words, "cluster.min_goodput=0", start_s=160.0) == [], "5 s are enough for those who say so"


def test_a_partition_that_ends_before_a_run_can_train_is_named() -> None:
    (note,) = _limit_notes("cluster=slurm", "hardware.time_limit_min=5", start_s=900.0, longest_min=10)
    assert note.endswith("It needs hardware.time_limit_min=19, and the MaxTime of partition spare is 10.")
    words = ("cluster=slurm", "hardware.time_limit_min=5")
    (note,) = _limit_notes(*words, start_s=900.0, longest_min=10, others={"short": 18, "enough": 19, "endless": None})
    assert note.endswith("partition spare is 10. Partitions that allow it: enough, endless.")


def _whole_notes(*words: str, **limits: bool) -> list[str]:
    (spec,) = make_specs(1, "cluster=slurm", "hardware.partition=spare", *words)
    known = Limits(
        partitions={"spare": Partition(name="spare", gives_whole_nodes=limits.pop("partition", False))},
        nodes=tuple(
            NodeGroup(
                partition=name, num_nodes=9, cpus=cpus, memory_mb=1000, gpus={"a100": count}, features=frozenset()
            )
            for name, cpus, count in (("another", 1, 1), ("spare", 64, 8), ("spare", 64, 4), ("test", 1, 1))
        ),
        **limits,
    )
    plan = build_plan(make_grid(Path("/runs/sweep"), [spec]), limits=known)
    return [note for note in plan.notes if "alone" in note]


def test_a_whole_node_that_is_not_used_is_said_with_what_it_costs() -> None:
    two = ("hardware=gpu_x2", "hardware.time_limit_min=60")
    (note,) = _whole_notes(*two, "hardware.whole_node=true")
    assert note == (
        "gpu_x2: each job has its nodes alone (hardware.whole_node=true), and uses 2 of 4 GPUs: up to 4 GPU-hours a "
        "run, of which the plan counts 2. Use hardware.gpus_per_node=4, or run several in one job, by the same "
        "submit with cluster=local local.max_parallel=N inside it."
    )
    assert "(partition spare gives whole nodes)" in _whole_notes(*two, partition=True)[0]
    assert "(partition spare gives whole nodes)" in _whole_notes(*two, gives_whole_nodes=True)[0]
    assert "uses 8 of 64 CPUs. Use more ranks" in _whole_notes("hardware.cpus_per_task=8", partition=True)[0]
    assert _whole_notes("hardware.cpus_per_task=32", partition=True) == []
    assert _whole_notes(*two) == [], "its nodes are shared"
    assert _whole_notes("hardware=gpu_x2", "hardware.gpus_per_node=4", partition=True) == []


def test_a_site_that_charges_whole_nodes_is_told_of_before_slurm_is_asked() -> None:
    def notes(*words: str) -> tuple[str, ...]:
        config = composed(["experiment=digits", *words])
        return site_notes(config.hardware, config.cluster)

    (note,) = notes("hardware=nersc/perlmutter_x4", "hardware.gpus_per_node=1")
    assert "gives and charges whole nodes: hardware.gpus_per_node=1 leaves GPUs of hardware=nersc/perlmutter_x4" in note
    assert "Use hardware.gpus_per_node=4, or run several in one job" in note
    assert notes("hardware=nersc/perlmutter_x4") == notes("hardware=nersc/perlmutter_x4", "hardware.num_nodes=2") == ()
    assert notes("hardware=csc/lumi_x1") == (), "a shared partition"


def test_each_array_is_looked_at_for_whole_nodes_and_time_limits(tmp_path: Path) -> None:
    """The first array, which is in another partition, gets no note."""
    words = ("hardware.partition=spare", "hardware.whole_node=true", "hardware.time_limit_min=60")
    specs = [
        *make_specs(1, *SLURM, "hardware.partition=other", "hardware.time_limit_min=60"),
        *make_specs(1, *SLURM, *words, "hardware.cpus_per_task=32"),
        *make_specs(1, *SLURM, *words, "hardware.cpus_per_task=8"),
        *make_specs(1, *SLURM, "hardware.partition=spare", "hardware.time_limit_min=1", "cluster.signal_lead_s=30"),
    ]
    node = NodeGroup(partition="spare", num_nodes=9, cpus=64, memory_mb=1000, gpus={}, features=frozenset())
    partitions = {name: Partition(name=name, preempt_mode="REQUEUE", grace_s=20) for name in ("other", "spare")}
    limits = Limits(partitions=partitions, nodes=(node,), kill_wait_s=30)
    known = Known(stop_s={specs[2].shape: 61.0})
    notes = build_plan(make_grid(tmp_path, specs), known, limits=limits).notes
    assert [note.partition("uses ")[2][:13] for note in notes if "alone" in note] == ["8 of 64 CPUs."]
    assert len([note for note in notes if "leaves 0 s for training" in note]) == 1
    assert len([note for note in notes if "a stop takes 61" in note]) == 1
