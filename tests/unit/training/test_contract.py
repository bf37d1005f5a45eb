"""A start holds the checkpoint's facts against its own: goes on, warns, or refuses with what differs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_trainer.data.text.dataset import TextBytes
from hpc_trainer.errors import CheckpointError, ConfigError, IncompatibleResumeError, LoopError, UntrustedFileError
from hpc_trainer.record.journal import Journal
from hpc_trainer.record.layout import RunPaths
from hpc_trainer.runtime.code import code_digests
from hpc_trainer.runtime.rank_env import read_rank_env
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.training.checkpoint.store import CheckpointStore
from hpc_trainer.training.context import RunContext
from hpc_trainer.training.contract import ResumeContract, fingerprint
from tests.journals import journal_records
from tests.unit.record.builders import make_config

Start = Callable[..., RunContext]


def test_ranks_take_up_their_own_state_on_the_same_mesh_only() -> None:
    """Four ranks in two pairs share two random streams: those of four data-parallel ranks would part the pairs."""

    def found(made_with: Any, **changes: Any) -> bool:
        contract = ResumeContract.of(make_config(**changes), RankGroup(rank=1, world_size=4))
        info: Any = SimpleNamespace(world_size=4, meta={} if made_with is None else {"made_with": made_with})
        return contract.is_same_world(info, RankGroup(rank=1, world_size=4))

    of_pairs = {"parallel": {"strategy": "fsdp", "tensor_parallel": 2}}
    assert found(None)
    assert found({"parallel": {"strategy": "ddp"}}), "saved by a version that knew no mesh"
    assert found(of_pairs, parallel__tensor_parallel=2)
    assert not found(of_pairs)
    assert not found(None, parallel__tensor_parallel=2)
    assert not found({"parallel": {"pipeline_parallel": 2}}, parallel__tensor_parallel=2)
    assert ResumeContract().is_same_world(SimpleNamespace(world_size=1, meta={}), RankGroup())  # type: ignore[arg-type]
    streams = ResumeContract.of(make_config(parallel__tensor_parallel=2), RankGroup(world_size=4))
    assert [streams.stream(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [ResumeContract().stream(rank) for rank in range(4)] == [0, 1, 2, 3]


class Numbers:
    """A data set as a person may bring one."""

    input_shape, num_classes = (3,), 2

    def __init__(self, count: int, content: str | None = None) -> None:
        self.count = count
        if content is not None:
            self.fingerprint = lambda: content

    def __len__(self) -> int:
        return self.count


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the next attempt of a run with a configuration."""

    def make(name: str = "run", *, num_steps: int = 20, contract: ResumeContract | None = None, **changes: Any) -> Any:
        paths, group = RunPaths(tmp_path / name), RankGroup()
        paths.folder.mkdir(mode=0o700, exist_ok=True)
        attempt = len(Journal(paths).read())
        Journal(paths).start(
            attempt, job_id=f"job-{attempt}", restart_count=0, node="n", pid=os.getpid(), executor="local",
            world_size=1,
        )  # fmt: skip
        config = make_config(**changes)
        return RunContext(
            paths=paths, env=read_rank_env({}), group=group, stop=StopFlag(), attempt=attempt, num_steps=num_steps,
            store=CheckpointStore(paths.checkpoints, group=group, keep_last=2, attempt=attempt),
            contract=contract or ResumeContract.of(config, group),
        )  # fmt: skip

    return make


def _saved(run: RunContext, step: int = 5) -> None:
    weight = torch.zeros(3)
    run.restore(weight=weight)
    weight += step
    run.save(step, weight=weight)


def _changes(run: RunContext) -> list[Any]:
    return [record.get("changes", []) for record in journal_records(run.paths.folder, "resume")]


