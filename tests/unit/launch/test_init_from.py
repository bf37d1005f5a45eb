"""`init_from` on a command line: its short form, the id of a run that begins with weights, what does not go with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.freeze import freeze_grid


def _file(path: Path, name: str, value: float = 1.0) -> Path:
    safetensors.numpy.save_file({name: np.full((2, 3), value, np.float32)}, path)
    return path


@pytest.mark.usefixtures("no_slurm")
def test_the_short_form_sweeps_and_the_id_is_that_of_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAINER_RUNS", str(tmp_path / "runs"))
    one, same = _file(tmp_path / "a.safetensors", "w"), _file(tmp_path / "b.safetensors", "w")
    other = _file(tmp_path / "c.safetensors", "w", value=2)
    plain = freeze_grid([]).specs[0].run_id
    assert freeze_grid(["init_from=null"]).specs[0].run_id == plain
    (short,) = freeze_grid([f"init_from={one}"]).specs
    assert short.config["init_from"]["path"] == str(one)
    assert short.run_id == freeze_grid([f"init_from.path={same}"]).specs[0].run_id != plain
    swept = freeze_grid([f"init_from={one},{other}", "seed=1,2"])
    assert len({spec.run_id for spec in swept.specs}) == 4
    assert swept.specs[0].axes["init_from.path"] == str(one)
    assert freeze_grid([f"init_from={one}", "init_from.exclude=[nothing]"]).specs[0].run_id != short.run_id
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no effect"):
        freeze_grid(["init_from.exclude=[head.*]"])
    for words, said in (
        (["train.main=my.main"], "init_from.path=.* does not go with train.main"),
        ([f"checkpoint.resume_from={run}"], "does not go with checkpoint.resume_from"),
        (["+init_from.rename={a.*:b}"], "both need the same number of"),
    ):
        with pytest.raises(ConfigError, match=said):
            freeze_grid([f"init_from={one}", *words], trust=["my"])
