"""A profile against recorded clusters, line by line, and the verdicts on what ranks measured."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.cli.options import Given
from hpc_trainer.errors import ConfigError, MissingCommandError
from hpc_trainer.hardware import live_verbs, rank_probe
from hpc_trainer.hardware.check import (
    NOTE,
    OK,
    WRONG,
    Line,
    Measured,
    check_lines,
    measured_lines,
    read_ranks,
)
from hpc_trainer.hardware.live_verbs import _ranges as ranges
from hpc_trainer.hardware.live_verbs import package_index, run_check
from hpc_trainer.record.measured import measured_path, read_figures, read_measured, write_measured
from hpc_trainer.slurm.inventory import read_inventory
from hpc_trainer.slurm.shape import shape_of
from tests.composed import composed
from tests.unit.hardware.conftest import Recorded

Play = Callable[[str], Recorded]
FITTING = ("hardware.partition=gpu", "hardware.gpu_type=a100", "hardware.gpus_per_node=4", "hardware.cpus_per_gpu=16",
           "hardware.mem_gb_per_gpu=125", "hardware.time_limit_min=1440")  # fmt: skip


def _lines(*words: str) -> list[Line]:
    return check_lines(composed(["cluster=slurm", "hardware=gpu_x1", *words]), read_inventory())


def _wrong(*words: str) -> dict[str, str]:
    return {line.key: line.fix for line in _lines(*words) if line.verdict == WRONG}


def test_a_profile_that_fits_has_a_line_for_each_key(recorded: Play) -> None:
    recorded("mig")
    lines = _lines(*FITTING, "hardware.constraint=zen3", "hardware.qos=normal", "cluster.account=physics")
    assert [line.key for line in lines] == [
        "partition", "account", "qos", "constraint", "gpu_type", "gpus_per_node", "cpus", "memory", "num_nodes",
        "time_limit_min",
    ]  # fmt: skip
    assert {line.verdict for line in lines} == {OK}
    facts = {line.key: (line.asked, line.cluster) for line in lines}
    assert facts["cpus"] == ("4 × 16 = 64 a node", "64 a node")
    assert facts["memory"] == ("500 GB a node", "1007 GB a node")
    assert facts["gpus_per_node"] == ("4", "14 1g.5gb, 2/4 a100 a node")
    assert facts["time_limit_min"] == ("1440 min", "1440 min, the MaxWall of QOS normal")


@pytest.mark.parametrize(
    ("word", "key", "fix"),
    [
        ("hardware.partition=gpus", "partition", "Did you mean gpu?"),
        ("cluster.account=phyics", "account", "Did you mean physics?"),
        ("hardware.qos=lnog", "qos", "Did you mean long?"),
        ("hardware.constraint=zen4", "constraint", "Did you mean zen3?"),
        ("hardware.gpu_type=h100", "gpu_type", "There are: 1g.5gb, a100."),
        ("hardware.gpus_per_node=8", "gpus_per_node", "Use hardware.gpus_per_node=4"),
        ("hardware.cpus_per_gpu=17", "cpus", "Use hardware.cpus_per_gpu=16."),
        ("hardware.mem_gb_per_gpu=300", "memory", "Use hardware.mem_gb_per_gpu=251.7"),
        ("hardware.num_nodes=11", "num_nodes", "Use hardware.num_nodes=10."),
        ("hardware.time_limit_min=1441", "time_limit_min", "Use hardware.time_limit_min=1440"),
    ],
)  # fmt: skip
def test_each_wrong_key_has_its_line_and_its_fix(word: str, key: str, fix: str, recorded: Play) -> None:
    recorded("mig")
    wrong = _wrong(*FITTING, word)
    assert wrong.keys() == {key}
    assert fix in wrong[key]


def test_all_wrong_keys_are_found_at_once(recorded: Play) -> None:
    """The rules of a plan stop at the first node rule that is broken, and skip the nodes after any other problem."""
    recorded("mig")
    wrong = _wrong(
        *FITTING, "cluster.account=phyics", "hardware.qos=lnog", "hardware.constraint=zen4", "hardware.gpu_type=h100",
        "hardware.cpus_per_gpu=99", "hardware.mem_gb_per_gpu=9999", "hardware.num_nodes=999",
        "hardware.time_limit_min=99999",
    )  # fmt: skip
    assert wrong.keys() == {
        "account", "qos", "constraint", "gpu_type", "cpus", "memory", "num_nodes", "time_limit_min",
    }  # fmt: skip


def test_a_default_qos_and_a_default_account_that_the_partition_refuses(recorded: Play) -> None:
    recorded("qos_only")
    fix = _wrong("hardware.partition=gpu_regular", "cluster.account=m99_g", "hardware.mem_gb_per_gpu=null")["qos"]
    assert "your default QOS gpu_shared may not use this partition. Set one of: gpu_regular, gpu_premium." in fix
    recorded("capped")
    wrong = _wrong("hardware.partition=preempt-h100", "hardware.cpus_per_gpu=999")
    assert "cluster.account=teach may not use partition preempt-h100. Use cluster.account=ml." in wrong["account"]
    assert "cpus" in wrong


def test_what_slurm_does_not_refuse_is_noted(recorded: Play) -> None:
    recorded("mixed_nodes")
    assert "do not start now" in _wrong("hardware.partition=old")["state"]
    (service,) = (line for line in _lines("hardware.partition=broken") if line.key == "service")
    assert (service.verdict, service.cluster) == (NOTE, "0 of 2 are in service")
    notes = [line for line in _lines("hardware.partition=main") if line.verdict == NOTE]
    assert [(line.key, line.fix) for line in notes] == [
        ("gpu_type", "A run may get any of them. Set hardware.gpu_type=A100.")
    ]
    recorded("debian_22_05")
    (account,) = (line for line in _lines("cluster.account=someone_else", "hardware.mem_gb_per_gpu=1",
                                          "hardware.cpus_per_gpu=2") if line.verdict != OK)  # fmt: skip
    assert (account.key, account.verdict) == ("account", NOTE)


def test_a_profile_of_another_cluster_says_so(recorded: Play) -> None:
    recorded("mig")
    (line,) = (line for line in _lines(*FITTING, "cluster.name=perlmutter") if line.key == "cluster")
    assert (line.verdict, line.cluster) == (NOTE, "campus")
    assert "The profile is for perlmutter, and Slurm here is campus" in line.fix


def test_a_file_that_names_itself_otherwise_is_noted(recorded: Play) -> None:
    recorded("mig")
    config = composed(["hardware=gpu_x1", *FITTING])
    (line,) = (line for line in check_lines(config, read_inventory(), "lab/copy") if line.key == "name")
    assert (line.asked, line.verdict) == ("gpu_x1", NOTE)
    assert line.fix.endswith("Write name: lab/copy.")
    assert "name" not in {line.key for line in check_lines(config, read_inventory(), "gpu_x1")}


def test_the_verb_exits_with_1_if_a_line_is_wrong(
    recorded: Play, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded("mig")
    monkeypatch.chdir(tmp_path)
    given = Given(["hardware.partition=gpu", "cluster=slurm"], None, None)
    run_check("gpu_x2", given, runs=False, internet=True, timeout_s=1, as_json=False)
    said = capsys.readouterr().out
    assert "gpu_x2 on campus, Slurm 23.11.10" in said
    assert "hardware check gpu_x2 hardware.partition=gpu cluster=slurm --run" in said
    given = dataclasses.replace(given, overrides=[*given.overrides, "hardware.cpus_per_gpu=99"])
    with pytest.raises(SystemExit) as ended:
        run_check("gpu_x2", given, runs=True, internet=True, timeout_s=1, as_json=True)
    assert ended.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert [line["key"] for line in told["lines"] if line["verdict"] == "wrong"] == ["cpus"]
    assert told["measured"] is None, "no job for a profile that does not fit"
    with pytest.raises(ConfigError, match="gpu_x3"):
        run_check("gpu_x3", Given([], None, None), runs=False, internet=True, timeout_s=1, as_json=False)


@pytest.mark.usefixtures("no_slurm")
def test_no_slurm_at_all() -> None:
    with pytest.raises(MissingCommandError, match="login node"):
        run_check("gpu_x1", Given([], None, None), runs=False, internet=True, timeout_s=1, as_json=False)


# --- what ranks measure ---


def _rank(rank: int, **other: Any) -> dict[str, Any]:
    local, node = rank % 2, f"n{rank // 2}"
    reduce = {"ranks": 2, "latency_s": 1e-5, "bus_bps": 1e11}
    return {
        "rank": rank, "local_rank": local, "node": node, "host": node, "machine": "x86_64", "torch": "2.13.0",
        "cpus": list(range(8 * local, 8 * local + 8)), "numa": [local], "gpu": "NVIDIA H100",
        "gpu_uuid": f"{node}-{local}",
        "gpu_numa": local, "clock_s": 0.25, "import_s": 2.0, "rendezvous_s": 0.5, "reduce_node": reduce,
        "is_whole": True,
        **({"write_bps": 1e9 + rank, "internet": True} if local == 0 else {}), **other,
    }  # fmt: skip


def _verdicts(*changed: dict[str, Any], is_gpu: bool = True) -> dict[str, Line]:
    ranks = {rank: _rank(rank) for rank in range(4)} | {one["rank"]: one for one in changed}
    kept = tuple(rank for rank in ranks.values() if not rank.get("is_lost"))
    measured = Measured(ranks=kept, world_size=4, login_clock_s=0.2, filesystem="nfs4")
    shape = shape_of(composed(["cluster=slurm", "hardware=gpu_x2", "hardware.num_nodes=2"]))
    return {line.key: line for line in measured_lines(measured, shape, is_gpu=is_gpu)}


def test_all_is_well() -> None:
    lines = _verdicts()
    assert {key: line.verdict for key, line in lines.items()} == dict.fromkeys(
        ["ranks", "GPUs", "CPUs", "clocks", "internet"], OK
    )
    assert lines["clocks"].cluster == "+0.050 s at most"


@pytest.mark.parametrize(
    ("changed", "key", "verdict", "words"),
    [
        ({"rank": 3, "is_lost": True}, "ranks", WRONG, "logs of the job"),
        ({"rank": 3, "is_whole": False}, "ranks", WRONG, "logs of the job"),
        ({"rank": 3, "gpu_uuid": "n1-0"}, "GPUs", WRONG, "two ranks on n1 have one GPU"),
        ({"rank": 1, "gpu_problem": "torch sees no GPU"}, "GPUs", WRONG, "rank 1 on n0: torch sees no GPU"),
        ({"rank": 1, "gpu_numa": 3}, "NUMA", NOTE, "Rank 1 has CPUs of NUMA [1], its GPU is at 3"),
        ({"rank": 1, "cpus": [8, 9]}, "CPUs", WRONG, "fewer CPUs"),
        ({"rank": 1, "cpus": list(range(8))}, "CPUs", NOTE, "does not bind ranks"),
        ({"rank": 2, "clock_s": 9.0}, "clocks", WRONG, "clock is wrong"),
        ({"rank": 2, "internet": False}, "internet", NOTE, "HF_HUB_OFFLINE=1"),
    ],
)
def test_what_is_wrong_with_ranks(changed: dict[str, Any], key: str, verdict: str, words: str) -> None:
    others = [_rank(3, clock_s=9.0)] if key == "clocks" else []
    line = _verdicts({**_rank(changed["rank"]), **changed}, *others)[key]
    assert line.verdict == verdict
    assert words in line.fix


def test_the_document_of_what_was_measured() -> None:
    slow = {"ranks": 2, "latency_s": 3e-5, "bus_bps": 5e10}
    ranks = (_rank(0), _rank(1, reduce_node=slow), _rank(2, internet=False), _rank(3, clock_s=None))
    told = Measured(ranks=ranks, world_size=4, login_clock_s=None, filesystem="lustre").to_json()
    assert told["all_reduce"] == {"node": {"ranks": 2, "latency_s": 3e-5, "bus_bytes_per_s": 5e10}}
    assert told["write_bytes_per_s"] == {"slowest_node": 1e9, "sum": 2e9 + 2}
    assert told["has_internet"] is False
    assert told["clock_offset_s"] == {"n0": None, "n1": None}


def test_figures_are_kept_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert read_measured("zoo", "zoo/main_x4") is None
    path = write_measured("zoo", "zoo/main_x4", {"world_size": 4})
    assert (
        path
        == tmp_path / "hpc_trainer" / "hardware" / "zoo" / "zoo__main_x4.json"
        == measured_path("zoo", "zoo/main_x4")
    )
    assert read_measured("zoo", "zoo/main_x4") == {"world_size": 4}
    path.write_text('{"world')
    assert read_measured("zoo", "zoo/main_x4") is None


def test_two_names_of_one_profile_keep_their_figures_in_one_place(
    recorded: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded("mig")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site" / "hardware" / "lab").mkdir(parents=True)
    copy = tmp_path / "site" / "hardware" / "lab" / "copy.yaml"
    copy.write_text("# A copy.\ndefaults:\n  - /hardware/gpu_x1@_here_\n  - _self_\n")
    ranks = (_rank(0),)
    monkeypatch.setattr(  # the job itself runs in tests/slurm/test_hardware.py
        live_verbs, "_run_probe", lambda *_, **__: Measured(ranks=ranks, world_size=1, login_clock_s=0.2, filesystem="")
    )
    given = Given(["hardware.partition=gpu", "cluster=slurm"], [tmp_path / "site"], None)
    for typed in ("lab/copy", "gpu_x1"):
        run_check(typed, given, runs=True, internet=True, timeout_s=1, as_json=True)
    (kept,) = (tmp_path / "state").rglob("*.json")
    assert kept == measured_path("campus", "gpu_x1"), "by the name that plan and advise look for"
    figures = read_figures("campus", composed(["hardware=gpu_x1"]).hardware.name)
    assert figures is not None
    assert figures.source.startswith("hardware check gpu_x1 --run")


def test_records_of_ranks_that_wrote_none_are_missing(tmp_path: Path) -> None:
    (tmp_path / "rank-2.json").write_text(json.dumps({"rank": 2}))
    assert read_ranks(tmp_path, 4) == ({"rank": 2},)


def test_the_parts_of_the_program_that_need_no_torch(tmp_path: Path) -> None:
    found = rank_probe.place()
    assert found["cpus"] == sorted(os.sched_getaffinity(0))
    assert found["node"] == socket.gethostname()
    offset = rank_probe.clock_against_server(tmp_path / ".clock")
    assert offset is not None
    assert abs(offset) < 5
    assert rank_probe.filesystem_of(tmp_path) not in ("", "proc")
    assert rank_probe.filesystem_of(Path("/proc/self")) == "proc"
    speed = rank_probe.write_speed(tmp_path / ".write", 1 << 20)
    assert speed is not None
    assert speed > 0
    assert rank_probe.write_speed(tmp_path / "missing" / ".write", 1 << 20) is None
    assert list(tmp_path.iterdir()) == []


def test_a_connection_is_made_or_refused_within_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert rank_probe.can_connect(f"127.0.0.1:{port}")
    began = time.monotonic()
    assert not rank_probe.can_connect(f"127.0.0.1:{port}")
    assert not rank_probe.can_connect("no.such.host.invalid:443")
    assert time.monotonic() - began < 30


def test_the_package_index_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    assert package_index() == "example.com:443"
    monkeypatch.setenv("PIP_INDEX_URL", "http://mirror.campus:8080/simple")
    assert package_index() == "mirror.campus:8080"
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.campus/simple")
    assert package_index() == "mirror.campus:443"


def test_ranges() -> None:
    assert [ranges(numbers) for numbers in ([], [3], [0, 1, 2, 3, 8], [1, 3, 4])] == ["-", "3", "0-3,8", "1,3-4"]