def test_the_manifest_says_what_it_was_made_with(start: Start) -> None:
    run = start()
    run.describe(dataset=Numbers(7, "abc"), vocabulary=(1, 2))
    _saved(run)
    newest = run.store.newest_valid()
    assert newest is not None
    made = newest.meta["made_with"]
    assert made["seed"] == 0
    assert made["dataset"] == {"num_samples": 7, "input_shape": [3], "num_classes": 2, "digest": "abc"}
    assert made["vocabulary"] == [1, 2]
    assert made["versions"]["torch"] == torch.__version__
    assert made["code"].keys() == {"hpc_trainer"}
    assert made["world_size"] == 1
    assert "cluster" not in made
    again = start()
    again.describe(dataset=Numbers(7, "abc"), vocabulary=(1, 2))
    assert again.restore(weight=torch.zeros(3)).step == 5
    assert _changes(again) == [[], []]


def test_what_changes_the_schedule_is_told_and_recorded(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    _saved(start())
    run = start(optim__lr=0.5, monitor__log_every_steps=3)
    assert run.restore(weight=torch.zeros(3)).step == 5
    said = capsys.readouterr().out
    assert "WARNING: resumes, and from here on the schedule or the last bits differ: optim.lr: 0.001 -> 0.5\n" in said
    assert "differs from the checkpoint without changing the training: monitor.log_every_steps: 10 -> 3\n" in said
    assert _changes(run)[-1] == ["changes-the-schedule: optim.lr: 0.001 -> 0.5"]


@pytest.mark.parametrize(
    ("first", "second", "line", "key"),
    [
        (Numbers(7), Numbers(8), "dataset.num_samples: 7 -> 8", "dataset.num_samples"),
        (Numbers(7, "a"), Numbers(7, "b"), "dataset.digest: a -> b", "dataset.digest"),
        (Numbers(7, "a"), Numbers(7), "dataset.digest: a -> (none)", "dataset.digest"),
    ],
)
def test_other_data_are_refused_until_the_one_key_allows_them(
    start: Start, first: Numbers, second: Numbers, line: str, key: str
) -> None:
    run = start()
    run.describe(dataset=first)
    _saved(run)
    run = start()
    run.describe(dataset=second)
    with pytest.raises(IncompatibleResumeError) as caught:
        run.restore(weight=torch.zeros(3))
    assert f"  {line}\n" in str(caught.value)
    assert str(caught.value).endswith(f"checkpoint.allow_changes=[{key}]")
    run = start(checkpoint__allow_changes=[key])
    run.describe(dataset=second)
    assert run.restore(weight=torch.zeros(3)).step == 5
    assert _changes(run)[-1] == [f"incompatible: {line}"]


def test_changed_code_is_told(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "their_lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text("x = 1")
    (tmp_path / "their_loop.py").write_text("y = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_digests(["their_lab", "their_loop", "nowhere_at_all"])
    assert before["nowhere_at_all"] == "not found"
    assert before == code_digests(["their_lab", "their_loop", "nowhere_at_all"])
    (package / "nets.py").write_text("x = 2")
    after = code_digests(["their_lab", "their_loop"])
    assert after["their_lab"] != before["their_lab"]
    assert after["their_loop"] == before["their_loop"]
    (package / "nets.py").rename(package / "other.py")
    assert code_digests(["their_lab"])["their_lab"] != after["their_lab"]
    _saved(start(contract=ResumeContract(facts={"code": before})))
    second = start(contract=ResumeContract(facts={"code": after}))
    second.restore(weight=torch.zeros(3))
    assert any("code.their_lab" in change for change in _changes(second)[-1])


def test_a_checkpoint_of_before_says_nothing_and_is_used(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    _saved(start(contract=ResumeContract()))
    assert start().restore(weight=torch.zeros(3)).step == 5
    assert "step-00000005 does not say what it was made with" in capsys.readouterr().out


def test_names_that_are_taken_and_values_that_are_no_json_are_refused(start: Start) -> None:
    run = start()
    with pytest.raises(LoopError, match=r"run.describe\(seed=...\): the name is taken"):
        run.describe(seed=1)
    with pytest.raises(LoopError, match="takes JSON"):
        run.describe(loss=float("nan"))
    with pytest.raises(LoopError, match="takes JSON"):
        run.describe(thing=object())


def test_a_text_is_told_by_its_bytes_alone(tmp_path: Path) -> None:
    texts = {
        "a": b"x" * 9_000_000,
        "moved": b"x" * 9_000_000,
        "other": b"x" * 8_999_999 + b"y",
        "longer": b"x" * 9_000_001,
    }
    prints = {}
    for name, content in texts.items():
        path = tmp_path / name
        path.write_bytes(content)
        os.utime(path, (len(prints), len(prints)))
        prints[name] = fingerprint(TextBytes(path, seq_len=8, start=0, stop=len(content)))["digest"]
    assert prints["a"] == prints["moved"]
    assert len(set(prints.values())) == 3


class TestResumeFrom:
    """A run that begins with another run's state."""

    def begin(self, start: Start, origin: Path, **settings: Any) -> RunContext:
        return start("second", contract=ResumeContract(resume_from=str(origin)), **settings)

    def test_it_goes_on_there_in_a_folder_of_its_own(self, start: Start) -> None:
        first = start()
        _saved(first)
        drawn = torch.rand(2)
        files = {path: path.stat().st_mtime_ns for path in first.paths.folder.rglob("*")}
        weight, run = torch.zeros(3), self.begin(start, first.paths.folder)
        torch.manual_seed(9)
        assert run.restore(weight=weight).step == run.first_step == 5
        assert weight.tolist() == [5.0] * 3
        assert torch.equal(torch.rand(2), drawn), "the random state is that of the save"
        run.save(5, weight=weight)
        assert [path.name for path in run.paths.checkpoints.iterdir()] == ["step-00000005"]
        run.save(6, weight=weight + 1)
        assert {path: path.stat().st_mtime_ns for path in first.paths.folder.rglob("*")} == files
        weight, again = torch.zeros(3), self.begin(start, first.paths.folder)
        assert again.restore(weight=weight).step == 6, "what it saved itself comes first"

    def test_one_checkpoint_may_be_named(self, start: Start) -> None:
        first = start()
        _saved(first)
        first.save(9, weight=torch.ones(3))
        run = self.begin(start, first.paths.checkpoints / "step-00000005")
        assert run.restore(weight=torch.zeros(3)).step == 5

    def test_a_damaged_one_keeps_its_name_and_the_one_before_is_used(self, start: Start) -> None:
        first = start()
        _saved(first)
        first.save(9, weight=torch.ones(3))
        (first.paths.checkpoints / "step-00000009" / "state.safetensors").write_bytes(b"torn")
        (first.paths.checkpoints / ".trash-step-00000001").mkdir()
        names = {path.name for path in first.paths.checkpoints.iterdir()}
        assert self.begin(start, first.paths.folder).restore(weight=torch.zeros(3)).step == 5
        assert {path.name for path in first.paths.checkpoints.iterdir()} == names
        with pytest.raises(CheckpointError, match="holds no valid checkpoint"):
            self.begin(start, first.paths.checkpoints / "step-00000009").restore(weight=torch.zeros(3))

    def test_there_must_be_steps_left(self, start: Start) -> None:
        first = start()
        _saved(first)
        with pytest.raises(ConfigError, match=r"train.num_steps=5 must be more than 5.* Use for example 10"):
            self.begin(start, first.paths.folder, num_steps=5).restore(weight=torch.zeros(3))

    def test_what_others_may_write_is_refused(self, start: Start) -> None:
        first = start()
        _saved(first)
        (first.paths.checkpoints / "step-00000005").chmod(0o777)
        with pytest.raises(UntrustedFileError, match="others may write it"):
            self.begin(start, first.paths.folder).restore(weight=torch.zeros(3))

    def test_a_copied_folder_is_no_way_round(self, start: Start) -> None:
        first = start()
        _saved(first)
        second = start("second")
        shutil.copytree(first.paths.checkpoints, second.paths.checkpoints)
        with pytest.raises(CheckpointError, match=r"was saved by run, and this run is second.*checkpoint.resume_from"):
            second.restore(weight=torch.zeros(3))

    def test_the_contract_holds_there_too(self, start: Start) -> None:
        first = start()
        _saved(first)
        run = start("second", checkpoint__resume_from=str(first.paths.folder), seed=4)
        with pytest.raises(IncompatibleResumeError, match="seed: 0 -> 4"):
            run.restore(weight=torch.zeros(3))
        assert json.loads(json.dumps(run.contract.meta())) == run.contract.meta()
