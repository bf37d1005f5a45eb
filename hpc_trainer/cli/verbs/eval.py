"""`hpc-trainer eval` and `predict`: what a run's model, or an exported one, says of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import print_json
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.operate.deploy.ask_model import Target, evaluate, predict


def run_eval(target: Target, *, as_json: bool) -> None:
    """Prints the metrics."""
    told = evaluate(target)
    if as_json:
        print_json(told)
        return
    print(as_typed(f"{_what(told)}, on {told['num_samples']} samples of data={told['data']} ({told['device']}):"))
    for name, value in told["metrics"].items():
        print(as_typed(f"  {name}={value:.6g}"))
    _notes(told)


def run_predict(target: Target, output: Path, *, as_json: bool) -> None:
    """Writes the file and says what is in it."""
    told = predict(target, output)
    if as_json:
        print_json(told)
        return
    print(as_typed(f"{_what(told)}: {told['num_samples']} predictions on data={told['data']} ({told['device']})."))
    print(as_typed(f"  {told['output']}: {', '.join(told['keys'])}"))
    _notes(told)


def _what(told: dict[str, Any]) -> str:
    whose = "" if told["folder"] is None else f", exported to {told['folder']}"
    averaged = ", averaged weights" if told["weights"] == "average" else ""
    return f"{told['run_id']}, step {told['step']}{averaged}{whose}"


def _notes(told: dict[str, Any]) -> None:
    for note in told["notes"]:
        print(as_typed(f"Note: {note}"))
