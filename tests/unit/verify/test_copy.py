"""The copy of a run: the same identity, logged at each step, here or on Slurm, from the archive of then."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.launch.frozen_code.archive import archive_of, store_code
from hpc_trainer.record.files import make_folder
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import read_spec
from hpc_trainer.record.submissions import read_submissions
from hpc_trainer.verify.reproduce import copy_of, place_of, start_copy, take_archive
from tests.unit.launch.frozen_code.projects import frozen, make_checkout
from tests.unit.record.builders import make_spec

if TYPE_CHECKING:
    from tests.unit.slurm.fake_slurm import FakeSlurm

ON_SLURM = ("cluster=slurm", "hardware.partition=gpu")


@pytest.fixture
def sweep(tmp_path: Path) -> SweepPaths:
    found = SweepPaths(tmp_path / "runs" / "first")
    found.folder.mkdir(parents=True)
    return found


def test_it_is_the_same_run_on_this_machine(sweep: SweepPaths) -> None:
    spec = make_spec(*ON_SLURM, "tracker=tensorboard", "monitor.log_every_steps=50")

    copy = copy_of(spec, place_of(sweep, spec.run_id), ())

    assert (copy.run_id, copy.digest, copy.num_steps) == (spec.run_id, spec.digest, spec.num_steps)
    config = copy.typed()
    assert (config.cluster.executor.value, config.monitor.log_every_steps, config.tracker.name) == ("local", 1, "none")
    assert config.schedule == spec.typed().schedule
    assert spec.config["monitor"]["log_every_steps"] == 50


def test_each_copy_has_a_folder_of_its_own(sweep: SweepPaths) -> None:
    first = place_of(sweep, "run-0123456789")
    first.folder.mkdir(parents=True)

    assert (first.name, place_of(sweep, "run-0123456789").name) == ("run-0123456789-1", "run-0123456789-2")
    assert first.folder.parent == sweep.folder / "reproduced"


def test_as_a_job_with_another_partition(sweep: SweepPaths, fake_slurm: FakeSlurm) -> None:
    spec = make_spec()
    place = place_of(sweep, spec.run_id)
    copy = copy_of(spec, place, ("cluster.executor=slurm", "hardware.partition=debug"))

    jobs = start_copy(copy, place, digest=None, code=None, command_line=["hpc-trainer", "--token", "swordfish"])

    (submission,) = read_submissions(place)
    assert jobs == [submission.job_id]
    assert "#SBATCH --partition=debug" in place.script(submission.uuid).read_text()
    assert read_spec(place, spec.run_id).config == copy.config
    assert "swordfish" not in place.sweep.read_text()


def test_what_makes_another_run_has_to_be_allowed(sweep: SweepPaths) -> None:
    spec = make_spec(*ON_SLURM)
    word = "hardware.cpus_per_task=3"

    with pytest.raises(ConfigError, match="makes another run"):
        copy_of(spec, place_of(sweep, spec.run_id), (word,))
    copy = copy_of(spec, place_of(sweep, spec.run_id), (word,), may_differ=True)
    assert copy.run_id == spec.run_id
    assert copy.typed().hardware.cpus_per_task == 3
    with pytest.raises(ConfigError, match="must be one of local, slurm"):
        copy_of(spec, place_of(sweep, spec.run_id), ("cluster.executor=none",))
    with pytest.raises(ConfigError, match="must be one of local, slurm"):  # the last word counts
        copy_of(spec, place_of(sweep, spec.run_id), ("cluster.executor=slurm", "cluster.executor=none"))


def test_the_archive_of_then_is_taken_whole(sweep: SweepPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_checkout(tmp_path / "project"))
    code = frozen(tmp_path / "runs")
    make_folder(sweep.folder)
    store_code(sweep, code)
    place = place_of(sweep, "run-0123456789")

    digest, packages = take_archive(code.digest[:12], sweep, place)

    assert (digest, "my_lab" in packages) == (code.digest, True)
    assert archive_of(place, digest).read_bytes() == archive_of(sweep, digest).read_bytes()
    archive = archive_of(sweep, digest)
    archive.chmod(0o644)
    archive.write_bytes(archive.read_bytes().replace(b"class Net", b"class Nut"))
    with pytest.raises(RunStateError, match="the imports of the run are unknown"):
        take_archive(digest, sweep, place)
    archive.unlink()
    with pytest.raises(RunStateError, match="is gone"):
        take_archive(digest, sweep, place)
