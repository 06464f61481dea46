"""Lengths of captions for benchmarks: those of real data sets, in tokens with the start and end tokens."""

import glob
import math

import numpy as np
import open_clip
import webdataset

CONTEXT = 77
# Mean and standard deviation of the words of a caption (Changpinyo et al. 2021, arXiv 2102.08981, table 1). Their lengths are
# drawn from a lognormal distribution with these moments.
WEB = {"cc3m": (10.3, 4.5), "cc12m": (20.2, 16.3)}
_TOKENS_PER_WORD = 1.2  # of CLIP's tokenizer in English captions


def caption_lengths(source: str, count: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` lengths in tokens, at most 77. ``source`` is a name in ``WEB``, or a pattern of shards with captions.

    ``padded`` means that every caption has 77 tokens.
    """
    random = np.random.default_rng(seed)
    if source == "padded":
        return np.full(count, CONTEXT)
    if source in WEB:
        mean, deviation = WEB[source]
        variance = math.log1p((deviation / mean) ** 2)
        words = random.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
        return np.clip(np.round(words * _TOKENS_PER_WORD).astype(int) + 2, 3, CONTEXT)
    shards = sorted(glob.glob(source))
    captions = [sample["txt"] for sample in webdataset.WebDataset(shards, shardshuffle=False).decode()]
    chosen = random.choice(captions, count)
    return (open_clip.get_tokenizer("ViT-B-32")(chosen.tolist()).argmax(dim=1) + 1).numpy()
