"""Train a CLIP model from transformers with FastCLIP's loss in ``transformers.Trainer``.

python examples/transformers_trainer.py [--resume]
"""

import argparse

import torch
from demo_pairs import BATCH, CONTEXT_LENGTH, Shapes, print_recall
from transformers import CLIPConfig, CLIPModel, TrainingArguments, set_seed

import openclip_ext
from openclip_ext.data import with_index
from openclip_ext.integrations.transformers import ContrastiveTrainer


def create_model() -> CLIPModel:
    tower = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 49408, "max_position_embeddings": CONTEXT_LENGTH, "eos_token_id": 49407}
    vision = {"image_size": 32, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=tower | text, vision_config=tower | vision, projection_dim=64))


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    batch = {
        "pixel_values": torch.stack([sample["image"] for sample in samples]),
        "input_ids": torch.stack([sample["text"] for sample in samples]),
    }
    if "index" in samples[0]:
        batch["index"] = torch.tensor([sample["index"] for sample in samples])
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", default="demo/transformers")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    train, test = with_index(Shapes("train", args.samples)), Shapes("test", 500)
    set_seed(0)
    trainer = ContrastiveTrainer(
        create_model(),
        TrainingArguments(
            args.output,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            dataloader_drop_last=True,
            use_cpu=not torch.cuda.is_available(),  # without it, several CPU processes cannot communicate
            remove_unused_columns=False,
            save_steps=100,
            save_total_limit=2,
            logging_steps=50,
            report_to="none",
        ),
        train_dataset=train,
        data_collator=collate,
        contrastive_loss=openclip_ext.create_loss("fastclip", embed_dim=64, num_samples=len(train), epochs=args.epochs),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    model = trainer.model.eval()
    with torch.no_grad():
        outputs = model(pixel_values=test.images.to(model.device), input_ids=test.texts.to(model.device))
    if trainer.is_world_process_zero():
        print_recall(outputs.image_embeds.cpu(), outputs.text_embeds.cpu())


if __name__ == "__main__":
    main()
