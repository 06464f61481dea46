#!/bin/bash
#SBATCH --job-name=openclip_ext
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#
# Trains on all GPUs of the job's nodes, and goes on in the same run folder when the time limit comes or the job is
# preempted. Submit it from the root of the clone, in the environment to train in, with the trainer's flags:
#
#   sbatch scripts/slurm/train.sh --loss neuclip --model ViT-B-32 --train-data 'PATH/TO/{00000..01242}.tar' ...
#   sbatch --nodes=2 scripts/slurm/cc12m.sh neuclip 'PATH/TO/cc12m/{00000..01242}.tar'
#
# 120 seconds before the time limit SLURM sends SIGUSR1 to this shell. The trainers are told to save, get SAVE_SECONDS to
# do so, and the job is requeued; its next start resumes from the newest checkpoint. A run that fails is not requeued.
set -euo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?"ask for GPUs, or set GPUS_PER_NODE"}}
SAVE_SECONDS=${SAVE_SECONDS:-60}
export PYTHON=${PYTHON:-python} GPUS_PER_NODE
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

save_and_requeue() {
    trap '' USR1
    interrupted=1
    echo "Time limit ahead: saving, then requeueing job $SLURM_JOB_ID."
    scancel --signal=USR1 "$SLURM_JOB_ID" # reaches the job's steps, not this shell
    sleep "$SAVE_SECONDS"
    if kill -0 "$training" 2>/dev/null; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
}
trap save_and_requeue USR1

# One torchrun a node. It does not know SIGUSR1 and would die of it; the trainers it starts set their own handler.
# shellcheck disable=SC2016
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1
        exec "$PYTHON" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID" \
            --nproc-per-node="$GPUS_PER_NODE" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
            -m -- openclip_ext.training.main "$@"' \
    torchrun --name="$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume=latest "$@" &
training=$!

# The signal ends `wait` early, and then its status says nothing about the training.
interrupted=1
while [ "$interrupted" -eq 1 ]; do
    interrupted=0
    status=0
    wait "$training" || status=$?
done
exit "$status"
