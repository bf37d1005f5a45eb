"""Does one thing that a verb asks for, in a process of its own, which has torch.

python -m hpc_trainer.worker.deploy.main < request.json     one JSON object is printed, the last line
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hpc_trainer.worker.deploy.ask_model import evaluate_model, predict
from hpc_trainer.worker.deploy.export import export

_VERBS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "export": export,
    "eval": evaluate_model,
    "predict": predict,
}


def main() -> None:
    """Prints what the verb returns, or the error, for the asking process to raise."""
    asked = json.load(sys.stdin)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch.export.load would unpickle what it cannot read otherwise
    with contextlib.redirect_stdout(sys.stderr):  # what others print
        try:
            answer = _VERBS[asked["verb"]](asked)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
