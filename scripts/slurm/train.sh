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
# Trains on all GPUs of the job's nodes, one task a GPU as OpenCLIP documents, and goes on in the same run folder when the
# time limit comes or the job is preempted. Submit it from the root of the clone, in the environment to train in, with the
# trainer's flags. With --recipe the job's GPUs share the recipe's global batch, unless you give --batch-size:
#
#   sbatch scripts/slurm/train.sh --recipe cc3m --loss neuclip --train-data 'PATH/TO/cc3m/{00000..00331}.tar'
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 scripts/slurm/train.sh --recipe cc12m --loss fastclip ...
#   sbatch scripts/slurm/train.sh --loss neuclip --model ViT-B-32 --train-data 'PATH/TO/{00000..01242}.tar' ...
#
# 120 seconds before the time limit SLURM sends SIGUSR1 to this shell. The trainers are told to save, get SAVE_SECONDS to
# do so, and the job is requeued; its next start resumes from the newest checkpoint. A run that fails is not requeued.
set -euo pipefail

PYTHON=${PYTHON:-python}
SAVE_SECONDS=${SAVE_SECONDS:-60}
gpus_per_node=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?"ask for GPUs, or set GPUS_PER_NODE"}}
world_size=$((SLURM_JOB_NUM_NODES * gpus_per_node))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
LOCAL_WORLD_SIZE=$gpus_per_node
export MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE
batch_size=$("$PYTHON" -m openclip_ext.training.recipes --share-batch "$world_size" "$@")

save_and_requeue() {
    trap '' USR1
    interrupted=1
    echo "Time limit ahead: saving, then requeueing job $SLURM_JOB_ID."
    scancel --signal=USR1 "$SLURM_JOB_ID" # reaches the job's tasks, not this shell
    sleep "$SAVE_SECONDS"
    if kill -0 "$training" 2>/dev/null; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
}
trap save_and_requeue USR1

# The trainer reads its rank from SLURM's variables. It would die of SIGUSR1 until it has set its own handler.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$world_size" --ntasks-per-node="$gpus_per_node" \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1; exec "$@"' trainer "$PYTHON" -u -m openclip_ext.training.main \
    --name="$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume=latest ${batch_size:+"$batch_size"} "$@" &
training=$!

# The signal ends `wait` early, and then its status says nothing about the training.
interrupted=1
while [ "$interrupted" -eq 1 ]; do
    interrupted=0
    status=0
    wait "$training" || status=$?
done
exit "$status"
