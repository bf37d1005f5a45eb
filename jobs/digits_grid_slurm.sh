#!/usr/bin/env bash
# A 2 x 2 grid on Slurm: model x learning rate, four runs in one job array. Returns when sbatch has accepted it.
#
# Command:  [CLUSTER=slurm] [HARDWARE=cpu_x1] jobs/digits_grid_slurm.sh [KEY=VALUE]...
#           as: HARDWARE=gpu_x1 jobs/digits_grid_slurm.sh hardware.partition=gpu hardware.time_limit_min=10
# Cost:     four jobs of under a minute each on one core (cpu_x1) or one GPU (gpu_x1).
# Expected: hpc-trainer results digits_grid: eval_accuracy ≥ 0.97 (cnn) and ≥ 0.95 (mlp).
# Account:  cluster.account in ~/.config/hpc_trainer/config.yaml, if your site wants one.
set -euo pipefail

grid=(
  experiment=digits grid=digits_grid sweep_name=digits_grid
  "cluster=${CLUSTER:-slurm}" "hardware=${HARDWARE:-cpu_x1}" "$@"
)
hpc-trainer plan "${grid[@]}"
hpc-trainer submit "${grid[@]}"
