#!/usr/bin/env bash
# What needs a GPU, in parts of under eight minutes each: the tests, then the sizes that docs/performance.md asks about.
#
#   bash scripts/bench/gpu.sh FOLDER                    # all parts
#   bash scripts/bench/gpu.sh FOLDER tests losses-large # some
#
# FOLDER gets a log and, of each benchmark, the numbers as JSON. A part that fails or takes too long does not stop the others;
# the last line names it, and the exit status is 1. losses-large needs some 70 GiB of the GPU's memory, for OpenCLIP's loss at
# batch 65,536. PYTHON names the interpreter; besides the package it needs pytest alone.
set -uo pipefail
mkdir -p "${1:?where to write the numbers}"
folder="$(cd -- "$1" && pwd)"
shift
python="${PYTHON:-python}"
part_seconds="${PART_SECONDS:-480}"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit

bench() {
    local script="$1"
    shift
    "$python" "scripts/bench/$script.py" "$@" --device "${DEVICE:-cuda}" --output "$folder/$part.json"
}

run_part() {
    case "$1" in
        tests)
            # Only the files that hold such tests: the others may import what this machine lacks.
            mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.gpu\b' tests)
            "$python" -m pytest -m gpu --junitxml "$folder/tests.xml" "${files[@]}"
            ;;
        npn) bench npn --batch-size 4096 --prototypes 4096 --embed-dim 512 --rounds 20 ;;
        losses) bench losses --batch-sizes 4096 --embed-dim 512 ;;
        losses-large)
            bench losses --batch-sizes 65536 --embed-dim 512 --losses fastclip neuclip queueclip amorlip --rounds 3
            ;;
        step-vit) bench step --model ViT-B-32 --batch-size 512 --precision amp_bf16 ;;
        step-rn50) bench step --model RN50 --batch-size 128 --precision amp_bf16 ;;
        *) echo "unknown part $1; there are: ${all[*]}" >&2 && return 2 ;;
    esac
}

all=(tests npn losses losses-large step-vit step-rn50)
if [[ "${1:-}" == --part ]]; then # this script's own call, under timeout
    part="$2"
    run_part "$part"
    exit
fi
failed=()
for part in "${@:-"${all[@]}"}"; do
    echo "==> $part"
    timeout --kill-after=10 "$part_seconds" bash scripts/bench/gpu.sh "$folder" --part "$part" 2>&1 |
        tee "$folder/$part.log" || failed+=("$part")
done
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "failed or too slow: ${failed[*]}"
    exit 1
fi
