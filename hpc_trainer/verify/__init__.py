"""Verification of runs: recovery from interruptions, equal bits after them, repetition of old runs, learning rates.

    app.py               the commands `verify preempt|resume|reproduce` and `find-lr`; verbs.py does and prints them
    preempt.py           interruption of a running run, as by Slurm, and a check of the step at which it resumes
    resume.py            two undisturbed trainings and an interrupted one, compared step by step
    interruptions.py     kinds of interruptions, and the plan of those that a rank causes itself
    reproduce.py         a copy of an old run, and its comparison; old_code.py restores code and environment
    compare_metrics.py   comparison of the metrics that two runs logged
    find_lr.py           a learning-rate range test, its curve and its plot
    own_runs.py          start, wait for and end the runs of these verbs
    probe.py             part of a rank: trace of its state after each step, and its own interruption
    lr_range.py          part of a rank: a loop at ever larger learning rates

Only probe.py and lr_range.py import torch. `worker/attempt.py` loads them by the name that `HPC_TRAINER_PROBE` has.
"""

CONTRIBUTES = {"verbs": ("hpc_trainer.verify.app:verbs",)}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
