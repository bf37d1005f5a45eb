"""`hpc-trainer profile`: use of time in some steps of a running run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_trainer.cli.common import print_json, say
from hpc_trainer.cli.given import resolve_runs_dir
from hpc_trainer.errors import ConfigError, RunStateError
from hpc_trainer.observe.ask_profile import RankProfile, ask_for_profile, await_profile
from hpc_trainer.observe.profile_request import ProfileRequest
from hpc_trainer.operate.find import select


def run_profile(
    name: str, sweep: str | None, runs_dir: Path | None, *, num_steps: int, ranks: str, timeout_s: float, wait: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Request a profile, wait for it if `wait`, and print each rank's figures and advice."""
    status, chosen = select(resolve_runs_dir(runs_dir), [name], sweep)
    if len(chosen) > 1:
        listed = ", ".join(chosen[:5])
        raise RunStateError(f"a profile is of one run, and {len(chosen)} fit {name}: {listed}. Name one.")
    run = status.run(chosen[0])
    asked = ask_for_profile(
        status.sweep, run, num_steps=num_steps, ranks=_ranks_of(ranks, run.spec.shape.world_size), timeout_s=timeout_s
    )
    if not wait:
        files = [status.sweep.run(run.run_id).profile_files(rank)[0] for rank in asked.ranks]
        if as_json:
            print_json(_json(run.run_id, asked, []))
        else:
            say(f"Asked {run.run_id}, at step {run.step}, for {num_steps} steps. It will write:")
            for file in files:
                say(f"  {file}")
        return
    tell = None if as_json else _to_stderr
    profiles = await_profile(status.sweep, run.run_id, asked, *([] if tell is None else [tell]))
    if as_json:
        print_json(_json(run.run_id, asked, profiles))
        return
    for index, profile in enumerate(profiles):
        say("\n".join(profile.answer.lines), "\n" if index else "")
        say(f"Table: {profile.table}\nTrace: {profile.trace} (chrome://tracing, or https://ui.perfetto.dev)")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ranks_of(words: str, world_size: int) -> list[int]:
    if words == "all":
        return list(range(world_size))
    try:
        return [int(word) for word in words.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ranks={words} must be ranks with commas between them, or all. Use --ranks=0.") from error


def _json(run_id: str, request: ProfileRequest, found: Sequence[RankProfile]) -> dict[str, object]:
    """Return the stable form of `profile --json` (docs/json.md)."""
    ranks = [
        {
            "rank": profile.rank, "table": str(profile.table), "trace": str(profile.trace),
            **{key: profile.answer.figures.get(key) for key in _FIGURES},
            "advice": [line.removeprefix("advice: ") for line in profile.answer.lines if line.startswith("advice: ")],
        }
        for profile in found
    ]  # fmt: skip
    return {"run_id": run_id, "asked": {"num_steps": request.num_steps, "ranks": [*request.ranks]}, "ranks": ranks}


_FIGURES = (
    "device", "first_step", "num_steps", "step_s", "data_wait_share", "idle_share", "between_share", "optimizer_share",
    "work", "peak_memory_share",
)  # fmt: skip
