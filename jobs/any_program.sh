#!/usr/bin/env bash
# A program with a loop and checkpoints of its own, as a grid of two runs; interrupted, each goes on from its own file.
#
# Command:  jobs/any_program.sh [KEY=VALUE]...
# Cost:     some seconds a run on one CPU core; no GPU, no Slurm.
# Expected: 2 COMPLETED, error below 0.001 for both.
set -euo pipefail

cd "$(dirname "$0")"
hpc-trainer submit --wait --command 'python any_program.py --lr {params.lr}' params.lr=0.1,0.2 \
    cluster=local sweep_name=any_program "$@"
