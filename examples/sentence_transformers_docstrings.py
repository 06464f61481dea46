"""Train a sentence encoder from scratch to match summaries to texts, with docstrings of installed packages.

python examples/sentence_transformers_docstrings.py --loss fastclip

A pair is the first paragraph of a docstring (the summary) and the remaining text. The packages are numpy, pandas, networkx
and Pillow. ``--loss mnrl`` and ``--loss cached-mnrl`` train with losses of sentence-transformers on the same pairs.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, WordEmbeddings
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from torch import nn
from transformers import set_seed

import openclip_ext
from openclip_ext.data import with_index
from openclip_ext.evaluation.ranks import retrieval_metrics
from openclip_ext.integrations.sentence_transformers import GlobalContrastiveLoss

PACKAGES = ("numpy", "pandas", "networkx", "PIL")
WIDTH = 256
VOCABULARY, MAX_WORDS = 8000, 128
# Hashes of the summaries, modulo 100.
SPLITS = {"test": range(10), "validation": range(10, 20), "train": range(20, 100)}


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yield the summary and the remaining text of each docstring in a package. The package is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        if "tests" in path.parts or "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                summary, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
                yield " ".join(summary.split()), " ".join(rest.split())


def pairs(packages: list[str], cache: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split, without duplicate texts; read them from ``cache`` if it exists."""
    if not cache.is_file():
        found: dict[str, str] = {}
        texts: set[str] = set()
        for package in packages:
            for summary, rest in docstrings(package):
                if 4 <= len(summary.split()) <= 30 and len(rest.split()) >= 15 and rest not in texts:
                    texts.add(rest)
                    found.setdefault(summary, rest)
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(sorted(found.items())))
    split: dict[str, list[tuple[str, str]]] = {name: [] for name in SPLITS}
    for summary, rest in json.loads(cache.read_text()):
        percent = int(hashlib.sha256(summary.encode()).hexdigest(), 16) % 100
        split[next(name for name, part in SPLITS.items() if percent in part)].append((summary, rest))
    return split


def create_model(texts: list[str]) -> SentenceTransformer:
    """Return an encoder that averages learned word embeddings. Its vocabulary is the most frequent words of ``texts``."""
    counts = Counter(word.strip(string.punctuation) for text in texts for word in text.lower().split())
    words = [word for word, _ in counts.most_common(VOCABULARY)]
    tokenizer = WhitespaceTokenizer(words, do_lower_case=True)
    start = torch.randn(len(words), WIDTH)
    embeddings = WordEmbeddings(tokenizer, start, update_embeddings=True, max_seq_length=MAX_WORDS)
    return SentenceTransformer(modules=[embeddings, Pooling(WIDTH)])


def create_loss(name: str, model: SentenceTransformer, num_samples: int, epochs: int, batch: int) -> nn.Module:
    """Return a loss of sentence-transformers (mnrl, cached-mnrl) or of openclip_ext, with default options."""
    if name == "mnrl":
        return losses.MultipleNegativesRankingLoss(model)
    if name == "cached-mnrl":
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=batch)
    options = {"prototypes": 1024} if name == "neuclip" else {"epochs": epochs}
    return GlobalContrastiveLoss(
        model, openclip_ext.create_loss(name, embed_dim=WIDTH, num_samples=num_samples, **options)
    )


def evaluate(model: SentenceTransformer, of_split: list[tuple[str, str]]) -> dict[str, float]:
    """Return the recall among all pairs ``of_split``, and the number of pairs."""
    features = [
        model.encode(list(texts), convert_to_tensor=True, normalize_embeddings=True)
        for texts in zip(*of_split, strict=True)
    ]
    metrics = retrieval_metrics(*features)
    names = {"summary_to_text_R@1": "image_to_text_R@1", "summary_to_text_R@10": "image_to_text_R@10"}
    names["text_to_summary_R@1"] = "text_to_image_R@1"
    return {ours: metrics[name] for ours, name in names.items()} | {"pairs": len(of_split)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", default="fastclip", help="mnrl, cached-mnrl, or a loss of openclip_ext")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--batch", type=int, default=64, help="pairs in memory; a cached-mnrl batch has 8 times as many"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--output", type=Path, default=Path("demo/docstrings"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    split = pairs(args.packages, args.output / f"pairs-{'-'.join(args.packages)}.json")
    print({name: len(part) for name, part in split.items()})
    summaries, texts = (list(column) for column in zip(*split["train"], strict=True))
    set_seed(args.seed)
    model = create_model(summaries + texts)
    loss = create_loss(args.loss, model, len(texts), args.epochs, args.batch)
    ours = isinstance(loss, GlobalContrastiveLoss)
    arguments = SentenceTransformerTrainingArguments(
        str(args.output / args.loss),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch * (8 if args.loss == "cached-mnrl" else 1),
        learning_rate=args.lr,
        learning_rate_mapping=loss.learning_rates() if ours else {},
        warmup_steps=0.1,
        dataloader_drop_last=True,
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=50,
        seed=args.seed,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    train = Dataset.from_dict({"anchor": summaries, "positive": texts})
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=with_index(train).rename_column("index", "label") if ours else train,
        loss=loss,
        callbacks=[loss.callback()] if ours else [],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    for name in ("validation", "test"):
        print(
            json.dumps(
                {"loss": args.loss, "lr": args.lr, "seed": args.seed, "split": name} | evaluate(model, split[name])
            )
        )


if __name__ == "__main__":
    main()
