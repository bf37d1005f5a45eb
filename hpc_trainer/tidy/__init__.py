"""Tidying of sweeps: their size, names, tags and notes; cleaning, removal and archives.

    verbs.py      the verbs, their options and what they print
    labels.py     tags and note of a sweep; `rename`
    walk.py       columns of `sweeps`: states, size on disk, best metric, from a walk that is remembered
    cleaning.py   rules of `clean`; `rm` and its tombstones
    archive.py    a sweep as one tar file with checksums, and back

Every verb that changes a sweep holds the lock of `submit`, and refuses a sweep of which a run waits or works.
"""

CONTRIBUTES = {
    "verbs": ("hpc_trainer.tidy.verbs:verbs",),
    "sweep_columns": ("hpc_trainer.tidy.walk:COLUMNS",),
    "labels": ("hpc_trainer.tidy.labels:label",),
}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
