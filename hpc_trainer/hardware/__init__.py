"""Domain hardware: facts about machines. Shipped profiles with their sources, and the cluster at hand.

    verbs.py       the commands of `hpc-trainer hardware` and what they print
    profiles.py    the profiles of `conf/` and of `--config-dir`, read without Hydra
    live_verbs.py  `discover` and `check`: they ask the cluster at hand, and print what it answers
    discover.py    shapes of runs on the cluster at hand, derived from Slurm's answers
    site_files.py  the files of `discover`: their text, and the rule for files that exist
    check.py       a profile against the cluster, line by line; verdicts on what ranks measured
    rank_probe.py  program of `check --run`: measures on each rank, with torch, and imports nothing of ours

A profile is a file of `conf/hardware/` (the shape of a run) with a file of `conf/cluster/` (what its site fixes). Both
are chosen as any other file of a group: `hardware=nersc/perlmutter_x4`.
"""

CONTRIBUTES = {
    "verbs": ("hpc_trainer.hardware.verbs:verbs",),
    "cluster_profile": ("hpc_trainer.hardware.discover:smallest_here",),
}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
