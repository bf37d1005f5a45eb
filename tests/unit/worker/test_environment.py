"""The record of an attempt: written after the first step or at the end, harmless, without secrets."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.environment import IMAGE_FACTS, STAGE_KEY
from hpc_trainer.config.schema.cluster import Container, EnvironmentConfig
from hpc_trainer.record.environment import differences, nodes, read_environment
from hpc_trainer.record.files import write_json
from hpc_trainer.record.layout import RunPaths, SweepPaths
from hpc_trainer.record.redaction import REDACTED
from hpc_trainer.runtime.rank_env import RankEnv
from hpc_trainer.runtime.stop import StopFlag
from hpc_trainer.worker.begin import environment_facts, recording
from tests.unit.launch.frozen_code.projects import git, make_checkout, write_files
from tests.unit.record.builders import make_config

SECRETS = {
    "variable": "correct-horse", "harmless name": "hf_" + "A1b2" * 6, "command": "battery-staple",
    "diff": "ghp_" + "Zy9x" * 9, "remote": "tr0ub4dor", "direct_url": "swordfish", "by value": "open sesame",
}  # fmt: skip


def _env(rank: int = 0) -> RankEnv:
    return RankEnv(
        rank=rank, local_rank=rank % 2, world_size=4, local_world_size=2, node_rank=rank // 2, num_nodes=2,
        launcher="slurm", job_id="7_0", restart_count=0, node=f"n{rank // 2}",
    )  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "runs" / "sweep" / "run-0123456789")
    found.logs.mkdir(parents=True)
    return found


def _record(paths: RunPaths, **settings: Any) -> dict[str, Any]:
    with recording(make_config(), paths, _env(), 0, StopFlag(), **settings):
        pass
    found = read_environment(paths, 0)
    assert found is not None
    return found


def test_planted_secrets_are_in_no_file_of_the_run(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = make_checkout(tmp_path / "project")
    git(top, "remote", "add", "origin", f"https://me:{SECRETS['remote']}@example.org/lab.git")
    said = SECRETS["by value"].replace(" ", "-")
    write_files(top, {"my_lab/net.py": f'GITHUB = "{SECRETS["diff"]}"\nSAY = "{said}"\n'})
    info = tmp_path / "packages" / "private_index-1.0.dist-info"
    info.mkdir(parents=True)
    url = f"https://u:{SECRETS['direct_url']}@example.org/x.git"
    (info / "direct_url.json").write_text(json.dumps({"url": url, "vcs_info": {"vcs": "git", "commit_id": "ab12"}}))
    for folder in (tmp_path / "packages", top):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("HF_TOKEN", SECRETS["variable"])
    monkeypatch.setenv("NCCL_NOTE", SECRETS["harmless name"])
    monkeypatch.setenv("LAB_PASSPHRASE", said)
    words = ["hpc-trainer", "submit", "--token", SECRETS["command"], f"+hub.api_key={SECRETS['command']}"]
    monkeypatch.setattr(sys, "orig_argv", words)
    write_json(SweepPaths(paths.folder.parent).sweep, {"command": words, "run_ids": [paths.run_id]})

    config = make_config("model=custom", "model._target_=my_lab.net.Net")
    with recording(config, paths, _env(), 0, StopFlag()):
        pass

    texts = [path.read_text() for path in paths.folder.rglob("*") if path.is_file()]
    assert texts
    for kind, secret in {**SECRETS, "by value": said}.items():
        assert not [text for text in texts if secret in text], kind
    record = json.loads(texts[0])
    assert record["origins"]["private-index"] == {
        "url": f"https://{REDACTED}@example.org/x.git", "vcs": "git", "commit_id": "ab12",
    }  # fmt: skip
    assert (record["variables"]["HF_TOKEN"], record["variables"]["NCCL_NOTE"]) == (REDACTED, REDACTED)
    assert record["command"]["submit"].startswith("hpc-trainer submit --token")
    (checkout,) = [each for each in record["code"]["checkouts"] if each["top"] == str(top)]
    assert (checkout["diff_redacted"], checkout["remote"]) == (2, f"https://{REDACTED}@example.org/lab.git")
    assert record["redacted"] >= 9


def test_it_is_written_after_the_first_step(paths: RunPaths) -> None:
    begun = [False]
    with recording(make_config(), paths, _env(), 0, StopFlag(), has_begun=lambda: begun[0]):
        time.sleep(0.2)
        assert read_environment(paths, 0) is None
        begun[0] = True
        deadline = time.monotonic() + 30
        while read_environment(paths, 0) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert read_environment(paths, 0) is not None


def test_an_attempt_that_fails_before_it_leaves_one(paths: RunPaths) -> None:
    def fail() -> None:
        raise ValueError("the person's own")

    with (
        pytest.raises(ValueError, match="own"),
        recording(make_config(), paths, _env(), 0, StopFlag(), has_begun=lambda: False),
    ):
        fail()

    assert read_environment(paths, 0) is not None


def test_each_node_writes_once(paths: RunPaths) -> None:
    for rank in range(4):
        with recording(make_config(), paths, _env(rank), 0, StopFlag()):
            pass

    assert sorted(path.name for path in paths.logs.iterdir()) == [
        "attempt-000.environment.json", "attempt-000.environment.node-1.json",
    ]  # fmt: skip
    assert [each["node"] for each in nodes(paths, 0)] == ["n0", "n1"]


def test_what_cannot_be_recorded_harms_no_training(paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no facts")

    with recording(make_config(), paths, _env(), 0, StopFlag(), facts=broken):
        pass

    assert read_environment(paths, 0) is None
    assert "was not recorded: RuntimeError: no facts" in caplog.text


def test_the_same_process_differs_in_nothing_from_itself(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    was = _record(paths, facts=lambda: {"code": {"my_lab": "aa"}, "data": {"dataset": {"digest": "1"}}})
    now = _record(paths, facts=lambda: {"code": {"my_lab": "aa"}, "data": {"dataset": {"digest": "2"}}})

    assert [(each.kind, each.name) for each in differences(was, now)] == [("data", "dataset")]
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    again = _record(paths, facts=lambda: {"code": {"my_lab": "aa"}, "data": {"dataset": {"digest": "1"}}})
    assert [str(each) for each in differences(was, again)] == ["NCCL_ALGO Tree, was not there"]


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_a_stop_waits_for_no_record(paths: RunPaths, is_asked_before: bool) -> None:
    stop, go = StopFlag(), threading.Event()

    def facts() -> dict[str, Any]:
        go.wait(60)
        return {}

    with recording(make_config(), paths, _env(), 0, stop, facts=facts):
        if is_asked_before:
            stop.request("SIGTERM")
        else:
            threading.Timer(0.2, stop.request, ["SIGTERM"]).start()
        begin = time.monotonic()
    waited_s = time.monotonic() - begin
    go.set()

    assert waited_s < 5, "it waits for the record, 10 s"
    assert read_environment(paths, 0) is None


def test_a_long_word_that_nobody_committed_stops_no_training(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`re` holds the interpreter while it searches: what takes it long, stops each thread of the rank."""
    top = make_checkout(tmp_path / "project")
    write_files(top, {"my_lab/net.py": f"WEIGHTS = '{'a' * 200_000}'\n"})
    monkeypatch.syspath_prepend(top)
    config = make_config("model=custom", "model._target_=my_lab.net.Net")
    begun, longest_s = False, 0.0
    with recording(config, paths, _env(), 0, StopFlag(), has_begun=lambda: begun):
        begun, last = True, time.monotonic()
        while read_environment(paths, 0) is None and longest_s < 5:
            time.sleep(0.01)
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()

    assert longest_s < 5
    record = read_environment(paths, 0)
    assert record is not None
    assert "a" * 200_000 in record["code"]["checkouts"][0]["diff"]


