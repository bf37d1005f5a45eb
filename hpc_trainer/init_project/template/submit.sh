#!/usr/bin/env bash
# A grid of four runs; given twice, only what is new or was interrupted starts. Further words are added:
#   jobs/submit.sh hardware=gpu_x1 --wait
set -euo pipefail

cd "$(dirname "$0")/.."
words=(experiment={{EXPERIMENT}} optim.lr=1e-3,1e-2 model.kwargs.width=32,64)
[[ " $*" == *" hardware="* ]] || words+=(hardware=here)
shown=("${words[@]}")
for word in "$@"; do
    if [[ $word == [!-]*=* ]]; then shown+=("$word"); fi  # plan does not take each option of submit
done
hpc-trainer plan "${shown[@]}"
hpc-trainer submit "${words[@]}" "$@"
