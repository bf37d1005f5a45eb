#!/usr/bin/env bash
# GPT-2 124M and ResNet-50 on one GPU, beside loops written by hand and a matrix product, as docs/benchmarks/gpu.md has
# them. Runs here or as a job; with --small on any CPU, tiny, to see that it works. From the repository, with
# `pip install -e .` in the python that is on PATH, or in $PYTHON.
#
# Command:  jobs/bench_gpu.sh [--small] [--only gpt|resnet] [--rounds 3] [--steps 250] [KEY=VALUE]...
#           on Slurm, in the repository: sbatch [--partition=GPU] jobs/bench_gpu.sh
# Cost:     one GPU of 80 GB or more, a quarter of an hour (with --rounds 1 four minutes). --small: a minute on a CPU core.
# Expected: a table in Markdown; on one H100 GPT-2 at 480,000 tokens/s and ResNet-50 at 5,500 images/s, each at 0.99 or
#           more of the loop written by hand.
#SBATCH --job-name=bench_gpu
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=60G
#SBATCH --time=60
#SBATCH --output=bench_gpu-%j.log
set -euo pipefail

# Slurm runs a copy of this file, from a folder of its own.
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ -d $top/tests/benchmarks ]] || top=${SLURM_SUBMIT_DIR:-$PWD}
if [[ ! -d $top/tests/benchmarks ]]; then
  echo "bench_gpu.sh: $top is not the repository, which has tests/benchmarks. Use: cd REPOSITORY; sbatch jobs/bench_gpu.sh" >&2
  exit 2
fi
cd "$top"
exec "${PYTHON:-python}" -m tests.benchmarks.gpu "$@"
