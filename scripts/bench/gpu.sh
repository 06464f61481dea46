#!/usr/bin/env bash
# The sizes that docs/performance.md asks about, on one GPU, in one go: bash scripts/bench/gpu.sh FOLDER
# Needs some 70 GiB of the GPU's memory, for OpenCLIP's loss at batch 65,536; PYTHON names the interpreter.
set -euo pipefail
mkdir -p "${1:?where to write the numbers}"
folder="$(cd -- "$1" && pwd)"
python="${PYTHON:-python}"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

bench() {
    local report="$1" script="$2"
    shift 2
    echo "==> $script $*"
    "$python" "scripts/bench/$script.py" "$@" --device cuda --output "$folder/$report.json"
}

bench npn npn --batch-size 4096 --prototypes 4096 --embed-dim 512 --rounds 20
bench losses losses --batch-sizes 4096 --embed-dim 512
bench losses-large losses --batch-sizes 65536 --embed-dim 512 --losses fastclip neuclip queueclip amorlip --rounds 3
bench step-vit step --model ViT-B-32 --batch-size 512 --precision amp_bf16
bench step-rn50 step --model RN50 --batch-size 128 --precision amp_bf16
"$python" -m pytest -m gpu
