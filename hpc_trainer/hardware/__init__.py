"""Domain hardware: what is known of machines. Shipped profiles with their sources, and the cluster at hand.

    verbs.py       the commands of `hpc-trainer hardware` and what they print
    profiles.py    the profiles of `conf/` and of `--config-dir`, read without Hydra

A profile is a file of `conf/hardware/` (the shape of a run) with a file of `conf/cluster/` (what its site fixes). Both
are chosen as any other file of a group: `hardware=nersc/perlmutter_x4`.
"""

CONTRIBUTES = {"verbs": ("hpc_trainer.hardware.verbs:verbs",)}
"""What this domain contributes to the hooks of the core (hpc_trainer/domains.py)."""
