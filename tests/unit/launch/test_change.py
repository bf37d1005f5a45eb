"""A retry with changes: the same run with other cluster.* and hardware.*, recorded; or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.extend import change_specs
from hpc_trainer.launch.grids import retry
from hpc_trainer.operate.why import explain
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import RunSpec, read_spec, read_specs
from hpc_trainer.record.status import read_status
from hpc_trainer.record.submissions import read_ledger
from hpc_trainer.slurm.commands import user_name
from tests.unit.launch.grids import make_grid, submit
from tests.unit.launch.scripts import read_script
from tests.unit.record.builders import make_spec
from tests.unit.slurm.fake_slurm import FakeSlurm

ELASTIC = ("experiment=digits", "hardware=cpu_x2", "parallel.elastic=true", "train.global_batch_size=64")


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return make_spec("cluster=slurm", "hardware.partition=gpu")


def _changed(spec: RunSpec, *changes: str) -> RunSpec:
    (made,) = change_specs([spec], changes)
    assert (made.run_id, made.digest) == (spec.run_id, spec.digest)
    assert made.typed(), "its digest fits what it holds"
    return made


def test_where_and_how_it_runs_may_change(spec: RunSpec) -> None:
    made = _changed(
        spec, "hardware.time_limit_min=480", "hardware.mem_gb_per_node=64", "cluster.setup=[module load cuda]",
        "+cluster.sbatch.mail-type=END", "+cluster.env.NCCL_DEBUG=INFO", "cluster.python=/opt/bin/python",
    )  # fmt: skip
    assert (made.shape.time_limit_min, made.shape.mem_gb_per_node, made.shape.partition) == (480, 64.0, "gpu")
    cluster = made.config["cluster"]
    assert (cluster["setup"], cluster["sbatch"]) == (["module load cuda"], {"mail-type": "END"})
    assert (cluster["env"], cluster["python"]) == ({"NCCL_DEBUG": "INFO"}, "/opt/bin/python")
    assert made.overrides == (*spec.overrides, *made.overrides[len(spec.overrides) :])
    assert "hardware.time_limit_min=480" in made.overrides, "show says where a value came from"
    same = {name: part for name, part in made.config.items() if name not in ("cluster", "hardware")}
    assert same == {name: part for name, part in spec.config.items() if name not in ("cluster", "hardware")}
    assert spec.shape.time_limit_min != 480, "what was frozen is not edited"


def test_what_is_wrong_of_one_run_hides_nothing_of_another(spec: RunSpec) -> None:
    elastic = make_spec("cluster=slurm", *ELASTIC)
    alone = []
    for each in (elastic, spec):
        with pytest.raises(ConfigError) as one:
            change_specs([each], ["hardware.tasks_per_node=3"])
        alone.append(str(one.value))
    assert alone[0] != alone[1], "a batch of 64 is not three equal parts; this is another run"
    with pytest.raises(ConfigError) as error:
        change_specs([elastic, spec], ["hardware.tasks_per_node=3"])
    assert str(error.value) == "\n".join(alone)


def test_a_program_may_run_elsewhere_too() -> None:
    program = make_spec("cluster=slurm", "train.command='sh -c true'")
    made = _changed(program, "cluster.setup=[module load cuda]", "hardware.time_limit_min=5")
    assert (made.shape.time_limit_min, made.num_steps) == (5, 0)


REFUSED = {
    "optim.lr=0.1": "only cluster.* and hardware.* can be changed. For another optim.lr submit another run",
    "hardware=gpu_x2": "hardware=gpu_x2: change single keys, as hardware.KEY=VALUE",
    "cluster.executor=local": "the executor of a sweep cannot be changed",
    "hardware.time_limit_min=60,120": "a run has one value of hardware.time_limit_min",
    "hardware.time_limit=60": "hardware.time_limit: no such key in hardware",
    "hardware.time_limit_min=soon": "hardware.time_limit_min=soon must be a whole number",
    "hardware.time_limit_min=0": "hardware.time_limit_min=0 must be",
    "hardware.qos=a b": "hardware.qos='a b' must be one plain word",
    "+cluster.sbatch.nonsense=1": "nonsense",
    "hardware.num_nodes=2": "parallel.elastic=true or train.logical_ranks",
    "hardware.cpus_per_task=4": "hardware.cpus_per_task=4 makes another run of it",
    "cluster.setup=[": "cluster.setup=[",
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_what_makes_another_run_or_is_wrong_is_refused(spec: RunSpec, change: str) -> None:
    with pytest.raises(ConfigError) as told:
        change_specs([spec], [change])
    assert REFUSED[change] in str(told.value)


@pytest.mark.parametrize(
    ("num_ranks", "micro", "accum"), [(1, 32, 2), (2, 32, 1), (4, 16, 1)], ids=["fewer", "as many", "more"]
)
def test_ranks_of_an_elastic_run_may_change(num_ranks: int, micro: int, accum: int) -> None:
    """The micro-batch stays where it can: it is what the memory holds."""
    spec = make_spec(*ELASTIC)
    assert (spec.config["train"]["micro_batch_size"], spec.config["train"]["grad_accum_steps"]) == (32, 1)
    made = _changed(spec, f"hardware.tasks_per_node={num_ranks}")
    assert made.shape.world_size == num_ranks
    assert (made.config["train"]["micro_batch_size"], made.config["train"]["grad_accum_steps"]) == (micro, accum)


def test_a_retry_submits_and_records_who_changed_what(tmp_path: Path, fake_slurm: FakeSlurm, spec: RunSpec) -> None:
    paths = SweepPaths(tmp_path / "runs" / "sweep")
    (first,) = submit(make_grid(paths.folder, [spec]))
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", f"{first.job_id}_0|OUT_OF_MEMORY|0:125|n7\n")
    with pytest.raises(ConfigError, match="makes another run"):
        retry(paths, [spec.run_id], changes=["hardware.num_nodes=2"])
    assert not read_ledger(paths).changes
    changes = ("hardware.mem_gb_per_node=64", "hardware.time_limit_min=480")
    (array,) = retry(paths, [spec.run_id], changes=changes).arrays
    flags = read_script(fake_slurm.script(array.job_id)).flags
    assert (flags["mem"], flags["time"]) == ("65536M", "480")
    assert read_spec(paths, spec.run_id).shape.time_limit_min == 480, "which the worker reads, now and after a requeue"
    assert len(paths.specs.read_text().splitlines()) == 2, "the line of before stands"
    (told,) = read_ledger(paths).changes
    assert (told.run_ids, told.changes, told.user) == ((spec.run_id,), changes, user_name())
    status = read_status(paths)
    (line,) = explain(status, status.runs[0], asks_slurm=False).timeline
    assert line.endswith(f"  {user_name()} changed hardware.mem_gb_per_node=64 hardware.time_limit_min=480")
    assert not Journal(paths.run(spec.run_id)).read()
    assert read_specs(paths)[spec.run_id].axes == spec.axes
