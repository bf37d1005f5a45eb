"""`hpc-trainer eval` and `predict`: metrics and predictions of a run's model or of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_trainer.cli.common import print_json
from hpc_trainer.cli.terminal import as_typed
from hpc_trainer.deploy.evaluate import Target, evaluate, predict


def run_eval(target: Target, *, as_json: bool) -> None:
    """Evaluate the model and print its metrics."""
    result = evaluate(target)
    if as_json:
        print_json(result)
        return
    print(
        as_typed(f"{_what(result)}, on {result['num_samples']} samples of data={result['data']} ({result['device']}):")
    )
    for name, value in result["metrics"].items():
        print(as_typed(f"  {name}={value:.6g}"))
    _notes(result)


def run_predict(target: Target, output: Path, *, as_json: bool) -> None:
    """Write the file of predictions and print its contents."""
    result = predict(target, output)
    if as_json:
        print_json(result)
        return
    print(
        as_typed(f"{_what(result)}: {result['num_samples']} predictions on data={result['data']} ({result['device']}).")
    )
    print(as_typed(f"  {result['output']}: {', '.join(result['keys'])}"))
    _notes(result)


def _what(told: dict[str, Any]) -> str:
    whose = "" if told["folder"] is None else f", exported to {told['folder']}"
    averaged = ", averaged weights" if told["weights"] == "average" else ""
    return f"{told['run_id']}, step {told['step']}{averaged}{whose}"


def _notes(told: dict[str, Any]) -> None:
    for note in told["notes"]:
        print(as_typed(f"Note: {note}"))
