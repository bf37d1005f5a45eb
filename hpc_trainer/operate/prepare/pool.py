"""Pieces over processes: each piece is made by one of them, and none outlives the one that asked.

python -m hpc_trainer.operate.prepare.pool      one process: reads pieces, each with its maker, as lines of JSON
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
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    name = f"{type(maker).__module__}.{type(maker).__name__}"
    asked = {"maker": name, "values": asdict(maker)}  # type: ignore[call-overload]
    command = [sys.executable, *start_words("hpc_trainer.operate.prepare.pool")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num_workers)
    ]
    free, one_at_a_time = queue.SimpleQueue[Any](), threading.Lock()
    for process in processes:
        free.put(process)

    def tell_one(count: int) -> None:
        with one_at_a_time:
            tell(count)

    def make(piece: Piece) -> Piece:
        process = free.get()
        try:
            _have_made(process, {**asked, "piece": asdict(piece)}, tell_one)
        finally:
            free.put(process)  # also one that has ended: nobody waits for it for ever
        return piece

    try:
        with ThreadPoolExecutor(num_workers) as threads:
            try:
                for future in as_completed([threads.submit(make, piece) for piece in pieces]):
                    yield future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.kill()  # what it was writing has a temporary name
    finally:
        for process in processes:
            with contextlib.suppress(OSError), process:  # closes its pipes; what it was sent last may stand in one
                process.wait()


def _have_made(process: Any, asked: dict[str, Any], tell: Tell) -> None:
    """Has one process make a piece. Raises what it answers."""
    try:
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        while "told" in (answer := json.loads(process.stdout.readline())):
            tell(answer["told"])
    except (OSError, ValueError) as error:  # a pipe without a reader, an answer cut off
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
        if process.returncode is None:
            raise
        raise _ended(process.returncode) from error
    if "error" in answer:
        raise error_of(answer)


def _ended(code: int) -> RunStateError:
    return RunStateError(
        f"a process that made a piece has ended with exit code {code}. Pieces that are done stay. Was the memory full? "
        "Use fewer --workers, then give the same command again."
    )


def main() -> None:
    """One process: makes what it is sent until nobody asks any more."""
    with answering() as say:
        for line in sys.stdin:
            asked = json.loads(line)
            module, _, name = asked["maker"].rpartition(".")
            assert module.startswith(_MAKERS)
            try:
                maker: Maker = getattr(importlib.import_module(module), name)(**asked["values"])
                maker.make(Piece(**asked["piece"]), lambda count: say({"told": count}))
                answer: dict[str, Any] = {"done": True}
            except Exception as error:
                answer = told_error(error)
            say(answer)


if __name__ == "__main__":
    main()
