"""Train a CLIP model from OpenCLIP with FastCLIP's loss in a custom training loop with accelerate.

python examples/accelerate_loop.py [--resume]
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from demo_pairs import BATCH, Shapes, create_model, print_recall
from torch.utils.data import DataLoader

import openclip_ext
from openclip_ext.data import with_index
from openclip_ext.integrations.model_loss import ModelLoss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--stop-after", type=int, default=None, metavar="EPOCH", help="stop after this many epochs; --resume continues"
    )
    parser.add_argument("--output", default="demo/accelerate")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    # The order of this sampler depends only on seed and epoch, so a resumed run has the order of an uninterrupted run.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0))
    train, test = with_index(Shapes("train", args.samples)), Shapes("test", 500)
    model, *_ = create_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    loss = ModelLoss(
        openclip_ext.create_loss("fastclip", embed_dim=64, num_samples=len(train), epochs=args.epochs), model
    )
    # Without drop_last=True in the loader, several processes would repeat samples at the end of an epoch.
    loss.check_loop(accelerator.gradient_accumulation_steps, repeats=False)
    loss.separate_rate(optimizer)
    accelerator.register_for_checkpointing(loss)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    set_seed(0)
    first = 0
    if args.resume:
        accelerator.load_state(args.output)
        first = loss.loss.epoch + 1
    for epoch in range(first, args.epochs if args.stop_after is None else args.stop_after):
        loss.loss.start_epoch(epoch)
        loader.set_epoch(epoch)
        for batch in loader:
            index = batch.pop("index")
            value = loss(model(**batch), index)
            accelerator.backward(value)
            loss.step(optimizer)
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {value.item():.4f}, infonce {loss.loss.metrics()['infonce']:.4f}")
        accelerator.save_state(args.output)
    model = accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        outputs = model(test.images.to(accelerator.device), test.texts.to(accelerator.device))
    if accelerator.is_main_process:
        print_recall(outputs["image_features"].cpu(), outputs["text_features"].cpu())


if __name__ == "__main__":
    main()
