"""data prepare as an array on a real Slurm: each job makes its pieces, and one of them finishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.data.images.index import damaged_shards, read_index
from tests.slurm.driver import Driver
from tests.slurm.testbed.cluster import SlurmCluster
from tests.unit.data.prepare.raw_data import content, picture


@pytest.mark.long
def test_an_array_makes_what_one_call_makes(slurm: SlurmCluster, tmp_path: Path) -> None:
    driver = Driver(slurm, tmp_path)
    for index in range(30):
        path = tmp_path / "raw {it's}" / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(index, (640, 480)).save(path, compress_level=0)  # 0.9 MB of noise
    words = ("data", "prepare", "images", "raw {it's}", "--format", "png", "--size", "480", "--shard-mib", "4")
    array = [each for word in ("cluster=testbed", "hardware=testbed_x1") for each in ("--slurm", word)]
    answer = driver.json(*words, "--to", "out", *array, "--parts", "3")
    assert answer["submitted"] == 3
    assert [each["runs"] for each in answer["arrays"]] == [3]
    assert len(driver.wait_for_states("prepare-out", "COMPLETED")) == 3
    again = driver.json(*words, "--to", "out")
    assert (again["is_whole"], again["num_made"]) == (True, 0)
    assert again["num_pieces"] >= 6, "each had some"
    assert driver.json(*words, "--to", "here")["is_whole"]
    assert content(tmp_path / "out") == content(tmp_path / "here")
    assert list(damaged_shards(read_index(tmp_path / "out" / "train"))) == []
