"""What quota commands answer, played by scripts that print what their manual pages show."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_trainer.runtime import disk_room
from hpc_trainer.runtime.disk_room import QuotaWatch, Room, read_answer
from hpc_trainer.runtime.rank_group import RankGroup
from hpc_trainer.training.checkpoint.store import CheckpointStore
from tests.unit.training.checkpoint.test_disk_faults import save

QUOTA = """Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/sda1     100       0       0       0      10       0       0       0
 server:/export   {used}    2000    3000       0     4*       3      5       0
"""
LUSTRE = """/lustre/a/very/long/path/that/is/wrapped
                  51200       0  102400       -       4       0       0       -
"""


def test_the_row_of_the_file_system_counts() -> None:
    assert read_answer(QUOTA.format(used="1000"), "server:/export") == Room(2000 * 1024, 1)
    assert read_answer(QUOTA.format(used="3500*"), "server:/export") == Room(0, 1)
    assert read_answer(QUOTA.format(used="1000"), "/dev/sda1") == Room(None, None)


def test_lustre_wraps_long_paths() -> None:
    assert read_answer(LUSTRE, "10.0.0.1@tcp:/lustre") == Room(51200 * 1024, None)


@pytest.mark.parametrize(
    "text", ["", "Disk quotas for user ada (uid 1000): none\n", "a b c d e f g h i", "quota: \x00\n"]
)
def test_what_cannot_be_read_is_no_limit(text: str) -> None:
    assert read_answer(text, "/dev/sda1") == Room(None, None)


def test_a_quota_that_has_no_room_is_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save asks; the next one knows."""
    command = tmp_path / "bin" / "lfs"
    command.parent.mkdir()
    command.write_text(
        f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\ncat <<'END'\n{LUSTRE.replace('51200', '102400*')}END\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    monkeypatch.setattr(disk_room, "_mount_of", lambda folder: ("lustre", "10.0.0.1@tcp:/lustre"))
    warned: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", group=RankGroup(), keep_last=1, attempt=0, warn=warned.append)
    for step in range(1, 100):
        assert save(store, step, is_background=True) is None, "it is tried all the same"
        if warned:
            break
        time.sleep(0.1)
    assert warned[0].startswith("WARNING: your quota lacks room for 0.0 of its 0.0 MB: the checkpoint of step ")
    assert (tmp_path / "asked").read_text().startswith("quota -q -u ")


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "quota"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(disk_room, "_MAX_ANSWER_S", 0.0)
    watch = QuotaWatch(tmp_path)
    asked = None
    for _ in range(200):
        assert watch.room() == Room(None, None)
        asked = asked or watch._asked
        if asked is not None and asked.returncode is not None:
            break
        time.sleep(0.05)
    assert asked is not None
    assert asked.returncode == -9
