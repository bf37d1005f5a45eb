"""How many requests a command makes of the file server: counted where a server would count them.

docs/shared_folder.md gives the figures of longer plays.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hpc_trainer.runs.shared_folder import cache_age_s
from tests.shared_folder.clients import CALM, ROOT, Share
from tests.unit.runs.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm
from tests.unit.state.sweeps import SweepOnDisk

Start = Callable[..., tuple[Path, Path]]
_NUM_RUNS = 400
_LOOK = """\
import sys
from pathlib import Path
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.state.status import read_status

status = read_status(SweepPaths(Path(sys.argv[1])), is_look=True)
assert status.counts == {"COMPLETED": int(sys.argv[2])}, status.counts
"""


def metadata(requests: dict[str, int]) -> int:
    """Return the requests but those that carry the content of files."""
    return sum(count for name, count in requests.items() if name not in ("READ", "WRITE", "COMMIT"))


def test_a_status_asks_for_each_run_once_and_then_for_almost_none(tmp_path: Path) -> None:
    """At most 3 requests a run at first sight, and 0.1 later, from a client that remembers nothing."""
    with Share(tmp_path / "share", "nfs4", settings=CALM) as share:
        sweep = SweepOnDisk(share.backing / "runs" / "sweep", make_specs(_NUM_RUNS, "cluster=slurm"))
        slurm = FakeSlurm(tmp_path / "slurm")
        slurm.answer("squeue", "")
        slurm.answer("sacct", "")
        sweep.submit()
        for index in range(_NUM_RUNS):
            sweep.done(index)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{slurm.bin}:{os.environ['PATH']}"}
        counted = []
        for name in ("first", "second"):
            client = share.client(name)
            assert cache_age_s(client.mountpoint) == 60.0
            folder = client.mountpoint / "runs" / "sweep"
            subprocess.run([sys.executable, "-c", _LOOK, str(folder), str(_NUM_RUNS)], env=environment, check=True)
            counted.append(metadata(client.counts()["requests"]) / _NUM_RUNS)
        of_the_sweep = 20 / _NUM_RUNS  # its own files, whatever the number of its runs
        assert counted[0] <= 3.0 + of_the_sweep, counted
        assert counted[1] <= 0.1 + of_the_sweep, counted
