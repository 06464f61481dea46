#!/bin/bash
#SBATCH --job-name=datacomp_eval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#
# Evaluate the checkpoints of a run folder on DataComp's tasks and write a report. The job's GPUs share the tasks of one
# checkpoint. Activate the Python environment and submit this script from the root of the clone:
#
#   sbatch scripts/slurm/datacomp_eval.sh LOGS/NAME PATH/TO/datacomp
#   CHECKPOINTS=last sbatch --gpus-per-node=1 scripts/slurm/datacomp_eval.sh LOGS/NAME PATH/TO/datacomp --tasks imagenet
#
# CHECKPOINTS is `all` (the default) or `last`. eval.datacomp receives the arguments after the two folders. Tasks with a result
# are skipped, so you can requeue or resubmit the job at any time. If a task fails, the job continues with the other tasks, but
# its exit status is not 0.
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: sbatch scripts/slurm/datacomp_eval.sh RUN_FOLDER DATA_DIR [FLAGS of eval.datacomp...]" >&2
    exit 2
fi
run_folder=${1%/}
data_dir=$2
shift 2
python=${PYTHON:-python}
processes=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
master_port=$((20000 + ${SLURM_JOB_ID:-0} % 20000))

# Use the model configuration that the trainer saved. Otherwise, the weights could load into a different model. The name of
# the model is in config.json. For a run of OpenCLIP's script, add --model NAME to this job's arguments.
run_flags=()
for model_config in "$run_folder"/model_config/*.json; do
    [ ! -f "$model_config" ] || run_flags+=(--model-config "$model_config")
done

mapfile -t checkpoints < <(find "$run_folder/checkpoints" -maxdepth 1 -name 'epoch_*[0-9].pt' | sort -V)
if [ "${#checkpoints[@]}" -eq 0 ]; then
    echo "$run_folder/checkpoints has no epoch_K.pt: expected the run folder LOGS/NAME of a training run" >&2
    exit 2
fi
case ${CHECKPOINTS:-all} in
    all) ;;
    last) checkpoints=("${checkpoints[-1]}") ;;
    *)
        echo "CHECKPOINTS=$CHECKPOINTS: expected all or last" >&2
        exit 2
        ;;
esac

status=0
for checkpoint in "${checkpoints[@]}"; do
    echo "== $checkpoint"
    srun --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        "$python" -m torch.distributed.run --nproc-per-node="$processes" --master-port="$master_port" \
        -m eval.datacomp --checkpoint "$checkpoint" --data-dir "$data_dir" \
        ${run_flags[@]+"${run_flags[@]}"} "$@" || status=$?
done
"$python" -m eval.report "$run_folder" --output "$run_folder/datacomp/report" || status=$?
exit "$status"
