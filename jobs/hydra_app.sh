#!/usr/bin/env bash
# A Hydra app as it is, as a grid of four runs. Words of ours may be given; the app's stand after --app.
#
# Command:  jobs/hydra_app.sh [KEY=VALUE]...
# Cost:     some seconds a run on one CPU core; no GPU, no Slurm.
# Expected: 4 COMPLETED, return_value below 0.1 for all.
set -euo pipefail

cd "$(dirname "$0")"
hpc-trainer submit --wait cluster=local sweep_name=hydra_app "$@" --app hydra_app.py model=line,cubic lr=0.3,0.5
