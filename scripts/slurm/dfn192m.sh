#!/bin/bash
#SBATCH --job-name=dfn192m
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
# DFN-192M, ViT-B/16, 1.3 B pairs. From the root of the clone:
#   sbatch scripts/slurm/dfn192m.sh neuclip 'PATH/TO/dfn192m/{00000..LAST}.tar'
RECIPE=dfn192m
GLOBAL_BATCH=5120
source "${SLURM_SUBMIT_DIR:-.}/scripts/slurm/recipe.sh"
