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
# What your site may ask for besides. Take one '#' away, or give sbatch the flag:
##SBATCH --account=NAME
##SBATCH --partition=NAME
##SBATCH --mem=0
#
# Variables that sbatch hands on from your shell:
#   PYTHON="apptainer exec --nv IMAGE.sif python"    the interpreter, here in a container (default: python)
#   SRUN_FLAGS="--container-image=IMAGE"             further flags of srun, such as pyxis's
#   NCCL_SOCKET_IFNAME=ib0                           the network between the nodes, if NCCL takes the wrong one
#   SAVE_SECONDS=90                                  how long a checkpoint may take; --signal=B:USR1@N needs 30 more
#
# Trains on all GPUs of the job's nodes, one task a GPU as OpenCLIP documents, and goes on in the same run folder when the
# time limit comes, the job is preempted or a node fails. Submit it from the root of the clone, in the environment to train
# in, with the trainer's flags. With --recipe the job's GPUs share the recipe's global batch, unless you give --batch-size:
#
#   sbatch scripts/slurm/train.sh --recipe cc3m --loss neuclip --train-data 'PATH/TO/cc3m/{00000..00331}.tar'
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 scripts/slurm/train.sh --recipe cc12m --loss fastclip ...
#   sbatch --array=0-2 scripts/slurm/train.sh --seed %a --name seed-%a --loss neuclip ...
#
# In an array of jobs %a stands for the job's index. Each task reads data with its CPUs but one, unless you give --workers.
# 120 seconds before the time limit SLURM sends SIGUSR1 to this shell. The trainers are told to save and end, and the job is
# requeued; its next start resumes from the newest checkpoint. SLURM itself requeues a job that is preempted or loses a node.
# A run that fails is not requeued.
set -euo pipefail

read -ra python <<<"${PYTHON:-python}"
read -ra srun_flags <<<"${SRUN_FLAGS:-}"
cpus=${SLURM_CPUS_PER_TASK:-1}
gpus_per_node=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?"ask for GPUs, or set GPUS_PER_NODE"}}
world_size=$((SLURM_JOB_NUM_NODES * gpus_per_node))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that Linux gives to connections
LOCAL_WORLD_SIZE=$gpus_per_node
export MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE
flags=("${@//%a/${SLURM_ARRAY_TASK_ID:-%a}}")
batch_size=$("${python[@]}" -m openclip_ext.training.recipes --share-batch "$world_size" ${flags[@]+"${flags[@]}"})

save_and_end() {
    trap '' USR1
    interrupted=1
    out_of_time=1
    echo "Time limit ahead: saving, then requeueing job $SLURM_JOB_ID."
    scancel --signal=TERM "$SLURM_JOB_ID" # reaches the job's tasks, not this shell
    (sleep "${SAVE_SECONDS:-90}" && scontrol requeue "$SLURM_JOB_ID") &
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

# The signal ends `wait` early, and then its status says nothing about the training.
interrupted=1
while [ "$interrupted" -eq 1 ]; do
    interrupted=0
    status=0
    wait "$training" || status=$?
done
if [ "$out_of_time" -eq 1 ]; then
    kill "$last_resort" 2>/dev/null || true
    if [ "$status" -gt 128 ]; then # ended by the signal
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$status"
