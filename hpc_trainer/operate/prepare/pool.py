"""Pieces over processes: each piece is made by one of them, and none outlives the one that asked.

python -m hpc_trainer.operate.prepare.pool      one process: reads a maker, then pieces, as lines of JSON
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from hpc_trainer.errors import RunStateError
from hpc_trainer.operate.torch_process import error_of
from hpc_trainer.runtime.start import start_words
from hpc_trainer.worker.answer import answering, told_error

Tell = Callable[[int], None]
"""Says how much more of a piece is done, in the unit of its `amount`."""
_MAKERS = "hpc_trainer.operate.prepare."
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one process makes at a time, whole or not at all. `items`: of JSON; `amount`: what `tell` counts, in all."""

    name: str
    items: list[Any]
    amount: int


class Maker(Protocol):
    """A dataclass of JSON values in a module of this package: it is sent to other processes."""

    def make(self, piece: Piece, tell: Tell) -> None:
        """Makes a piece and writes it."""


def over_processes(maker: Maker, pieces: Sequence[Piece], num_workers: int, tell: Tell) -> Iterator[Piece]:
    """Makes all pieces, `num_workers` at a time, and yields each when it is done. One worker is this process itself.

    Args:
        tell: is told how much is done, from time to time.

    Raises:
        RunStateError: a process was killed. Else what `make` raised.
    """
    num_workers = min(num_workers, len(pieces))
    if num_workers <= 1:
        for piece in pieces:
            maker.make(piece, tell)
            yield piece
        return
    said: queue.Queue[int | Piece | Exception] = queue.Queue()
    left = _Left(pieces)
    command = [sys.executable, *start_words("hpc_trainer.operate.prepare.pool")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num_workers)
    ]
    threads = [threading.Thread(target=_drive, args=(each, maker, left, said), daemon=True) for each in processes]
    try:
        for thread in threads:
            thread.start()
        num_left = len(pieces)
        while num_left:
            news = said.get()
            if isinstance(news, Exception):
                raise news
            if isinstance(news, int):
                tell(news)
                continue
            num_left -= 1
            yield news
    finally:
        for process in processes:
            process.kill()  # what it was writing has a temporary name
        for process, thread in zip(processes, threads, strict=True):
            if thread.ident is not None:
                thread.join()
            with contextlib.suppress(OSError), process:  # closes its pipes; what it was sent last may stand in one
                process.wait()


class _Left:
    """The pieces that nobody has taken yet."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces, self._lock = iter(pieces), threading.Lock()

    def take(self) -> Piece | None:
        with self._lock:
            return next(self._pieces, None)


def _drive(process: Any, maker: Maker, left: _Left, said: queue.Queue[int | Piece | Exception]) -> None:
    """Hands pieces to one process, one after the other, and puts into `said` what it answers."""
    try:
        _send(process, {"maker": f"{type(maker).__module__}.{type(maker).__name__}", "values": asdict(maker)})  # type: ignore[call-overload]
        while (piece := left.take()) is not None:
            _send(process, asdict(piece))
            while "told" in (answer := json.loads(process.stdout.readline())):
                said.put(answer["told"])
            if "error" in answer:
                said.put(error_of(answer))
                return
            said.put(piece)
    except (OSError, ValueError) as error:  # a pipe without a reader, an answer cut off
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
        said.put(error if process.returncode is None else _ended(process.returncode))


def _ended(code: int) -> RunStateError:
    return RunStateError(
        f"a process that made a piece has ended with exit code {code}. Pieces that are done stay. Was the memory full? "
        "Use fewer --workers, then give the same command again."
    )


def _send(process: Any, value: Any) -> None:
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def main() -> None:
    """One process: makes what it is sent until nobody asks any more."""
    with answering() as say:
        asked = json.loads(sys.stdin.readline() or "null")
        if asked is None:
            return
        module, _, name = asked["maker"].rpartition(".")
        assert module.startswith(_MAKERS)
        maker: Maker = getattr(importlib.import_module(module), name)(**asked["values"])
        for line in sys.stdin:
            try:
                maker.make(Piece(**json.loads(line)), lambda count: say({"told": count}))
                answer: dict[str, Any] = {"done": True}
            except Exception as error:
                answer = told_error(error)
            say(answer)


if __name__ == "__main__":
    main()
