"""`hpc-trainer init`: a project that trains, tests its resume and submits; and what an existing script has to change.

    verbs.py      the command, and what it prints
    project.py    the files of a new project, from template/, and a hardware profile of this cluster or machine
    script.py     `--from`: five steps that lead a training script to main(config, run), with its lines
    submitit.py   `--from-submitit`, `--from-hydra-submitit`: parameters of submitit as keys of ours
    submitit_files.py   the parameters in a script with an executor, or in a launcher's YAML
    source.py     values in a Python file, read from its syntax tree

A script that is given is parsed, and never run or imported.
"""

CONTRIBUTES = {"verbs": ("hpc_trainer.init_project.verbs:verbs",)}
"""What this domain contributes to the hooks of the core (hpc_trainer/domains.py)."""
