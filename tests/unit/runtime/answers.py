"""Program of test_own_process.py: answers well, raises, dies, hangs."""

import os
import signal
import sys
import time
from typing import Any

from hpc_trainer.runtime.own_process import answer_each


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    print("printed by the user's code")
    os.write(1, b"and by a library\n")
    if asked["how"] == "raises":
        raise KeyError("weights")
    if asked["how"] == "exits":
        sys.exit(3)
    if asked["how"] == "leaves":
        os._exit(4)
    if asked["how"] == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if asked["how"] == "kills the other end":
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    if asked["how"] == "hangs":
        time.sleep(600)
    return {"found": asked["how"], "server": os.getppid()}


if __name__ == "__main__":
    answer_each(_answer)
