"""Notification: a sweep is done, its first run failed, a run stalled, or a run is the best so far.

    events.py   events that follow from the end of a run; a file claims each event, so that it is sent once
    send.py     program of a child process with a time limit: your command, a webhook

Notification is the last thing that a run does at its end, after everything is recorded. Mail is Slurm's (`sbatch
--mail-type`).
"""

CONTRIBUTES = {
    "ends": ("hpc_trainer.notify.events:at_end",),
    "submits": ("hpc_trainer.notify.events:forget_ends",),
}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
