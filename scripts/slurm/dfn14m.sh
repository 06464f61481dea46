#!/bin/bash
#SBATCH --job-name=dfn14m
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
# DFN-14M, ViT-B/32, 320 M pairs. From the root of the clone:
#   sbatch scripts/slurm/dfn14m.sh neuclip 'PATH/TO/dfn14m/{00000..LAST}.tar'
RECIPE=dfn14m
GLOBAL_BATCH=4096
source "${SLURM_SUBMIT_DIR:-.}/scripts/slurm/recipe.sh"
