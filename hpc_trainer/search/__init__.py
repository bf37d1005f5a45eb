"""Search: trials drawn from ranges of values, in place of the points of a grid, without a controller.

    space.py       dimensions of a search, and draws without a model
    samplers.py    a draw, given the known earlier trials; Optuna's samplers
    folder.py      search.json, the files of trials, and their outcomes
    next_run.py    choice of the next run: a promotion (ASHA, Hyperband) or a new trial
    define.py      a search from its command line, with all of its problems
    pool_runs.py   part of a rank's job: the trials that a slot of a pool takes
    commands.py    `plan` and `submit` of a search, its lines in `status`; verbs.py has `best`
    report.py      charts of a search for `report`

Only pool_runs.py may import torch; `search=gp` imports it where a trial is drawn.
"""

CONTRIBUTES = {
    "verbs": ("hpc_trainer.search.verbs:verbs",),
    "grid_kinds": ("hpc_trainer.search.commands:KIND",),
    "search_ends": ("hpc_trainer.search.next_run:states_at_end",),
    "search_goals": ("hpc_trainer.search.folder:goal_of",),
    "run_sources": ("hpc_trainer.search.pool_runs:make",),
    "best_of": ("hpc_trainer.search.commands:best_of",),
    "sweep_lines": ("hpc_trainer.search.verbs:LINES",),
    "report_parts": ("hpc_trainer.search.report:report_part",),
    "result_columns": ("hpc_trainer.search.verbs:COLUMNS",),
}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
