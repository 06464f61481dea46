#!/usr/bin/env bash
# Train CLIP on generated images, with queueclip and with OpenCLIP's loss, and score both on unseen combinations. Needs no GPU,
# no download except the Python packages, and a few minutes on two cores.
#
#   bash scripts/quickstart.sh                    # queueclip and openclip
#   bash scripts/quickstart.sh neuclip fastclip   # other losses; the figure shows all runs so far
#
# You can interrupt it at any time: the next launch continues where it stopped. All output is in demo/.
# EPOCHS (default 3) sets the number of epochs.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_environment.sh"

losses=("${@:-queueclip}")
[[ $# -gt 0 ]] || losses+=(openclip)
epochs="${EPOCHS:-3}"
# On tensors this small, one thread is as fast as two. On shared cores it is much faster, because OpenMP's threads spin while
# they wait for each other. The second core decodes images.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

say "1/4 Demo set: 20,000 images to train on, 4,000 to test on"
"$python" -m openclip_ext.data.shapes --output demo/train --num-samples 20000 --split train
"$python" -m openclip_ext.data.shapes --output demo/test --num-samples 4000 --split test

say "2/4 Training with ${losses[*]}: two runs at a time"
train() {
  local loss="$1"
  local command=(
    "$python" -m openclip_ext.training.main
    --loss "$loss"
    --train-data 'demo/train/{00000..00019}.tar'
    --model demo-resnet
    --batch-size 64 --epochs "$epochs" --lr 1e-3 --warmup 100
    --precision fp32 --device cpu --workers 1
    --logs demo/runs --name "$loss" --resume latest --save-every-steps 100 --log-every-n-steps 20
  )
  # Two runs print at the same time, so each line starts with its loss.
  {
    printf '%q ' "${command[@]/#"$root/"/}"
    printf '\n'
    "${command[@]}"
  } 2>&1 | (trap '' INT && sed -u "s/^/$loss: /")
}
export -f train
export python root epochs
# Ctrl-C ends xargs at once. cat ends after the last training, so this script waits until all have reported where they stopped.
printf '%s\n' "${losses[@]}" | xargs -P 2 -I '{}' bash -c 'set -euo pipefail; train "$1"' bash '{}' | (trap '' INT && cat)
runs=("${losses[@]/#/demo/runs/}")
checkpoints=("${runs[@]/%//checkpoints/epoch_$epochs.pt}")

say "3/4 Zero-shot classification and retrieval on the test split"
"$python" -m eval.shapes --model demo-resnet --checkpoint "${checkpoints[@]}" --untrained \
  --data-dir demo/test --device cpu --json demo/shapes.json

say "4/4 Curves and a report"
"$python" -m eval.report demo/runs/*/ --output demo

say "Done. The curves are in demo/curves.png. Stock OpenCLIP loads the checkpoints:
    open_clip.add_model_config('demo/runs/${losses[0]}/model_config')
    model, _, preprocess = open_clip.create_model_and_transforms(
        'demo-resnet', pretrained='${checkpoints[0]}')"
