#!/usr/bin/env bash
# Train the models behind the layer decays of openclip_ext/training/recipes/finetune.json: with --image-layer-decay 1
# --text-layer-decay 1, the second command has the better R@1. docs/experiments/icons.md and demo-set.md describe the data.
set -euo pipefail

openclip-ext train --model demo-resnet --train-data 'icons-11k/train/{00000..00010}.tar' --batch-size 64 --epochs 4 --lr 1e-3 \
  --warmup 100 --precision fp32 --device cpu --workers 1 --loss openclip --seed 0 --name icons
openclip-ext train --model demo-resnet --pretrained logs/icons/checkpoints/epoch_4.pt \
  --train-data 'demo/train/{00000..00003}.tar' --val-data 'demo/test/{00000..00001}.tar' --val-frequency 10 \
  --batch-size 64 --epochs 10 --lr 1e-3 --warmup 50 --wd 0.1 --image-layer-decay 0.7 --text-layer-decay 0.7 \
  --precision fp32 --device cpu --workers 1 --loss neuclip --prototypes 1024 --temperature-scheme constant --seed 0
