"""Tidying of sweeps: what they take and hold, names and notes, and the ways in which they shrink or leave.

    verbs.py      the verbs, their options and what they print
    labels.py     tags and note of a sweep; `rename`
    walk.py       columns of `sweeps`: states, size on disk, best metric, from a walk that is remembered
    cleaning.py   what `clean` deletes and what it keeps; `rm` and its tombstones
    archive.py    a sweep as one tar file with checksums, and back

Every verb that changes a sweep holds the lock of `submit`, and refuses a sweep of which a run waits or works.
"""

CONTRIBUTES = {
    "verbs": ("hpc_trainer.tidy.verbs:verbs",),
    "sweep_columns": ("hpc_trainer.tidy.walk:COLUMNS",),
}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
