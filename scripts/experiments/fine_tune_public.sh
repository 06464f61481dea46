#!/usr/bin/env bash
# Fine-tune released models on Flickr30k and on pairs of one domain, and score what they gain and what they keep (ImageNet).
# Needs a GPU and a network, and these data:
#
#   flickr30k/train.parquet, flickr30k/val.parquet   pairs of images and captions
#   domain/train.parquet, domain/val.parquet         your pairs, for example of products or medical images
#   general.parquet                                  a few thousand general pairs to rehearse, for example of CC12M
#   datacomp/                                        openclip-ext download --data-dir datacomp --tasks imagenet1k
#
#   bash scripts/experiments/fine_tune_public.sh
#
# MODELS ("MODEL:WEIGHTS ..."), SETS, LOSSES, RATES, SEEDS, KEPT and FLAGS change the comparison. Each run ends with its table of
# mixes. The curves of own pairs against KEPT are in curves/. A killed script continues when you start it again.
set -euo pipefail

models="${MODELS:-ViT-B-16-SigLIP2:webli ViT-B-32:laion2b_s34b_b79k}"
kept="${KEPT:---data-dir datacomp --tasks imagenet1k}"
mkdir -p curves

for model in $models; do
  for set in ${SETS:-flickr30k domain}; do
    for loss in ${LOSSES:-default openclip queueclip}; do
      for lr in ${RATES:-3e-6 1e-5 3e-5}; do
        for seed in ${SEEDS:-0 1 2}; do
          weights="${model#*:}"
          name="${model%%:*}-$set-$loss-$lr-$seed"
          run="logs/$name"
          # The default loss of --config finetune is siglip for SigLIP models, else queueclip.
          [[ $loss == default ]] && of_loss=() || of_loss=(--loss "$loss")
          # shellcheck disable=SC2086  # FLAGS and KEPT have several words
          [[ -f $run/interpolation.json ]] || openclip-ext train --config finetune --name "$name" --resume latest \
            --model "${model%%:*}" --pretrained "$weights" --train-data "$set/train.parquet" --val-data "$set/val.parquet" \
            --keep-data general.parquet --lr "$lr" --seed "$seed" ${of_loss[@]+"${of_loss[@]}"} ${FLAGS:-}
          # shellcheck disable=SC2086
          openclip-ext evaluate "$run" --interpolate 0,0.25,0.5,0.75,1 --val-data "$set/val.parquet" $kept \
            | tee "curves/$name.txt"
        done
      done
    done
  done
done
