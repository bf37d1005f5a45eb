"""A disk that is full for a while: nothing can be written, not even that, and the run comes back all the same."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.slurm.scenarios.checks import References, check_completed
from tests.slurm.scenarios.scene import Scene
from tests.slurm.scenarios.table import ONE, scenario


@scenario(ONE)
def disk_full_at_a_stop_and_at_the_next_start(scene: Scene, references: References) -> None:
    """No room for the save of a stop, its failure and its end, nor for the next start; then somebody makes room."""
    with _small_disk(scene.driver.runs) as disk:
        scene.submit()
        scene.wait_for_step(60)
        _fill(disk)
        scene.signal("USR2")
        scene.wait_for_job("PENDING")
        scene.start_now()
        scene.wait_for(lambda: scene.slurm.job(scene.run.job_id)["Restarts"] == "2", "the second requeue")
        (disk / "filler").unlink()
        scene.come_back()
        check_completed(scene, references, [(None, "storage"), "done"])


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MB."""
    folder.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(disk: Path) -> None:
    """Until the kernel takes no byte more."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(b"x")
