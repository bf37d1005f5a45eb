#!/usr/bin/env bash
# A byte-level GPT on a text file on this machine, then its results. Without a file: the language reference that
# ships inside Python.
#
# Command:  jobs/byte_gpt.sh [FILE] [KEY=VALUE]...      shorter: jobs/byte_gpt.sh debug=smoke
# Cost:     two to three minutes on one CPU core; no GPU, no Slurm.
# Expected: eval_loss below 2.6 nats a byte on the built-in text (1.47 when this was written); untrained, ln 256 = 5.5.
set -euo pipefail

if [[ $# -gt 0 && $1 != *=* && $1 != -* ]]; then
  set -- "data.path='$1'" "${@:2}"
fi
hpc-trainer train experiment=gpt_bytes sweep_name=byte_gpt "$@"
hpc-trainer results byte_gpt
