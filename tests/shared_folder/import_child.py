"""Program of test_many_ranks.py: ranks of one node that start at the same moment from frozen code, and import of it.

`import_child.py NUM_RANKS ARCHIVE SAID PLACE`: each rank says what it has imported in SAID/RANK.json. PLACE is the
node's own disk, or `none`: then the code is unpacked beside the archive, on the shared folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from hpc_trainer.launch.frozen_code import unpacking
from hpc_trainer.launch.frozen_code.frozen_worker import use_frozen_code


def rank(number: int, archive: Path, said: Path, go: Path) -> None:
    """Unpack unless another rank has, import, and say from where."""
    os.environ["SLURM_LOCALID"] = str(number)
    while not go.exists():
        time.sleep(0.002)
    begin = time.monotonic()
    use_frozen_code(archive)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]
    found = importlib.import_module("my_lab.net")
    (said / f"{number}.new").write_text(
        json.dumps({"file": found.__file__, "value": found.WIDTH, "seconds": time.monotonic() - begin})
    )
    (said / f"{number}.new").rename(said / f"{number}.json")


def main(num_ranks: int, archive: Path, said: Path, place: str) -> None:
    unpacking.node_places = list if place == "none" else (lambda: [place])
    pids = []
    for number in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            try:
                rank(number, archive, said, said.parent / "go")
            except BaseException:
                (said / f"{number}.error").write_text(traceback.format_exc())
            finally:
                os._exit(0)
        pids.append(pid)
    (said / "ready").touch()
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
