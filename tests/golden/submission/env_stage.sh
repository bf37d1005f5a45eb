#!/bin/bash

# Parameters
#SBATCH --array=0-3%4
#SBATCH --comment=0123456789abcdef0123456789abcdef
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --job-name=golden-01234567
#SBATCH --mem-per-gpu=61440M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/golden/slurm/%A_%a.out
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=60

# setup
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export HPC_TRAINER_JOB_START=$(date +%s)
export SLURM_EXPORT_ENV=ALL
export HPC_TRAINER_STAGE_KEY=$(stat -Lc %s-%Y -- /lab/train.tar)
set +e

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/runs/golden/slurm/%A_%a_%t_log.out --output /shared/runs/golden/slurm/%A_%a.out --open-mode=append --kill-on-bad-exit=1 -- bash -c 'archive=$1 other=$2; shift 2; trap "export HPC_TRAINER_STOPPED=SIGTERM" TERM; trap "export HPC_TRAINER_STOPPED=SIGUSR2" USR2; key=env-${HPC_TRAINER_STAGE_KEY:-none}-$(printf %s "$archive" | cksum | cut -d " " -f 1); for place in "$SLURM_TMPDIR" "$TMPDIR" /tmp /var/tmp; do [ -d "$place" ] || continue; [ -O "$place" ] || [ -k "$place" ] || continue; case $(stat -f -c %T -- "$place") in ext*|xfs|btrfs|zfs|f2fs|tmpfs|ramfs|overlay*) ;; *) continue;; esac; mine=$place/hpc_trainer-$UID copy=$mine/$key; mkdir -m 700 -- "$mine" 2> /dev/null; [ ! -L "$mine" ] && [ -O "$mine" ] && [ "$(stat -c %a -- "$mine")" = 700 ] || continue; exec 9> "$copy.lock" || continue; flock 9; if [ ! -e "$copy/.complete" ]; then rm -rf -- "$copy"; mkdir -m 700 -- "$copy" && tar -x --no-same-owner -f "$archive" -C "$copy" && if [ -e "$copy/bin/conda-unpack" ]; then "$copy/bin/python" "$copy/bin/conda-unpack"; fi && [ -x "$copy/bin/python" ] && : > "$copy/.complete" || { echo "the environment was not unpacked in $mine" >&2; rm -rf -- "$copy"; exec 9>&-; continue; }; fi; exec 8< "$copy"; flock -s 8; touch -- "$copy"; exec 9>&-; export HPC_TRAINER_STAGED="$copy"; if [ -e "$copy/bin/conda-unpack" ]; then source "$copy/bin/activate"; else export VIRTUAL_ENV=$copy PATH="$copy/bin:$PATH"; fi; exec "$copy/bin/python" "$@"; done; echo "no disk of this node takes $archive: ${other:-no other environment is named}" >&2; [ -n "$other" ] || exit 78; exec "$other" "$@"' stage /lab/train.tar /lab/envs/train/bin/python -u -c 'import os, sys; sys.version_info < (3, 11) or sys.flags.safe_path or not sys.executable or os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]]); path = sys.path[:]; sys.path.append(""); sys.path.sort(key=lambda p: not p or os.path.isdir(p) and (os.path.samefile(p, ".") or os.stat(p).st_mode & 18 > 0 and "-packages" not in p and not p.startswith(sys.base_prefix))); from hpc_trainer.launch.frozen_code.frozen_worker import start; start(path)' hpc_trainer.worker --sweep-dir /shared/runs/golden --array 0123456789abcdef0123456789abcdef
code=$?
request=/shared/runs/golden/slurm/requeue-"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}-${SLURM_RESTART_COUNT:-0}"
if run=$(cat -- "$request" 2> /dev/null); then rm -f -- "$request"; [ -e "$run/CANCEL" ] || scontrol requeue Incomplete "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"; fi
exit $code

