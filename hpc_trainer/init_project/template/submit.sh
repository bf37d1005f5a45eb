#!/usr/bin/env bash
# A grid of four runs; given twice, only what is new or was interrupted starts. Further words are added:
#   jobs/submit.sh hardware=here --wait
set -euo pipefail

cd "$(dirname "$0")/.."
hpc-trainer plan experiment={{EXPERIMENT}} optim.lr=1e-3,1e-2 model.kwargs.width=32,64
hpc-trainer submit experiment={{EXPERIMENT}} optim.lr=1e-3,1e-2 model.kwargs.width=32,64 "$@"
