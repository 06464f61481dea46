#!/usr/bin/env bash
# What needs a GPU, in parts of under eight minutes each: the tests, then the sizes that README.md here asks about.
#
#   bash scripts/bench/gpu.sh FOLDER                    # all parts
#   bash scripts/bench/gpu.sh FOLDER tests losses-large # some
#
# FOLDER gets a log and, of each benchmark, the numbers as JSON. A part that fails or takes too long does not stop the others;
# the last line names it, and the exit status is 1. losses-large measures memory only: at batch 65,536 OpenCLIP's loss does not
# fit into 80 GB. PYTHON names the interpreter; besides the package it needs pytest alone.
set -uo pipefail
mkdir -p "${1:?where to write the numbers}"
folder="$(cd -- "$1" && pwd)"
shift
python="${PYTHON:-python}"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# A part's script and arguments. The tests are only the files that hold such tests: the others may import what is lacking here.
declare -A parts=(
    [tests]="-m pytest -m gpu --junitxml $folder/tests.xml $(grep -rlE --include='test_*.py' 'mark\.gpu\b|on_each_device|all_on_a_gpu' tests | paste -sd' ')"
    [launches]="launches.py"
    [npn]="npn.py --batch-size 4096 --prototypes 4096 --embed-dim 512 --rounds 20"
    [losses]="losses.py --batch-sizes 4096 --embed-dim 512"
    [losses-large]="losses.py --batch-sizes 65536 --embed-dim 512 --losses fastclip neuclip queueclip amorlip --rounds 0"
    [step-vit]="step.py --model ViT-B-32 --batch-size 512 --precision amp_bf16 --steps 5"
    [step-rn50]="step.py --model RN50 --batch-size 128 --precision amp_bf16 --steps 5"
)
all=(tests launches npn losses losses-large step-vit step-rn50)
failed=()
for part in "${@:-"${all[@]}"}"; do
    echo "==> $part"
    read -r -a command <<<"${parts[$part]?unknown part $part; there are: ${all[*]}}"
    if [[ "$part" != tests ]]; then
        command=("scripts/bench/${command[0]}" "${command[@]:1}" --device "${DEVICE:-cuda}" --output "$folder/$part.json")
    fi
    timeout --kill-after=10 "${PART_SECONDS:-480}" "$python" "${command[@]}" 2>&1 |
        tee "$folder/$part.log" || failed+=("$part")
done
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "failed or too slow: ${failed[*]}"
    exit 1
fi
