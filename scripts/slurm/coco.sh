#!/bin/bash
#SBATCH --job-name=coco
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
# COCO Captions, ResNet-50, 250,000 steps. From the root of the clone:
#   sbatch scripts/slurm/coco.sh cliplite 'PATH/TO/coco/{00000..LAST}.tar'
RECIPE=coco
GLOBAL_BATCH=1024
source "${SLURM_SUBMIT_DIR:-.}/scripts/slurm/recipe.sh"
