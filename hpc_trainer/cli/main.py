"""`hpc-trainer`: the verbs and their options. Imports nothing heavy: each verb brings what it needs."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Annotated

import typer

from hpc_trainer.cli.apps import checks, grids, model, runs
from hpc_trainer.cli.data.app import data
from hpc_trainer.cli.terminal import as_typed, visible_output
from hpc_trainer.errors import HpcTrainerError

app = typer.Typer(
    name="hpc-trainer",
    help="Submit grids of training runs to Slurm, or to this machine; they come back by themselves.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Start with: hpc-trainer train experiment=digits debug=smoke",
)


for each in (grids, runs, checks, model):
    app.add_typer(each.verbs)
app.add_typer(data)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Submit grids of training runs to Slurm, or to this machine; they come back by themselves."""
    if version:
        from hpc_trainer import __version__

        print(f"hpc-trainer {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: errors become one clear message and an exit code (0 success, 2 usage, 1 otherwise)."""
    # What 10,000 runs are made of stays to the end: to look for rubbish in it all the time took a sixth of submit.
    gc.set_threshold(100_000)
    with visible_output():
        _main()


def _main() -> None:
    try:
        app()
    except HpcTrainerError as error:
        _complain(error)
        sys.exit(2 if error.exit_code == 2 else 1)
    except KeyboardInterrupt:
        sys.exit(1)
    except BrokenPipeError:
        # `hpc-trainer logs | head`: the reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:  # a full disk, a read-only folder: the system's words say which and where
        _complain(error)
        sys.exit(1)
    except Exception:  # a fault of ours; what it says may hold anything
        traceback.print_exc()
        sys.exit(1)


def _complain(error: Exception) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return
    for line in str(error).splitlines():
        print(f"error: {as_typed(line)}", file=sys.stderr)


if __name__ == "__main__":
    main()
