"""Distribution of pieces over processes: one process makes a piece, and no process outlives its parent.

python -m hpc_trainer.data.prepare.pool      one process: reads pieces, each with its maker, as lines of JSON
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
from hpc_trainer.runtime.start import start_words
from hpc_trainer.runtime.torch_process import answering, error_of, told_error

Tell = Callable[[int], None]
"""Callback that takes the newly finished part of a piece, in the unit of its `amount`."""
_MAKERS = "hpc_trainer.data.prepare."
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Unit of work of one process, atomic. `items` are JSON values; `amount` is the total that `tell` counts."""

    name: str
    items: list[Any]
    amount: int


class Maker(Protocol):
    """Interface of a maker: a dataclass of JSON values in this package, because it is sent to other processes."""

    def make(self, piece: Piece, tell: Tell) -> None:
        """Make a piece and write it."""


def over_processes(maker: Maker, pieces: Sequence[Piece], num_workers: int, tell: Tell) -> Iterator[Piece]:
    """Make all pieces, `num_workers` at a time (1: in this process), and yield each complete piece.

    Args:
        maker: makes one piece.
        pieces: the pieces.
        num_workers: number of processes, at least 1.
        tell: called with the newly finished amount from time to time.

    Raises:
        RunStateError: a process was killed. Otherwise the error that `make` raised.
    """
    num_workers = min(num_workers, len(pieces))
    if num_workers <= 1:
        for piece in pieces:
            maker.make(piece, tell)
            yield piece
        return
    name = f"{type(maker).__module__}.{type(maker).__name__}"
    request = {"maker": name, "values": asdict(maker)}  # type: ignore[call-overload]
    command = [sys.executable, *start_words("hpc_trainer.data.prepare.pool")]
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
            _have_made(process, {**request, "piece": asdict(piece)}, tell_one)
        finally:
            free.put(process)  # also a process that has ended, so that no thread waits for it for ever
        return piece

    try:
        with ThreadPoolExecutor(num_workers) as threads:
            try:
                for future in as_completed([threads.submit(make, piece) for piece in pieces]):
                    yield future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.kill()  # an unfinished file has a temporary name
    finally:
        for process in processes:
            with contextlib.suppress(OSError), process:  # closes the pipes, in which the last request may still be
                process.wait()


def _have_made(process: Any, request: dict[str, Any], tell: Tell) -> None:
    """Let one process make a piece, and raise the error that the process reports."""
    try:
        process.stdin.write(json.dumps(request) + "\n")
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
        "Use fewer --workers, then run the same command again."
    )


def main() -> None:
    """Make the pieces that standard input asks for, a line each, until it ends. This process is one of a pool."""
    with answering() as say:
        for line in sys.stdin:
            request = json.loads(line)
            module, _, name = request["maker"].rpartition(".")
            assert module.startswith(_MAKERS)
            try:
                maker: Maker = getattr(importlib.import_module(module), name)(**request["values"])
                maker.make(Piece(**request["piece"]), lambda count: say({"told": count}))
                answer: dict[str, Any] = {"done": True}
            except Exception as error:
                answer = told_error(error)
            say(answer)


if __name__ == "__main__":
    main()
