# shellcheck shell=bash disable=SC2153,SC1091
# Sourced by the job script of a data set, which sets RECIPE and GLOBAL_BATCH.
# Arguments: LOSS SHARDS [further flags of the trainer, which win over the recipe's].
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: sbatch scripts/slurm/$RECIPE.sh LOSS SHARDS [FLAGS...]" >&2
    exit 2
fi
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?"ask for GPUs, or set GPUS_PER_NODE"}}
world_size=$((SLURM_JOB_NUM_NODES * GPUS_PER_NODE))
if [ $((GLOBAL_BATCH % world_size)) -ne 0 ]; then
    echo "the recipe's batch of $GLOBAL_BATCH cannot be shared by $world_size GPUs; ask for a number that divides it" >&2
    exit 2
fi
set -- --recipe="$RECIPE" --loss="$1" --train-data="$2" --batch-size=$((GLOBAL_BATCH / world_size)) "${@:3}"
source "${SLURM_SUBMIT_DIR:-.}/scripts/slurm/train.sh"
