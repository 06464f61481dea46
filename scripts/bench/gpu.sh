#!/usr/bin/env bash
# Run the tests that need a GPU, then benchmarks with large models and batches, in parts of less than eight minutes each.
#
#   bash scripts/bench/gpu.sh FOLDER                    # all parts
#   bash scripts/bench/gpu.sh FOLDER tests losses-large # only these two parts
#
# The script writes a log of each part and the numbers of each benchmark (JSON) to FOLDER. If a part fails or takes too long,
# the script continues with the next part. Its last line lists the failed parts, and its exit status is 1. losses-large measures
# only memory. PYTHON sets the interpreter, which needs the package and pytest.
set -uo pipefail
mkdir -p "${1:?missing FOLDER for the numbers}"
folder="$(cd -- "$1" && pwd)"
shift
python="${PYTHON:-python}"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Script and arguments of each part. Pytest reads only files with GPU tests, because other files may import missing packages.
declare -A parts=(
    [tests]="-m pytest -m gpu --junitxml $folder/tests.xml $(grep -rlE --include='test_*.py' 'mark\.gpu\b|on_each_device|all_on_a_gpu' tests | paste -sd' ')"
    [launches]="launches.py"
    [npn]="npn.py --batch-size 4096 --prototypes 4096 --embed-dim 512 --rounds 20"
    [losses]="losses.py --batch-sizes 4096 --embed-dim 512"
    [losses-large]="losses.py --batch-sizes 65536 --embed-dim 512 --losses fastclip neuclip queueclip amorlip --rounds 0"
    [step-vit]="step.py --model ViT-B-32 --batch-size 512 --precision amp_bf16 --steps 5"
    [step-texts]="step.py --model ViT-B-32 --batch-size 256 --precision amp_bf16 --steps 5 --captions cc3m --script --losses openclip queueclip"
    [step-rn50]="step.py --model RN50 --batch-size 128 --precision amp_bf16 --steps 5"
)
all=(tests launches npn losses losses-large step-vit step-texts step-rn50)
failed=()
for part in "${@:-"${all[@]}"}"; do
    echo "==> $part"
    read -r -a command <<<"${parts[$part]?unknown part $part; expected one of: ${all[*]}}"
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
