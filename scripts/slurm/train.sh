#!/bin/bash
#SBATCH --job-name=openclip_ext
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#
# Settings that your site may require. Remove one '#', or pass the flag to sbatch:
##SBATCH --account=NAME
##SBATCH --partition=NAME
##SBATCH --mem=0
#
# Variables that sbatch passes on from your shell:
#   PYTHON="apptainer exec --nv IMAGE.sif python"    the interpreter, here in a container (default: python)
#   SRUN_FLAGS="--container-image=IMAGE"             additional flags for srun, here for its container plugin pyxis
#   NCCL_SOCKET_IFNAME=ib0                           the network between the nodes, if NCCL chooses a wrong network
#   SAVE_SECONDS=90                                  maximum seconds to save a checkpoint; N in --signal=B:USR1@N is 30 more
#
# Train on all GPUs of the job's nodes, with one task per GPU. The job continues in the same run folder after a time limit,
# a preemption or a node failure. Activate the Python environment and submit this script from the root of the clone, with the
# trainer's flags. With --recipe, the GPUs share the recipe's global batch, unless you set --batch-size:
#
#   sbatch scripts/slurm/train.sh --recipe cc3m --loss neuclip-paper --train-data 'PATH/TO/cc3m/{00000..00331}.tar'
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 scripts/slurm/train.sh --recipe cc12m --loss fastclip ...
#   sbatch --array=0-2 scripts/slurm/train.sh --seed %a --name seed-%a --loss neuclip ...
#
# In a job array, %a is the job's index. Each task has one data worker fewer than it has CPUs, unless you set --workers.
# 120 seconds before the time limit, SLURM sends SIGUSR1 to this shell. The shell signals the trainers to save and exit, and
# requeues the job. The next launch resumes from the newest checkpoint. SLURM requeues preempted jobs and jobs that lose a
# node. Failed runs are not requeued.
set -euo pipefail

read -ra python <<<"${PYTHON:-python}"
read -ra srun_flags <<<"${SRUN_FLAGS:-}"
cpus=${SLURM_CPUS_PER_TASK:-1}
gpus_per_node=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?"ask for GPUs, or set GPUS_PER_NODE"}}
world_size=$((SLURM_JOB_NUM_NODES * gpus_per_node))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below Linux's ephemeral ports
LOCAL_WORLD_SIZE=$gpus_per_node
export MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE
flags=("${@//%a/${SLURM_ARRAY_TASK_ID:-%a}}")
batch_size=$("${python[@]}" -m openclip_ext.training.recipes --share-batch "$world_size" ${flags[@]+"${flags[@]}"})

# The SLURM_JOB_ID of an array's last task is the ID of the whole array, so array tasks are addressed as ARRAY_INDEX.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

save_and_end() {
    trap '' USR1
    interrupted=1
    out_of_time=1
    echo "Time limit ahead: saving, then requeueing job $job."
    scancel --signal=TERM "$job" # signals the trainers, not this shell
    (sleep "${SAVE_SECONDS:-90}" && scontrol requeue "$job") &
    last_resort=$!
}
out_of_time=0
trap save_and_end USR1

# The trainer reads its rank from SLURM's variables.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$world_size" --ntasks-per-node="$gpus_per_node" --cpus-per-task="$cpus" \
    --kill-on-bad-exit=1 ${srun_flags[@]+"${srun_flags[@]}"} "${python[@]}" -u -m openclip_ext.training.main \
    --name="$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume=latest --workers="$((cpus - 1))" ${batch_size:+"$batch_size"} \
    ${flags[@]+"${flags[@]}"} &
training=$!

# If the signal interrupts `wait`, the status of `wait` is not the status of the training, so the loop waits again.
interrupted=1
while [ "$interrupted" -eq 1 ]; do
    interrupted=0
    status=0
    wait "$training" || status=$?
done
if [ "$out_of_time" -eq 1 ]; then
    kill "$last_resort" 2>/dev/null || true
    if [ "$status" -gt 128 ]; then # the signal terminated the training
        scontrol requeue "$job"
    fi
fi
exit "$status"
