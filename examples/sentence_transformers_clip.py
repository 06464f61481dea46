"""Train a CLIP or SigLIP model on images and captions in sentence-transformers.

python examples/sentence_transformers_clip.py [--model siglip]
"""

import argparse
import io
from pathlib import Path

import torch
from datasets import Dataset
from demo_pairs import BATCH, print_recall
from PIL import Image
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
    set_seed,
)

import openclip_ext
from openclip_ext.data import with_index
from openclip_ext.data.shapes.write import make_sample
from openclip_ext.integrations.sentence_transformers import GlobalContrastiveLoss

SIZE, WIDTH, LENGTH = 32, 64, 20


def shapes(split: str, samples: int) -> Dataset:
    """Return drawn images and their captions."""
    drawn = [make_sample(seed=0, split=split, index=index) for index in range(samples)]
    images = [Image.open(io.BytesIO(sample.png)) for sample in drawn]
    return Dataset.from_dict({"image": images, "caption": [sample.txt.decode() for sample in drawn]})


def create_model(name: str, captions: list[str], folder: Path) -> SentenceTransformer:
    """Return a small model with random weights. A public model: ``SentenceTransformer("google/siglip2-base-patch16-224")``."""
    words = ["[UNK]", "[PAD]", "[EOS]", *sorted({word for caption in captions for word in caption.split()})]
    vocabulary = {word: number for number, word in enumerate(words)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.post_processor = processors.TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", 2)])
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[EOS]"}
    # SigLIP reads the last token, so its texts have the full length and no mask.
    inputs = ["input_ids"] if name == "siglip" else ["input_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=LENGTH, model_input_names=inputs, **special
    )
    tower = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "max_position_embeddings": LENGTH, "eos_token_id": 2, "bos_token_id": 2}
    towers = {"text_config": tower | text, "vision_config": tower | {"image_size": SIZE, "patch_size": 8}}
    box = {"height": SIZE, "width": SIZE}
    if name == "siglip":
        SiglipModel(SiglipConfig(**towers)).save_pretrained(folder)
        SiglipProcessor(SiglipImageProcessor(size=box), tokenizer).save_pretrained(folder)
    else:
        CLIPModel(CLIPConfig(**towers, projection_dim=WIDTH)).save_pretrained(folder)
        CLIPProcessor(CLIPImageProcessor(size=box, crop_size=box), tokenizer).save_pretrained(folder)
    padded = Transformer(str(folder), processing_kwargs={"text": {"padding": "max_length"}})
    return SentenceTransformer(modules=[padded])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("clip", "siglip"), default="clip")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("demo/sentence-transformers"))
    args = parser.parse_args()

    train, test = shapes("train", args.samples), shapes("test", 500)
    set_seed(0)
    model = create_model(args.model, train["caption"], args.output / "model")
    if args.model == "siglip":
        contrastive = openclip_ext.create_loss("siglip")
    else:
        contrastive = openclip_ext.create_loss("fastclip", embed_dim=WIDTH, num_samples=len(train), epochs=args.epochs)
    loss = GlobalContrastiveLoss(model, contrastive, micro_batch_size=32)
    arguments = SentenceTransformerTrainingArguments(
        str(args.output),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        learning_rate_mapping=loss.learning_rates(),
        warmup_steps=0.1,
        dataloader_drop_last=True,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=with_index(train).rename_column("index", "label"),
        loss=loss,
        callbacks=[loss.callback()],
    )
    trainer.train()
    embeddings = (
        model.encode(list(test[column]), convert_to_tensor=True, normalize_embeddings=True).cpu()
        for column in ("image", "caption")
    )
    print_recall(*embeddings)


if __name__ == "__main__":
    main()
