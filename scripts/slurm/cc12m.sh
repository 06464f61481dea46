#!/bin/bash
#SBATCH --job-name=cc12m
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
# CC12M, ViT-B/32, 33 epochs. From the root of the clone:
#   sbatch scripts/slurm/cc12m.sh neuclip 'PATH/TO/cc12m/{00000..LAST}.tar'
RECIPE=cc12m
GLOBAL_BATCH=2048
if [ "${1:-}" = tempnet ]; then
    GLOBAL_BATCH=4096
fi
source "${SLURM_SUBMIT_DIR:-.}/scripts/slurm/recipe.sh"
