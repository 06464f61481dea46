#!/usr/bin/env bash
# Train CLIP with a global contrastive loss on images drawn on this machine, and score it on combinations it never saw.
# Needs no GPU, no download besides the Python packages, and a few minutes on two cores.
#
#   bash scripts/quickstart.sh           # NeuCLIP
#   bash scripts/quickstart.sh openclip  # another loss, to compare; the picture shows all runs made so far
#
# You can interrupt it at any time: the next start continues where it stopped. All output is in demo/.
# EPOCHS (default 3) sets the number of epochs.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_environment.sh"

loss="${1:-neuclip}"
epochs="${EPOCHS:-3}"
options=()
case "$loss" in # 4096 prototypes, the default, are meant for millions of samples
  neuclip) options=(--prototypes 1024 --temperature-scheme global --no-verify-fit) ;; # as published
  queueclip) options=(--prototypes 1024) ;;
esac
# On tensors this small one thread is as fast as two, and much faster on shared cores, where OpenMP's threads spin while
# they wait for each other. The second core decodes images.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

say "1/4 Demo set: 20,000 images to train on, 4,000 to test on"
"$python" -m openclip_ext.data.shapes --output demo/train --num-samples 20000 --split train
"$python" -m openclip_ext.data.shapes --output demo/test --num-samples 4000 --split test

say "2/4 Training with --loss $loss"
train=(
  "$python" -m openclip_ext.training.main
  --loss "$loss" ${options[@]+"${options[@]}"}
  --train-data 'demo/train/{00000..00019}.tar'
  --model demo-resnet
  --batch-size 64 --epochs "$epochs" --lr 1e-3 --warmup 100
  --precision fp32 --device cpu --workers 1
  --logs demo/runs --name "$loss" --resume latest --save-every-steps 100 --log-every-n-steps 20
)
printf '%q ' "${train[@]/#"$root/"/}"
printf '\n'
"${train[@]}"

say "3/4 Zero-shot classification and retrieval on the test split"
"$python" -m eval.shapes --model demo-resnet --checkpoint "demo/runs/$loss/checkpoints/epoch_$epochs.pt" --untrained \
  --data-dir demo/test --device cpu --json "demo/runs/$loss/shapes.json"

say "4/4 Curves"
"$python" -m openclip_ext.diagnostics.curves demo/runs/*/ --output demo/curves.png

say "Done. The curves are in demo/curves.png. Stock OpenCLIP loads the checkpoint:
    open_clip.add_model_config('demo/runs/$loss/model_config')
    model, _, preprocess = open_clip.create_model_and_transforms(
        'demo-resnet', pretrained='demo/runs/$loss/checkpoints/epoch_$epochs.pt')"
if [[ "$loss" != openclip ]]; then
  printf '    To compare with OpenCLIP'"'"'s own loss: bash scripts/quickstart.sh openclip\n'
fi
