"""data prepare, killed by SIGKILL at any place: what a reader finds is whole or refused, and the end is the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from hpc_trainer.data.images.index import damaged_shards, read_index
from hpc_trainer.data.prepare.images import ImageMaker
from hpc_trainer.data.prepare.pool import Piece, over_processes
from hpc_trainer.data.tokens.files import check_tokens
from hpc_trainer.errors import DataError, RunStateError
from tests import warm
from tests.seeds import chosen_seed
from tests.unit.data.prepare.raw_data import content, raw_pictures

# Prepares, and kills itself before the k-th thing that it does to a file of the folder. Prints how many there were.
_PROGRAM = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    from hpc_trainer.data.prepare import images, tokens
    from hpc_trainer.data.prepare.job import Settings

    kind, source, folder, last, size, fresh = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6] == "fresh"
    images._SMALLEST_MIB, tokens._PIECE = 0.004, 200
    count = 0

    def see(event, args):
        global count
        if event in ("open", "os.rename", "os.remove", "os.link", "os.mkdir") and str(args[0]).startswith(folder):
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)
    if kind == "images":
        options = images.ImageOptions(size=size, eval_fraction=0.3)
        images.prepare_images(Path(source), Path(folder), options, Settings(fresh=fresh), lambda *_: None)
    else:
        options = tokens.TokenOptions(document="line", eval_fraction=0.3)
        tokens.prepare_tokens([source], Path(folder), options, Settings(), lambda *_: None)
    print(count)
    """
)


_ROUNDS = 2


def _start(
    kind: str, source: Path, folder: Path, last: int, size: int = 16, fresh: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM, kind, str(source), str(folder), str(last), str(size), fresh]
    done: subprocess.CompletedProcess[str] = warm.run(command, text=True, timeout=120)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done


def _is_whole(kind: str, folder: Path) -> bool:
    """As readers see a part: False where they refuse it. What they take must be undamaged."""
    try:
        if kind == "tokens":
            check_tokens(folder)
            return True
        index = read_index(folder)
    except DataError:
        return False
    assert list(damaged_shards(index)) == []
    return True


def _of_part(found: dict[str, str], part: str) -> dict[str, str]:
    return {name: sha for name, sha in found.items() if name.startswith(f"{part}/") and not name.endswith(".tmp")}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_killed_anywhere_and_called_again_the_folder_is_the_same(kind: str, tmp_path: Path) -> None:
    chance = random.Random(chosen_seed())
    raw = tmp_path / "raw"
    if kind == "images":
        raw_pictures(raw)
    else:
        raw.mkdir()
        for index in range(5):
            (raw / f"{index}.txt").write_text("".join(f"{chance.random()}\n" for _ in range(10)))
    wanted_folder = tmp_path / "undisturbed"
    places = int(_start(kind, raw, wanted_folder, 0).stdout)
    wanted = content(wanted_folder)
    assert places > 40
    kills = 0
    for number in range(_ROUNDS):
        folder = tmp_path / f"killed-{number}"
        # First in each half of what there is to do, the end among them; then while that is gone on with; then not.
        begin, stop = places * number // _ROUNDS, places * (number + 1) // _ROUNDS
        for last in (chance.randint(begin + 1, stop), chance.randint(1, places // 2), 0):
            died = _start(kind, raw, folder, last)
            kills += died.returncode != 0
            for part in ("train", "eval"):
                if _is_whole(kind, folder / part):
                    assert _of_part(content(folder), part) == _of_part(wanted, part)
        assert content(folder) == wanted
    assert kills > _ROUNDS
    print(f"{kind}: {kills} kills at {places} places")


@pytest.mark.long
def test_killed_while_all_is_made_anew(tmp_path: Path) -> None:
    chance = random.Random(chosen_seed())
    raw, folder = raw_pictures(tmp_path / "raw"), tmp_path / "out"
    _start("images", raw, tmp_path / "undisturbed", 0)
    _start("images", raw, folder, 0, size=20)
    taken_away = len(content(folder))
    for last in (taken_away // 3, chance.randint(1, taken_away), chance.randint(1, taken_away)):
        assert _start("images", raw, folder, last, fresh="fresh").returncode == -signal.SIGKILL
        for part in ("train", "eval"):
            _is_whole("images", folder / part)  # the old one, or refused
    _start("images", raw, folder, 0, fresh="fresh")
    assert content(folder) == content(tmp_path / "undisturbed")


def _waiting_pieces(folder: Path) -> tuple[ImageMaker, list[Piece]]:
    """Pieces of one picture, a pipe: who reads it waits until somebody opens its other end."""
    (folder / "raw" / "cat").mkdir(parents=True)
    os.mkfifo(folder / "raw" / "cat" / "pipe.jpg")
    for name in ("train", ".pieces"):
        (folder / "out" / name).mkdir(parents=True)
    maker = ImageMaker(folder=str(folder / "out"), source=str(folder / "raw"), size=16, format="jpg", quality=90)
    return maker, [Piece(name=f"train-{n:06d}", items=[["cat/pipe.jpg", 0]], amount=1) for n in range(2)]


def _workers_of(pid: int, wanted: int) -> list[psutil.Process]:
    """Processes that make pieces, once there are so many."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(pid).children(recursive=True)
            workers = [each for each in found if each.cmdline()[-1:] == ["hpc_trainer.data.prepare.pool"]]
            if len(workers) == wanted:
                return workers
        time.sleep(0.02)
    raise AssertionError("there are no processes that make pieces")


def test_a_killed_process_is_told_and_the_others_end(tmp_path: Path) -> None:
    maker, pieces = _waiting_pieces(tmp_path)
    killed: list[psutil.Process] = []

    def kill() -> None:
        killed.extend(_workers_of(os.getpid(), 2))
        killed[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RunStateError, match=r"ended with exit code -9.*fewer --workers"):
        list(over_processes(maker, pieces, 2, lambda _: None))
    killer.join()
    assert len(killed) == 2
    assert not any(each.is_running() for each in killed)
    assert list((tmp_path / "out").rglob("*.json")) == [], "no piece counts as made"


def test_processes_end_with_the_one_that_was_killed(tmp_path: Path) -> None:
    _waiting_pieces(tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom hpc_trainer.data.prepare.images import ImageMaker\n"
        "from hpc_trainer.data.prepare.pool import Piece, over_processes\n"
        "folder = sys.argv[1]\n"
        "maker = ImageMaker(folder=f'{folder}/out', source=f'{folder}/raw', size=16, format='jpg', quality=90)\n"
        "pieces = [Piece(name=f'train-{n:06d}', items=[['cat/pipe.jpg', 0]], amount=1) for n in range(2)]\n"
        "list(over_processes(maker, pieces, 2, lambda _: None))\n"
    )
    with warm.Popen([sys.executable, "-c", code, str(tmp_path)]) as asking:
        workers = _workers_of(asking.pid, 2)
        asking.kill()
    deadline = time.monotonic() + 60
    while any(each.is_running() for each in workers) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # nobody reads it now
            os.close(os.open(tmp_path / "raw" / "cat" / "pipe.jpg", os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(0.02)
    assert not any(each.is_running() for each in workers)
