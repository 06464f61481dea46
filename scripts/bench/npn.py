"""Compare the time of NeuCLIP's ``T_u`` prototype updates per step with the time of only their matrix products.

    python -m scripts.bench.npn [--batch-size 512] [--prototypes 4096] [--embed-dim 512] [--output results.json]

Three candidates alternate in one run: only the two matrix products of each update, updates with our closed form of the
gradient, and updates by ``autograd`` with ``torch.optim.Adagrad``. The throughput is computed from 8·B·m·d flops per update
(batch size B, m prototypes, dimension d).
"""

import argparse
import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from openclip_ext import create_loss
from openclip_ext.contrastive.batch import ContrastStats, LocalBatch
from openclip_ext.contrastive.normalizer import contrast_minibatch
from openclip_ext.losses.neuclip import PrototypeNormalizer
from scripts.bench import harness

BASELINE = "matrix products"
TAU = 0.07
EPS = 1e-14


def make_contrast(args: argparse.Namespace) -> ContrastStats:
    images, texts = harness.unit_features(args.batch_size, args.embed_dim, args.device)
    scale = torch.tensor(1 / TAU, device=args.device)
    return contrast_minibatch(LocalBatch(images, texts, scale, None, scale.dtype), gather=False)


@torch.no_grad()
def bare_products(features: Tensor, weights: Tensor, updates: int) -> None:
    for _ in range(updates):
        similarities = features @ weights.transpose(1, 2)
        similarities.transpose(1, 2) @ features


def autograd(weights: torch.nn.Parameter, optimizer: torch.optim.Optimizer, stats: ContrastStats, updates: int) -> None:
    number = weights.shape[1]
    for _ in range(updates):
        cosines = stats.batch.features @ normalize(weights, dim=2).transpose(1, 2)
        exponents = (cosines - stats.batch.positive[:, None]) / TAU
        alpha = torch.logsumexp(exponents, dim=2) - math.log(number)
        alpha = torch.logaddexp(alpha, alpha.new_full((), math.log(EPS)))
        loss = (TAU * (torch.exp(stats.log_estimate - alpha) + alpha)).mean(dim=1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make_normalizer(args: argparse.Namespace) -> PrototypeNormalizer:
    options = {"eps": EPS, "prototypes": args.prototypes, "normalizer_updates": args.updates, "normalizer_lr": 1.0}
    return create_loss("neuclip", embed_dim=args.embed_dim, **options).normalizer.to(args.device)


def measure(args: argparse.Namespace) -> dict[str, harness.Table]:
    stats = make_contrast(args)
    normalizer = make_normalizer(args)
    normalizer.step(stats)
    plain = torch.nn.Parameter(normalizer.prototypes.clone())
    candidates = {
        BASELINE: partial(bare_products, stats.batch.features, normalizer.prototypes.clone(), args.updates),
        "closed form": partial(normalizer.fit, stats),
        "autograd": partial(autograd, plain, torch.optim.Adagrad([plain], lr=1.0), stats, args.updates),
    }
    results = harness.take_turns(candidates, BASELINE, args)
    flops = 8 * args.batch_size * args.prototypes * args.embed_dim * args.updates
    for row in results.values():
        row["gflops"] = flops / row["ms"] / 1e6
    return {"": results}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in {"--batch-size": 512, "--prototypes": 4096, "--embed-dim": 512}.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--updates", type=int, default=10, help="number of updates per step, T_u")


if __name__ == "__main__":
    harness.main(__doc__, add_arguments, measure, baseline=BASELINE)
