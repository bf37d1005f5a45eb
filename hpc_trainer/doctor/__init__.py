"""`hpc-trainer doctor`: checks of this machine, the folder of sweeps and the cluster, each with a reason and a fix.

    verbs.py          the command: all checks side by side, and how it prints what they found
    findings.py       the form of a finding
    machine.py        Python, packages, torch's build, Hydra plugins, limits of the user, ports
    folder.py         the folder of sweeps: results of the probe and the quota, and their consequences
    folder_probe.py   a process of its own that touches the folder, as a dead server would hang it
    cluster.py        Slurm's commands and release, architectures, clock of the controller

It imports no torch, submits nothing and changes nothing; its files on the folder of sweeps are removed again.
"""

CONTRIBUTES = {"verbs": ("hpc_trainer.doctor.verbs:verbs",)}
"""What this domain contributes to the hooks of the core (hpc_trainer/domains.py)."""