# --- cluster.environment ---


def test_the_environment_is_recorded_with_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, project = tmp_path / "torch.sif", tmp_path / "project"
    image.write_text("an image")
    project.mkdir()
    (project / "uv.lock").write_text("version = 1\n")
    meta = tmp_path / "conda" / "conda-meta"
    meta.mkdir(parents=True)
    (meta / "python-3.11.4-h1.json").touch()
    versions = {"torch": "2.13.0", "numpy": "2.3.0"}
    assert environment_facts(EnvironmentConfig(), versions) == {}

    inside = EnvironmentConfig(container=Container.apptainer, image=str(image), uv=str(project))
    facts = environment_facts(inside, versions)
    assert facts["image_file"]["bytes"] == 8
    assert {len(facts[name]["sha256"]) for name in ("image_file", "lock_file")} == {64}
    assert len(facts["packages_sha256"]) == 64
    assert environment_facts(inside, {**versions, "numpy": "2.3.1"})["packages_sha256"] != facts["packages_sha256"]
    image.unlink()  # as where the container does not show it: the batch shell has told
    monkeypatch.setenv(IMAGE_FACTS, "8 1700000000")
    unseen = environment_facts(inside, versions)["image_file"]
    assert (unseen["bytes"], unseen["changed"], unseen["sha256"]) == (8, 1700000000, None)

    conda = environment_facts(EnvironmentConfig(conda=str(tmp_path / "conda")), versions)
    (meta / "numpy-2.3.0-h2.json").touch()
    assert environment_facts(EnvironmentConfig(conda=str(tmp_path / "conda")), versions) != conda
    monkeypatch.setenv(STAGE_KEY, "5-6")
    staged = environment_facts(EnvironmentConfig(stage="/lab/train.tar"), versions)["stage"]
    assert staged == {"path": "/lab/train.tar", "facts": "5-6", "copy": None, "sha256": None}


def test_another_image_or_lock_file_is_a_difference(paths: RunPaths) -> None:
    was = _record(paths)
    environment = {"image": "a.sif", "image_file": {"bytes": 1, "changed": 2}, "lock_file": {"sha256": "x"}}
    now = {**was, "environment": environment}
    later = {**was, "environment": {**environment, "image_file": {"bytes": 1, "changed": 3}}}
    assert {difference.name for difference in differences(was, now)} == {"image", "uv.lock"}
    assert [difference.name for difference in differences(now, later)] == ["image"]
