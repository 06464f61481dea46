#!/bin/bash
#SBATCH --job-name=cc3m
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
# CC3M, ResNet-50, 37 epochs. From the root of the clone:
#   sbatch scripts/slurm/cc3m.sh neuclip 'PATH/TO/cc3m/{00000..LAST}.tar'
RECIPE=cc3m
GLOBAL_BATCH=1024
source "${SLURM_SUBMIT_DIR:-.}/scripts/slurm/recipe.sh"
