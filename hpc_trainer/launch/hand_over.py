"""One job to sbatch: its script, the reply, and what submissions.jsonl records of it. Killed anywhere, it is found."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_trainer.errors import SlurmError, SubmitError
from hpc_trainer.launch.script import ScriptRequest
from hpc_trainer.launch.settle import look_once, script_path
from hpc_trainer.runs.files import write_atomic
from hpc_trainer.runs.layout import SweepPaths
from hpc_trainer.runs.spec import Shape
from hpc_trainer.slurm.queue import find_ended, job_name
from hpc_trainer.slurm.sbatch import UnclearSubmitError, submit_script
from hpc_trainer.state.submissions import Book, Submission, write_confirmation, write_doubt, write_dropped


def make_request(
    paths: SweepPaths, uuid: str, shape: Shape, cluster: Mapping[str, Any], command: Sequence[str],
    num_elements: int | None = None, parallelism: int | None = None, exit_codes: tuple[tuple[int, int], ...] = (),
) -> ScriptRequest:  # fmt: skip
    """What the script of one submission holds.

    Args:
        cluster: the resolved `cluster` group of its runs.
        command: the words of one rank.
        num_elements: elements of the array; None for a single job.
        exit_codes: (ours, instead), where the site has taken ours.
    """
    return ScriptRequest(
        shape=shape,
        folder=paths.scripts,
        job_name=job_name(paths.name, uuid),
        uuid=uuid,
        num_elements=num_elements,
        array_parallelism=parallelism,
        setup=tuple(cluster["setup"]),
        srun_args=tuple(cluster["srun_args"]),
        command=tuple(command),
        exit_codes=exit_codes,
    )


def hand_over(
    paths: SweepPaths, intent: Submission, request: ScriptRequest, options: Sequence[str] = (), book: Book | None = None
) -> str:
    """Submits the job of an intent and returns its id; the reply, a refusal or a doubt is recorded.

    Args:
        options: of sbatch, besides what the script says.
        book: where the intent was written; None: in the sweep's submissions.jsonl.

    Raises:
        UnclearSubmitError: nobody knows whether it was accepted; a later command finds out.
        SubmitError: refused; NoRoomError if it may come in later.
    """
    from hpc_trainer.launch.submitit_bridge import render_script

    script, book = script_path(paths, intent.uuid), book or paths
    try:
        write_atomic(script, render_script(request), sync=False)
        job_id = submit_script(script, options=options)
    except UnclearSubmitError:
        # "Socket timed out" may come after the controller accepted, and it may accept minutes later: what is not
        # seen now stays in doubt, and a later command finds out.
        write_doubt(book, intent)
        found = None
        with contextlib.suppress(SlurmError):
            found = look_once(intent) or find_ended(paths.name, intent.uuid, intent.time)
        if found is None:
            raise
        job_id = found
    except SubmitError as error:
        write_dropped(book, intent, str(error))
        raise
    write_confirmation(book, intent, job_id)
    return job_id
