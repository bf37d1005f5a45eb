"""The process with torch that `data check` and `data bench` ask.

python -m hpc_trainer.worker.data_reads.main < request.json     lines of JSON: how far it is, then the answer
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

from hpc_trainer.config.load import from_plain
from hpc_trainer.worker.data_reads.bench import bench
from hpc_trainer.worker.data_reads.check import check


def main() -> None:
    """Reads one request, and answers it or says which error it met."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked, which ends this one
    out = sys.stdout

    def say(line: dict[str, Any]) -> None:
        try:
            out.write(json.dumps(line) + "\n")
            out.flush()
        except OSError:  # the one that asked was killed: nobody wants the rest
            os._exit(1)

    with contextlib.redirect_stdout(sys.stderr):  # a person's own data set may print
        asked = json.loads(sys.stdin.read())
        verb, config = asked.pop("verb"), from_plain(asked.pop("config"))

        def tell(done: int, total: int) -> None:
            say({"told": [done, total]})

        try:
            say({"answer": (check if verb == "check" else bench)(config, tell=tell, **asked)})
        except Exception as error:
            say({"error": type(error).__name__, "message": str(error)})


if __name__ == "__main__":
    main()
