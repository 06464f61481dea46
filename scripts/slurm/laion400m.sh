#!/bin/bash
#SBATCH --job-name=laion400m
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
# LAION-400M, ViT-B/16, 30 epochs. From the root of the clone:
#   sbatch scripts/slurm/laion400m.sh fastclip 'PATH/TO/laion400m/{00000..LAST}.tar'
RECIPE=laion400m
GLOBAL_BATCH=5120
source "${SLURM_SUBMIT_DIR:-.}/scripts/slurm/recipe.sh"
