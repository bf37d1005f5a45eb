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
export HPC_TRAINER_IMAGE_FACTS=$(stat -Lc '%s %Y' -- /lab/rocm.sif 2> /dev/null)
set +e

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/runs/golden/slurm/%A_%a_%t_log.out --output /shared/runs/golden/slurm/%A_%a.out --open-mode=append --kill-on-bad-exit=1 -- bash -c 'for name in ${!SLURM*} ${!SUBMITIT_*} ${!HPC_TRAINER_*} CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK; do [[ -v $name && ${!name} != *[\$\`\"\\]* ]] && export "APPTAINERENV_$name=${!name}" "SINGULARITYENV_$name=${!name}"; done; exec "$@"' inside singularity exec --bind /shared/runs --rocm /lab/rocm.sif /lab/on-top/bin/python -u -c 'import os, sys; sys.version_info < (3, 11) or sys.flags.safe_path or not sys.executable or os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]]); path = sys.path[:]; sys.path.append(""); sys.path.sort(key=lambda p: not p or os.path.isdir(p) and (os.path.samefile(p, ".") or os.stat(p).st_mode & 18 > 0 and "-packages" not in p and not p.startswith(sys.base_prefix))); from hpc_trainer.launch.frozen_code.frozen_worker import start; start(path)' hpc_trainer.worker --sweep-dir /shared/runs/golden --array 0123456789abcdef0123456789abcdef
code=$?
request=/shared/runs/golden/slurm/requeue-"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}-${SLURM_RESTART_COUNT:-0}"
if run=$(cat -- "$request" 2> /dev/null); then rm -f -- "$request"; [ -e "$run/CANCEL" ] || scontrol requeue Incomplete "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" || /login/python -u -c 'import os, sys; sys.version_info < (3, 11) or sys.flags.safe_path or not sys.executable or os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]]); path = sys.path[:]; sys.path.append(""); sys.path.sort(key=lambda p: not p or os.path.isdir(p) and (os.path.samefile(p, ".") or os.stat(p).st_mode & 18 > 0 and "-packages" not in p and not p.startswith(sys.base_prefix))); from hpc_trainer.launch.frozen_code.frozen_worker import start; start(path)' hpc_trainer.launch.later_jobs "$run" "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" --at-work; fi
exit $code

