#!/usr/bin/env bash
# Fine-tune a model on class folders, in which most captions of a batch are equal: with and without --equal-captions mask.
#
#   bash scripts/experiments/class_folders.sh START.pt FOLDER
#
# START.pt is a checkpoint of demo-resnet, trained on icons-11k. The classes are scikit-learn's 1,797 handwritten digits, drawn
# dark on white: 1,000 to train, 300 to choose the mix of weights and the learning rate, and 497 to test. Prints the test accuracy
# of each run.
set -euo pipefail
start=$1 folder=$2
[[ -d "$folder/test" ]] || python - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
names = "zero one two three four five six seven eight nine".split()
order = np.random.default_rng(0).permutation(len(digits.images))
for split, rows in (("train", order[:1000]), ("val", order[1000:1300]), ("test", order[1300:])):
    for row in rows:
        path = Path(sys.argv[1], split, names[digits.target[row]], f"{row}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (255 - digits.images[row] * 255 / 16).astype("uint8")
        Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC).convert("RGB").save(path)
PYTHON
for lr in 1e-5 1e-4 1e-3; do
  for seed in 0 1 2; do
    for loss in openclip queueclip; do
      for equal in negative mask; do
        name=$loss-$equal-$lr-$seed
        [[ -e "$folder/runs/$name/interpolation.json" ]] || python -m openclip_ext train --config finetune --model demo-resnet \
          --pretrained "$start" --train-data "$folder/train" --caption-template "the digit {}" --val-data "$folder/val" \
          --val-classes "$folder/val" --loss "$loss" --equal-captions "$equal" --lr "$lr" --precision fp32 --device cpu \
          --workers 0 --seed "$seed" --logs "$folder/runs" --name "$name" --resume latest
        python -m openclip_ext evaluate "$folder/runs/$name/checkpoints/interpolated.pt" --tasks "$folder/test" \
          --template "the digit {}" --device cpu --workers 0 --output-dir "$folder/results/$name"
      done
    done
  done
done
